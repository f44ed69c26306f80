// Owns the reading of one trajectory: prompt, turns, calls, observations, end, and how each is trained.

function drawTurns() {
  const box = document.getElementById("turns");
  const [group, leaf] = [currentGroup(), currentLeaf()];
  setCursor(null);
  if (!group || !leaf) {
    box.replaceChildren(make("p", "empty", "Choose a group and a leaf to read its tokens."));
    return;
  }
  const block = blockOf(group);
  const tree = block.trees[leaf.tree];
  const path = pathTo(tree, leaf.node);
  const parts = [turnsHeader(group, tree, leaf, path), promptPart(block)];
  path.forEach((node, index) => parts.push(turnPart(group, block, path, index)));
  parts.push(endPart(path.at(-1)));
  box.replaceChildren(...parts);
  box.scrollTop = 0;
  shadeTurns();
  markFound();
}

function turnsHeader(group, tree, leaf, path) {
  const title = make("h3", "", `t${tree.index} / ${path.at(-1).node}`);
  const shades = make("span", "switch", shadeButton("advantage"), shadeButton("logprob"));
  const bar = make("div", "bar", title, button("‹", "Previous leaf (p)", () => neighbourLeaf(-1)), button("›", "Next leaf (n)", () => neighbourLeaf(1)), shades);
  return make("div", "turns-header", bar, make("p", "credit", ...creditLine(group, leaf, path)), make("p", "figures", datumLine(path.at(-1))));
}

function shadeButton(name) {
  const element = button(name, "Shade tokens by " + name + " (s)", () => go({ shade: name }, true));
  element.dataset.shade = name;
  return element;
}

// How this leaf's advantage came about, in numbers that can be checked by hand.
function creditLine(group, leaf, path) {
  const member = path.at(-1).member;
  const parts = [make("i", "reward " + rewardClass(leaf)), "reward ", make("b", "", reward(leaf.reward))];
  if (!member) return [...parts, " · not trained: " + notTrained(group, leaf)];
  parts.push(" · advantage ", make("b", "", signed(leaf.advantage, 4)), byHand(group, leaf));
  return parts;
}

// Where its tokens went: the datums of its segments, and the factor that packing put on their advantages.
function datumLine(node) {
  if (!node.member) return "in no datum";
  const datums = (node.member.datums ?? []).map((datum) =>
    `datum ${datum.datum ?? -1}, micro-batch ${datum.micro_batch ?? -1}, advantages × ${number(datum.scale, 4)}`);
  return datums.join(" · ") || "in no datum: none of its advantages differs from 0";
}

function byHand(group, leaf) {
  const { estimator } = STEP_OF.get(group.step);
  const [value, mean, std] = [number(leaf.reward, 4), number(group.mean, 4), number(group.std, 4)];
  if (estimator === "group_mean") return ` = ${value} ${leaf.reward === null ? "" : minus(group.mean, mean)}`;
  if (estimator === "grpo" && group.std) return ` = (${value} ${minus(group.mean, mean)}) / ${std}`;
  return ` (mean ${mean}, std ${std})`;
}

const minus = (value, text) => (value < 0 ? "+ " + text.slice(1) : MINUS + " " + text);

function notTrained(group, leaf) {
  if (STEP_OF.get(group.step).problem) return "advantages are not derived";
  return leaf.reward === null ? `it ended ${leaf.outcome.replace("_", " ")}` : "it was not chosen";
}

function promptPart(block) {
  return givenPart("Prompt", `${plural(block.prompt_count, "token")}, outside the loss`, promptTokens(block), block.prompt_cut, false,
    make("p", "provenance", (block.params ?? []).map(([name, value]) => `${name} ${value}`).join(" · ")));
}

function givenPart(name, remark, tokens, missing, open, ...more) {
  const details = make("details", "part given-part", make("summary", "", make("b", "", name), make("span", "figures", remark)), ...more);
  const fill = () => {
    if (!details.open || details.filled) return;
    details.filled = true;
    details.append(stretch(tokens, missing, null, name));
    markFound();
  };
  details.addEventListener("toggle", fill);
  details.open = open;
  fill();
  return details;
}

