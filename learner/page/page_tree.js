// Owns the drawing of a group's trees: one row per leaf, a turn to the right of the turn that it continues.
// A shared prefix is drawn once, on the row of its first leaf. Only rows in sight are in the document.

const ROW = 30;
const TREE_GAP = 10;
const GUTTER = 34;
const NODE_HEIGHT = 22;
let layout = null;

function layOutTrees(block) {
  const nodes = [];
  const lines = [];
  let top = 0;
  block.trees.forEach((tree, place) => {
    if (place) top += TREE_GAP;
    const first = top;
    let row = top - ROW;
    tree.nodes.forEach((node) => {
      const parent = tree.nodes[node.parent];
      const continues = parent && parent.children[0] === node.position && !parent.leaf;
      if (!continues) row += ROW;
      node.top = row;
      nodes.push(node);
    });
    tree.unborn.forEach(([name, outcome, detail]) => {
      row += ROW;
      lines.push({ top: row, name, outcome, detail });
    });
    top = row + ROW;
    tree.top = first;
    tree.bottom = top;
  });
  const depth = Math.max(0, ...nodes.map((node) => node.depth)) + 1;
  return { block, nodes, lines, height: top, depth };
}

function drawTrees() {
  const box = document.getElementById("trees");
  const group = currentGroup();
  layout = null;
  if (!group) {
    const step = STEP_OF.get(state.step);
    box.replaceChildren(make("p", "empty", step?.problem ? `Step ${step.step} is not on this page: ${step.problem}` : "No groups to look at yet."));
    return;
  }
  layout = layOutTrees(blockOf(group));
  layout.group = group;
  layout.forest = withAttributes(make("div", "forest"), { role: "tree", tabindex: "0", "aria-label": "Trees" });
  layout.canvas = make("div", "canvas");
  layout.canvas.style.height = layout.height + 8 + "px";
  layout.forest.append(layout.canvas);
  layout.forest.addEventListener("scroll", () => requestAnimationFrame(drawForest), { passive: true });
  layout.forest.addEventListener("keydown", treeKey);
  layout.header = make("span", "columns", make("span", "", "reward"), make("span", "", "adv."), make("span", "", "answer"));
  box.replaceChildren(stepHeader(STEP_OF.get(group.step)), groupHeader(group), forestHeader(group), layout.forest);
  box.scrollTop = 0;
  new ResizeObserver(drawForest).observe(layout.forest);
  markTrees();
}

function stepHeader(step) {
  const facts = [
    ["policy", `v${step.policy_in ?? 0} → v${step.policy_out ?? 0}`],
    ["members", count(step.members ?? 0)],
    ["datums", `${count(step.datums ?? 0)} in ${plural(step.micro_batches ?? 0, "micro-batch", "micro-batches")}`],
    ...(step.recipe ?? []),
  ];
  const verdict = step.verdict === "match" ? make("span", "verdict match", picture("answer"), "re-derived: match") :
    step.verdict === "mismatch" ? make("span", "verdict mismatch", "re-derived: MISMATCH") : null;
  if (verdict) verdict.title = "The step was re-derived from rollout events and compared with its plan, record by record; batch digest " + step.digest;
  const more = make("details", "facts", make("summary", "", make("b", "", "Step " + step.step), verdict,
    make("span", "figures", `${step.estimator || "estimator"} · v${step.policy_in ?? 0} → v${step.policy_out ?? 0} · ${plural(step.members ?? 0, "member")}` +
      (step.skipped ? " · skipped, no signal" : ""))),
  table(facts), table((step.tokens ?? []).map(([name, value]) => ["tokens, " + name, count(value)])),
  table((step.metrics ?? []).map(([name, value]) => [name, number(value, 4)])), make("p", "digest", "batch digest " + (step.digest || "–")));
  return make("div", "step-header", more, step.problem ? make("p", "notice", "Advantages are not shown: " + step.problem) : null);
}

function table(pairs) {
  const list = make("dl", "pairs");
  for (const [name, value] of pairs) list.append(make("dt", "", name), make("dd", "", value));
  return list;
}

function groupHeader(group) {
  const title = make("h2", "");
  title.append(longText("", group.question));
  const references = make("p", "references", make("span", "label", "reference"), ...group.references.map((one) => {
    const reference = make("span", "reference");
    reference.append(longText("", one));
    return reference;
  }));
  const facts = [
    group.uid, group.source, plural(group.leaves.length, "leaf", "leaves"),
    group.mean === undefined ? "" : `mean ${number(group.mean)}`,
    group.std === undefined ? "" : `std ${number(group.std)}`,
    `policy v${group.policy_version}`, `staleness ${group.staleness}`,
    group.hidden_leaves ? `${count(group.hidden_leaves)} more leaves are not on this page` : "",
  ].filter(Boolean);
  const formula = INDEX.formulas[STEP_OF.get(group.step).estimator];
  return make("div", "group-header", title, group.references.length ? references : null,
    make("p", "figures", facts.join(" · ")), formula ? make("p", "formula", formula) : null);
}

