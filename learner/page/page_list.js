// Owns search, filters, and the list of steps and groups, of which only the rows in sight are in the document.

const STEP_ROW = 40;
const GROUP_ROW = 74;
const MARGIN = 400;
const SLICE_MS = 25;
const MAX_DOTS = 22;
let rows = [];
let matching = new Map();
let searching = 0;
const list = document.getElementById("list");
const canvas = list.firstElementChild;

function rewardClass(leaf) {
  if (leaf.reward === null) return "void";
  if (leaf.reward < 0) return "low";
  if (leaf.reward === 0) return "none";
  return "r" + bucket(leaf.reward / highestReward);
}

const highestReward = Math.max(0, ...GROUPS.flatMap((group) => group.leaves.map((leaf) => leaf.reward ?? 0))) || 1;

function leafFits(leaf) {
  if (state.outcome && leaf.outcome !== state.outcome) return false;
  if (state.min !== "" && !(leaf.reward !== null && leaf.reward >= Number(state.min))) return false;
  if (state.max !== "" && !(leaf.reward !== null && leaf.reward <= Number(state.max))) return false;
  return true;
}

function nodeText(node) {
  node.haystack ??= [
    textOf(node.tokens ?? ""), node.answer ?? "", node.tool ?? "", ...(node.arguments ?? []).flat(),
    textOf(node.observation?.tokens ?? ""), node.observation?.error ?? "",
  ].join("\n").toLowerCase();
  return node.haystack;
}

// The leaves of a group that pass all filters, as a set of positions in group.leaves.
function fittingLeaves(group, words) {
  if (state.source && group.source !== state.source) return new Set();
  const passing = group.leaves.map((leaf, position) => [leaf, position]).filter(([leaf]) => leafFits(leaf));
  const wanted = (found) => new Set(found.map(([, position]) => position));
  if (!words || !passing.length) return wanted(passing);
  group.haystack ??= [group.uid, group.question, group.example, ...group.references].join("\n").toLowerCase();
  if (group.haystack.includes(words)) return wanted(passing);
  const block = blockOf(group);
  return wanted(passing.filter(([leaf]) =>
    pathTo(block.trees[leaf.tree], leaf.node).some((node) => nodeText(node).includes(words))));
}

const isFiltered = () => Boolean(state.text || state.outcome || state.source || state.min !== "" || state.max !== "");

// Search in slices of time, so that typing never waits; a newer search ends an older one.
function startFilter() {
  showFilters();
  searching += 1;
  const mine = searching;
  const words = state.text.trim().toLowerCase();
  const found = new Map();
  let next = 0;
  const slice = () => {
    if (mine !== searching) return;
    const until = performance.now() + SLICE_MS;
    while (next < GROUPS.length && performance.now() < until) {
      const fitting = fittingLeaves(GROUPS[next], words);
      if (fitting.size) found.set(GROUPS[next], fitting);
      next += 1;
    }
    if (next < GROUPS.length) {
      document.getElementById("filter-count").textContent = `Searching ${count(next)} of ${count(GROUPS.length)} groups …`;
      setTimeout(slice);
      return;
    }
    matching = found;
    afterFilter();
  };
  slice();
}

function afterFilter() {
  const leaves = [...matching.values()].reduce((sum, fitting) => sum + fitting.size, 0);
  const total = GROUPS.reduce((sum, group) => sum + group.leaves.length, 0);
  document.getElementById("filter-count").textContent = isFiltered()
    ? `${count(leaves)} of ${plural(total, "trajectory", "trajectories")} in ${plural(matching.size, "group")}`
    : `${plural(total, "trajectory", "trajectories")} in ${plural(GROUPS.length, "group")}`;
  layOutList();
  showInList();
  markTrees();
  markFound();
}

function layOutList() {
  rows = [];
  let top = 0;
  let step = null;
  const add = (row, height) => {
    rows.push({ ...row, top, height });
    top += height;
  };
  const stepsWithoutGroups = isFiltered() ? [] : SHOWN_STEPS.filter((one) => !GROUPS.some((group) => group.step === one.step));
  for (const group of GROUPS) {
    if (!matching.has(group)) continue;
    while (stepsWithoutGroups.length && stepsWithoutGroups[0].step < group.step) add({ step: stepsWithoutGroups.shift() }, STEP_ROW);
    if (group.step !== step) {
      step = group.step;
      add({ step: STEP_OF.get(step) }, STEP_ROW);
    }
    add({ group }, GROUP_ROW);
  }
  for (const one of stepsWithoutGroups) add({ step: one }, STEP_ROW);
  canvas.style.height = top + "px";
}