function turnPart(group, block, path, index) {
  const node = path[index];
  const tokens = nodeTokens(node);
  const facts = tokenFacts(group, block, path, index);
  const total = facts.logprobs.reduce((sum, value) => sum + value, 0);
  const head = make("header", "", make("b", "", `Turn ${index + 1}`), make("span", "figures",
    `${plural(node.count ?? 0, "token")} · logprob ${number(total, 2)}, mean ${number(total / (tokens.numbers.length || 1), 3)}` +
    ` · ${facts.trained ? "advantage " + signed(facts.advantage, 4) : facts.why}` +
    ((node.members ?? 0) > 1 ? ` · shared by ${node.members} members, mean ${signed(node.advantage, 4)}` : "")));
  const part = make("section", "part turn", head, stretch(tokens, node.tokens_cut, facts, `Turn ${index + 1}`),
    node.tool ? callPart(node) : null, observationPart(node, index === path.length - 1), provenance(node));
  part.id = "turn-" + index;
  part.dataset.node = node.node;
  return part;
}

// What is known of each sampled token of a turn, for this trajectory's own datum.
function tokenFacts(group, block, path, index) {
  const node = path[index];
  const member = path.at(-1).member;
  const logprobs = unpackFloats(node.logprobs ?? "");
  const reference = node.reference ? unpackFloats(node.reference) : null;
  const isTrained = member !== null && (member.trained?.[index] ?? true);
  const advantage = member ? (member.credit ?? member.advantages)[index] : null;
  const beta = (block.kl_beta ?? 0) * (member?.kl_weights?.[index] ?? 0);
  const why = member === null ? "not trained" : "trained in another leaf's datum";
  const facts = (at) => ({
    logprob: logprobs[at], reference: reference ? reference[at] : null, trained: isTrained, why,
    advantage: isTrained ? advantage - (reference ? beta * (logprobs[at] - reference[at]) : 0) : null,
  });
  return Object.assign(facts, { scale: STEP_OF.get(group.step).scale, trained: isTrained, advantage, why, logprobs });
}

function callPart(node) {
  const call = make("div", "call", picture("search"), make("b", "", node.tool));
  for (const [name, value] of node.arguments ?? []) {
    const argument = make("span", "argument", make("span", "label", name));
    argument.append(longText("", value));
    call.append(argument);
  }
  return call;
}

function observationPart(node, isLast) {
  const seen = node.observation;
  if (!seen) return null;
  const remarks = [
    seen.status ?? "", seen.backend ?? "", (seen.latency ?? 0) > 0 ? milliseconds(seen.latency) : "",
    seen.cached ? "cached" : "", seen.truncated ? "cut to fit" : "", seen.documents?.length ? plural(seen.documents.length, "document") : "",
    isLast ? "nothing was sampled after it" : "outside the loss",
  ].filter(Boolean).join(" · ");
  const tokens = observationTokens(node);
  const part = givenPart("Observation", `${plural(tokens.numbers.length + (seen.tokens_cut ?? 0), "token")} · ${remarks}`, tokens, seen.tokens_cut, true,
    seen.error ? make("p", "error", seen.error) : null);
  part.classList.toggle("failed", seen.ok === false);
  if (!seen.reset) return part;
  const reset = readTokens(seen.reset);
  return make("div", "", part, givenPart("New segment", `the template rewrote the history: ${plural(reset.numbers.length, "token")} of prompt, outside the loss`, reset, seen.reset_cut, false));
}

function provenance(node) {
  return make("p", "provenance", `${node.node} · policy v${node.policy_version ?? 0} · seed ${node.seed ?? 0}, request ${node.request ?? 0}, sample ${node.sample_index ?? 0}` +
    ` · stop: ${node.stop_reason || "–"}` + (node.node_score ? ` · node reward ${reward(node.node_score.value)} (${node.node_score.scorer})` : ""));
}

function endPart(node) {
  const box = make("section", "part end");
  box.append(make("b", "", (node.outcome ?? "open").replace("_", " ")));
  if (node.answer !== null && node.answer !== undefined) box.append(longText("answer", node.answer));
  if (node.detail) box.append(longText("figures", node.detail));
  if (node.score) {
    const components = (node.score.components ?? []).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    box.append(make("p", "figures", `reward ${reward(node.score.value)} by ${node.score.scorer} ${node.score.version}` + (components ? `: ${components}` : "")));
  }
  return box;
}

function shadeTurns() {
  for (const box of document.querySelectorAll("#turns .tokens.sampled")) shadeStretch(box.stretch);
  for (const element of document.querySelectorAll("#turns [data-shade]")) {
    element.setAttribute("aria-pressed", String(element.dataset.shade === state.shade));
  }
}

// Bring the turn that the address names into sight.
function showTurn() {
  for (const part of document.querySelectorAll("#turns .turn")) {
    const here = state.turn !== null && part.dataset.node === state.turn;
    part.classList.toggle("here", here);
    if (here) part.scrollIntoView({ block: "start" });
  }
}