function forestHeader(group) {
  const unit = group.mode === "tree" ? "Trees" : "Trajectories";
  return make("div", "forest-header", make("span", "", unit), make("span", "scale",
    make("i", "shade n8", ""), make("i", "shade n4", ""), make("i", "shade", ""), make("i", "shade p4", ""), make("i", "shade p8", ""), "advantage"), layout.header);
}

function drawForest() {
  if (!layout) return;
  const { forest, canvas } = layout;
  const results = Math.max(184, Math.min(300, forest.clientWidth * 0.34));
  const column = Math.max(34, Math.min(190, (forest.clientWidth - GUTTER - results - 8) / layout.depth));
  layout.columns = { column, results, right: Math.max(forest.clientWidth - results, GUTTER + column * layout.depth + 6) };
  layout.header.style.left = layout.columns.right - forest.scrollLeft + "px";
  layout.header.style.width = results + "px";
  const from = forest.scrollTop - MARGIN;
  const to = forest.scrollTop + forest.clientHeight + MARGIN;
  const within = (top, bottom = top + ROW) => bottom > from && top < to;
  const svg = draw("svg", { class: "edges", width: layout.columns.right, height: layout.height + 8, "aria-hidden": "true" });
  const parts = [svg];
  for (const tree of layout.block.trees) {
    if (within(tree.top, tree.bottom)) parts.push(treeLabel(tree));
  }
  const onPath = selectedPath();
  for (const node of layout.nodes) {
    const parent = layout.block.trees[node.tree].nodes[node.parent] ?? null;
    const start = parent ? parent.top : layout.block.trees[node.tree].top;
    if (within(start, node.top + ROW)) svg.append(edge(node, parent, onPath.has(node)));
    if (within(node.top)) parts.push(drawNode(node, onPath.has(node)), node.leaf ? drawResult(node, onPath.has(node)) : "");
  }
  for (const line of layout.lines) {
    if (within(line.top)) parts.push(unbornRow(line));
  }
  canvas.replaceChildren(...parts);
}

function treeLabel(tree) {
  const label = make("span", "tree-label", "t" + tree.index);
  label.style.top = tree.top + "px";
  return label;
}

function edge(node, parent, on) {
  const { column } = layout.columns;
  const end = GUTTER + node.depth * column;
  const y = node.top + ROW / 2;
  const start = parent ? GUTTER + (parent.depth + 1) * column - 12 : 20;
  const from = parent ? parent.top + ROW / 2 : layout.block.trees[node.tree].top + ROW / 2;
  const bend = Math.min(start + 6, end - 6);
  const d = from === y ? `M${start} ${y}H${end}` : `M${start} ${from}H${bend - 4}q4 0 4 4V${y - 5}q0 5 5 5H${end}`;
  return draw("path", { class: on ? "edge on" : "edge", d });
}

function shadeClass(value, scale) {
  if (value === null || value === undefined) return "untrained";
  const strength = bucket(Math.abs(value) / (scale || 1));
  return strength ? (value > 0 ? "p" : "n") + strength : "";
}

function nodeLabel(node) {
  if (node.tool) return (node.arguments ?? []).map(([, value]) => value).join(" ") || node.tool;
  if (node.leaf) return node.answer || node.outcome.replace("_", " ");
  return node.observation ? node.observation.status.replace("_", " ") || "observation" : "open";
}

function pictureOf(node) {
  if (node.tool) return picture("search");
  return picture(node.leaf ? (node.answer ? "answer" : "none") : "again");
}

function drawNode(node, on) {
  const { column } = layout.columns;
  const scale = STEP_OF.get(layout.group.step).scale;
  const label = nodeLabel(node);
  const box = make("div", "node " + shadeClass(node.advantage, scale) + (on ? " on" : "") + (isDim(node) ? " dim" : ""),
    pictureOf(node), column > 60 ? make("span", "text", label.slice(0, 60)) : null);
  box.style.top = node.top + (ROW - NODE_HEIGHT) / 2 + "px";
  box.style.left = GUTTER + node.depth * column + "px";
  box.style.width = column - 12 + "px";
  const told = node.leaf ? `, ${node.outcome}, reward ${reward(node.leaf.reward)}` : "";
  withAttributes(box, {
    role: "treeitem", id: nodeId(node), "aria-level": String(node.depth + 1), "aria-selected": String(isTurn(node)),
    "aria-label": `Turn ${node.depth + 1}: ${plainText(label.slice(0, 200))}, advantage ${signed(node.advantage)}${told}`,
    title: `${node.node} · advantage ${signed(node.advantage)}\n${plainText(label.slice(0, 300))}`,
  });
  box.addEventListener("click", () => openNode(node));
  return box;
}

