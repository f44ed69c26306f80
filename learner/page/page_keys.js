// Owns keys, theme and the two dialogs.

const HELP = [
  ["/", "search"], ["j, k", "next, previous group"], ["[, ]", "previous, next step"], ["n, p", "next, previous leaf"],
  ["arrows", "in the trees: parent, child, leaf above, leaf below; in a turn: token by token"],
  ["Enter", "from the trees to the turns"], ["s", "shade by advantage or by logprob"], ["t", "theme"], ["?", "these keys"], ["Esc", "leave a field or a dialog"],
];

const COMMANDS = {
  "/": () => document.getElementById("filter-text").focus(),
  j: () => goToGroup(neighbourGroup(1)),
  k: () => goToGroup(neighbourGroup(-1)),
  "[": () => goToStep(-1),
  "]": () => goToStep(1),
  n: () => neighbourLeaf(1),
  p: () => neighbourLeaf(-1),
  s: () => go({ shade: state.shade === "logprob" ? "advantage" : "logprob" }, true),
  t: nextTheme,
  "?": () => show(document.getElementById("help")),
};

function goToStep(by) {
  const here = SHOWN_STEPS.findIndex((step) => step.step === state.step);
  const step = SHOWN_STEPS[here + by];
  if (step) go({ step: step.step, group: null, at: null, turn: null });
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const field = event.target.closest?.("input, select, textarea");
    if (field) {
      if (event.key === "Escape") list.focus();
      return;
    }
    if (event.target.closest?.("dialog")) return;
    const command = COMMANDS[event.key];
    if (!command) return;
    event.preventDefault();
    command();
  });
  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (!by) return;
    event.preventDefault();
    goToGroup(neighbourGroup(by));
  });
}

function startDialogs() {
  const help = document.getElementById("help");
  help.append(make("h2", "", "Keys"), table(HELP), closing(help));
  const about = document.getElementById("about");
  const books = (INDEX.run.books ?? []).map(([name, value]) => ["groups " + name.replace("_", " "), count(value)]);
  about.append(make("h2", "", "Run " + INDEX.run.run_id), table(INDEX.run.facts ?? []), make("h2", "", "Books"), table(books), closing(about));
  document.getElementById("help-open").addEventListener("click", () => show(help));
  document.getElementById("about-open").addEventListener("click", () => show(about));
  document.getElementById("theme").addEventListener("click", nextTheme);
}

// The button at its end has the focus at first, and would scroll its beginning out of sight.
function show(dialog) {
  dialog.showModal();
  dialog.scrollTop = 0;
}

function closing(dialog) {
  return make("p", "closing", button("Close", "Esc", () => dialog.close()));
}

function startHeader() {
  const facts = new Map(INDEX.run.facts ?? []);
  const parts = [INDEX.run.run_id.slice(0, 12), INDEX.run.base_model, facts.get("rollouts"), facts.get("estimator"), plural(INDEX.run.steps_planned ?? STEPS.length, "step")];
  addText(document.getElementById("run"), parts.filter(Boolean).join(" · "));
  const cut = document.getElementById("cut");
  cut.hidden = !INDEX.run.cut;
  if (INDEX.run.cut) addText(cut, INDEX.run.cut);
}