function drawList() {
  const from = list.scrollTop - MARGIN;
  const to = list.scrollTop + list.clientHeight + MARGIN;
  canvas.replaceChildren(...rows.filter((row) => row.top + row.height > from && row.top < to).map(drawRow));
  const here = currentGroup();
  if (here) list.setAttribute("aria-activedescendant", "group-row-" + here.position);
}

function drawRow(row) {
  const box = row.group ? groupRow(row.group) : stepRow(row.step);
  box.style.top = row.top + "px";
  box.style.height = row.height + "px";
  return box;
}

function stepRow(step) {
  const verdicts = { match: ["verdict match", "match"], mismatch: ["verdict mismatch", "MISMATCH"] };
  const [kind, label] = verdicts[step.verdict ?? ""] ?? ["verdict", step.problem ? "not derived" : ""];
  const box = make("div", "step-row", make("b", "", "Step " + step.step), make("span", kind, label),
    make("span", "figures", step.skipped ? "skipped" : "", typeof step.reward === "number" ? " reward " + number(step.reward) : ""));
  box.setAttribute("role", "presentation");
  return box;
}

function groupRow(group) {
  const fitting = matching.get(group);
  const dots = make("span", "dots", ...group.leaves.slice(0, MAX_DOTS).map((leaf, position) =>
    make("i", "reward " + rewardClass(leaf) + (fitting?.has(position) ? "" : " dim"))),
  group.leaves.length > MAX_DOTS ? "+" + count(group.leaves.length - MAX_DOTS) : "");
  const box = make("div", "group-row", make("span", "question", group.question.slice(0, 240)), dots,
    make("span", "figures", group.mean === undefined ? "" : "mean " + number(group.mean, 2)));
  const here = state.group === group.uid && state.step === group.step;
  withAttributes(box, {
    role: "option", id: "group-row-" + group.position, "aria-selected": String(here),
    "aria-label": `Step ${group.step}, ${plainText(group.question.slice(0, 200))}, ${plural(group.leaves.length, "trajectory", "trajectories")}, mean reward ${number(group.mean, 2)}`,
  });
  box.addEventListener("click", () => go({ step: group.step, group: group.uid, at: null, turn: null }));
  return box;
}

// Bring the current group's row into sight.
function showInList() {
  const row = rows.find((one) => one.group && one.group.uid === state.group && one.group.step === state.step);
  if (row && (row.top < list.scrollTop + STEP_ROW || row.top + row.height > list.scrollTop + list.clientHeight)) {
    list.scrollTop = row.top - list.clientHeight / 3;
  }
  drawList();
}

function neighbourGroup(by) {
  const groups = rows.filter((row) => row.group).map((row) => row.group);
  const here = groups.indexOf(currentGroup());
  return groups[here < 0 ? 0 : Math.max(0, Math.min(groups.length - 1, here + by))] ?? null;
}

function goToGroup(group) {
  if (group) go({ step: group.step, group: group.uid, at: null, turn: null });
}

function startList() {
  const options = (select, all, values) => {
    select.append(withAttributes(make("option", "", all), { value: "" }));
    for (const value of values) select.append(withAttributes(make("option", "", plainText(value)), { value }));
    select.disabled = values.length < 2;
  };
  const outcomes = [...new Set(GROUPS.flatMap((group) => group.leaves.map((leaf) => leaf.outcome)))].sort();
  options(document.getElementById("filter-outcome"), "any outcome", outcomes);
  options(document.getElementById("filter-source"), "any source", [...new Set(GROUPS.map((group) => group.source))].filter(Boolean).sort());
  for (const name of ["text", "outcome", "source", "min", "max"]) {
    const input = document.getElementById("filter-" + name);
    let waiting = 0;
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => go({ [name]: input.value }, true), name === "text" ? 150 : 0);
    });
  }
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("filter-clear").addEventListener("click", () =>
    go({ text: "", outcome: "", source: "", min: "", max: "" }, true));
  list.addEventListener("scroll", () => requestAnimationFrame(drawList), { passive: true });
  new ResizeObserver(drawList).observe(list);
}

function showFilters() {
  for (const name of ["text", "outcome", "source", "min", "max"]) {
    const input = document.getElementById("filter-" + name);
    if (input.value !== state[name] && document.activeElement !== input) input.value = state[name];
    if (document.activeElement === input && name !== "text" && input.value !== state[name]) input.value = state[name];
  }
  document.getElementById("filter-clear").disabled = !isFiltered();
}