const nodeId = (node) => `node-${node.tree}-${node.position}`;

function drawResult(node, on) {
  const leaf = node.leaf;
  const wrong = leaf.outcome !== "answered" ? leaf.outcome.replace("_", " ") : leaf.answer || "no answer";
  const box = make("div", "result" + (on ? " on" : "") + (isDim(node) ? " dim" : ""), make("i", "reward " + rewardClass(leaf)),
    make("span", "value", reward(leaf.reward)), make("span", "value", leaf.advantage === null ? "–" : signed(leaf.advantage, 2)),
    make("span", leaf.outcome === "answered" ? "answer" : "answer outcome", wrong.slice(0, 80)));
  box.style.top = node.top + "px";
  box.style.left = layout.columns.right + "px";
  box.style.width = layout.columns.results - 6 + "px";
  box.addEventListener("click", () => openNode(node));
  return box;
}

function unbornRow(line) {
  const row = make("div", "unborn", `${line.name} ${line.outcome.replace("_", " ")}: never sampled ${line.detail}`);
  row.style.top = line.top + "px";
  return row;
}

// Note which nodes lead to a leaf that passes the filters.
function lightTrees() {
  const fitting = matching.get(layout.group);
  layout.lit = new Set();
  layout.group.leaves.forEach((leaf, position) => {
    if (!fitting?.has(position)) return;
    const tree = layout.block.trees[leaf.tree];
    for (let at = leaf.node; at >= 0 && !layout.lit.has(tree.nodes[at]); at = tree.nodes[at].parent) layout.lit.add(tree.nodes[at]);
  });
}

const isDim = (node) => isFiltered() && !layout.lit.has(node);

function leafNode() {
  const leaf = currentLeaf();
  return leaf && layout ? layout.block.trees[leaf.tree].nodes[leaf.node] : null;
}

function selectedPath() {
  const leaf = leafNode();
  return new Set(leaf ? pathTo(layout.block.trees[leaf.tree], leaf.position) : []);
}

function turnNode() {
  const path = [...selectedPath()];
  return path.find((node) => node.node === state.turn) ?? path.at(-1) ?? null;
}

const isTurn = (node) => turnNode() === node;

// Open a turn: in the current trajectory when it is on it, else in the first one below it.
function openNode(node) {
  if (selectedPath().has(node)) {
    go({ turn: node.node });
    return;
  }
  const tree = layout.block.trees[node.tree];
  const leaf = tree.nodes[firstLeaf(tree, node.position)].leaf;
  if (leaf) go({ at: leaf.name, turn: node.node });
}

function markTrees() {
  if (!layout) return;
  lightTrees();
  const node = turnNode();
  if (node) {
    const { forest } = layout;
    if (node.top < forest.scrollTop || node.top + ROW > forest.scrollTop + forest.clientHeight) {
      forest.scrollTop = node.top - forest.clientHeight / 2;
    }
    forest.setAttribute("aria-activedescendant", nodeId(node));
  }
  drawForest();
}

function treeKey(event) {
  const node = turnNode();
  if (!node || event.altKey || event.ctrlKey || event.metaKey) return;
  const { nodes } = layout.block.trees[node.tree];
  const order = layout.nodes;
  const here = order.indexOf(node);
  const sameDepth = (by) => {
    for (let at = here + by; at >= 0 && at < order.length; at += by) if (order[at].leaf) return order[at];
    return null;
  };
  const target = {
    ArrowLeft: () => nodes[node.parent],
    ArrowRight: () => [...selectedPath()].find((one) => one.parent === node.position) ?? nodes[node.children[0]],
    ArrowDown: () => sameDepth(1),
    ArrowUp: () => sameDepth(-1),
    Home: () => order[0],
    End: () => order.findLast((one) => one.leaf),
    Enter: () => {
      document.getElementById("turns").focus();
      return null;
    },
  }[event.key];
  if (!target) return;
  event.preventDefault();
  const next = target();
  if (next) openNode(next);
}

function neighbourLeaf(by) {
  const leaves = currentGroup()?.leaves ?? [];
  const here = leaves.indexOf(currentLeaf());
  const leaf = leaves[here + by];
  if (leaf) go({ at: leaf.name, turn: null });
}
