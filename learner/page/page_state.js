// Owns where the reader is: one state, the same as the address, so that a link opens the same place.

const START = {
  step: null, group: null, at: null, turn: null, shade: "advantage",
  text: "", outcome: "", source: "", min: "", max: "",
};
const KEYS = {
  step: "step", group: "group", at: "at", turn: "turn", shade: "shade",
  text: "q", outcome: "outcome", source: "source", min: "min", max: "max",
};
let state = { ...START };
let drawn = null;

function addressOf(values) {
  const query = new URLSearchParams();
  for (const [name, key] of Object.entries(KEYS)) {
    if (values[name] !== null && values[name] !== START[name]) query.set(key, values[name]);
  }
  return "#" + query.toString().replaceAll("%2F", "/");
}

function readAddress() {
  const query = new URLSearchParams(location.hash.slice(1));
  const values = { ...START };
  for (const [name, key] of Object.entries(KEYS)) {
    if (query.has(key)) values[name] = query.get(key);
  }
  values.step = values.step !== null && STEP_OF.has(Number(values.step)) ? Number(values.step) : null;
  if (values.shade !== "logprob") values.shade = "advantage";
  for (const bound of ["min", "max"]) {
    if (values[bound] !== "" && !Number.isFinite(Number(values[bound]))) values[bound] = "";
  }
  return values;
}

// The nearest place that exists: a known group, else one of the step whose rewards differ; and a leaf of it.
function settle(values) {
  let place = { at: values.at, turn: values.turn };
  let group = values.group === null ? null : findGroup(values.group, values.step);
  const step = group?.step ?? values.step ?? GROUPS.at(-1)?.step ?? null;
  if (!group) {
    const those = GROUPS.filter((one) => one.step === step);
    group = those.find(varied) ?? those[0] ?? null;
    place = { at: null, turn: null };
  }
  if (!group) return { ...values, step, group: null, at: null, turn: null };
  const leaf = group.leaves.find((one) => one.name === place.at) ?? group.leaves[0] ?? null;
  return { ...values, ...place, step, group: group.uid, at: leaf?.name ?? null };
}

function varied(group) {
  return new Set(group.leaves.map((leaf) => leaf.reward)).size > 1;
}

// Go somewhere. Filters and shading replace the address, places are added to the history.
function go(changes, replace = false) {
  state = settle({ ...state, ...changes });
  const address = addressOf(state);
  if (address !== location.hash) {
    if (replace) location.replace(address);
    else location.hash = address;
  }
  redraw();
}

function arrive() {
  state = settle(readAddress());
  redraw();
}

function currentGroup() {
  return state.group === null ? null : findGroup(state.group, state.step);
}

function currentLeaf() {
  const group = currentGroup();
  return group?.leaves.find((leaf) => leaf.name === state.at) ?? null;
}

// Draw what changed since the last time.
function redraw() {
  const before = drawn ?? {};
  const changed = (...names) => drawn === null || names.some((name) => before[name] !== state[name]);
  const now = { ...state };
  if (changed("text", "outcome", "source", "min", "max")) startFilter();
  if (changed("step", "group")) {
    markStep();
    showInList();
  }
  if (changed("group", "step")) drawTrees();
  else if (changed("at", "turn")) markTrees();
  if (changed("group", "step", "at")) drawTurns();
  else if (changed("shade")) shadeTurns();
  drawn = now;
  if (changed("turn", "at", "group")) showTurn();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("rolltape-theme", name);
  } catch {
    // Storage may be forbidden for local files; the choice then lasts as long as the page.
  }
}

function nextTheme() {
  const order = ["auto", "light", "dark"];
  setTheme(order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3]);
}

function startTheme() {
  let stored = null;
  try {
    stored = localStorage.getItem("rolltape-theme");
  } catch {
    stored = null;
  }
  document.documentElement.dataset.theme = ["light", "dark"].includes(stored) ? stored : "auto";
}
