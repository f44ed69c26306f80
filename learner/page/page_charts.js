// Owns the curves over the steps of the run; a click goes to the nearest step whose groups are on the page.

const CHART = { height: 118, left: 40, right: 14, top: 12, bottom: 22 };
const SHOWN_STEPS = STEPS.filter((step) => step.shown);
const OTHER = "held-out other"; // evaluations that no line may join to the main ones
let charts = [];

function startCharts() {
  const box = document.getElementById("charts");
  const evals = INDEX.run.evals ?? [];
  const curve = (name) => STEPS.filter((step) => typeof step[name] === "number").map((step) => [step.step, step[name]]);
  charts = [
    { title: "Reward", lines: [{ name: "mean reward", kind: "reward", points: curve("reward") }] },
    {
      title: "Exact match",
      bounds: [0, 1],
      lines: [
        { name: "format", kind: "format", points: curve("format") },
        { name: "exact match", kind: "exact", points: curve("exact_match") },
        ...evals.map((one) => ({
          name: one.differs ? "held-out, " + one.differs : "held-out",
          kind: one.differs ? OTHER : "held-out",
          points: one.points,
        })),
      ],
    },
  ].map((chart) => ({ ...chart, lines: chart.lines.filter((line) => line.points.length) }));
  for (const chart of charts) box.append(chartFrame(chart));
  if (!STEPS.length) box.hidden = true;
  new ResizeObserver(drawCharts).observe(box);
}

function chartFrame(chart) {
  chart.readout = make("span", "readout");
  const others = chart.lines.filter((line) => line.kind === OTHER);
  const keys = chart.lines.filter((line) => line.kind !== OTHER).map((line) => make("span", "key " + line.kind, line.name));
  if (others.length) {
    const names = others.map((line) => line.name).join("\n");
    keys.push(withAttributes(make("span", "key " + OTHER, "asked otherwise"), { title: names }));
  }
  const legend = make("span", "legend", ...keys);
  chart.box = withAttributes(make("div", "plot"), { role: "img", "aria-label": describe(chart) });
  chart.box.addEventListener("pointermove", (event) => hoverChart(chart, event));
  chart.box.addEventListener("pointerleave", () => hoverChart(chart, null));
  chart.box.addEventListener("click", (event) => {
    const step = nearest(SHOWN_STEPS, chart, event);
    if (step) go({ step: step.step, group: null, at: null, turn: null });
  });
  return make("figure", "", make("figcaption", "", make("b", "", chart.title), legend, chart.readout), chart.box);
}

function describe(chart) {
  return chart.lines.map((line) => {
    const [first, last] = [line.points[0], line.points.at(-1)];
    return `${line.name}: ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}`;
  }).join("; ") || chart.title + ": nothing recorded";
}

function drawCharts() {
  for (const chart of charts) drawChart(chart);
  markStep();
}

function drawChart(chart) {
  const width = Math.max(chart.box.clientWidth, 120);
  const values = chart.lines.flatMap((line) => line.points.map((point) => point[1]));
  const levels = niceLevels(...(chart.bounds ?? [Math.min(0, ...values), Math.max(0.1, ...values)]));
  const [low, high] = [levels[0], levels.at(-1)];
  const steps = STEPS.map((step) => step.step).concat((INDEX.run.evals ?? []).flatMap((one) => one.points.map((point) => point[0])));
  const [first, last] = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
  chart.x = (step) => CHART.left + (step - first) / (last - first) * (width - CHART.left - CHART.right);
  chart.y = (value) => CHART.top + (high - value) / (high - low || 1) * (CHART.height - CHART.top - CHART.bottom);
  const svg = draw("svg", { width, height: CHART.height, "aria-hidden": "true" });
  for (const value of levels) {
    svg.append(draw("line", { class: "grid", x1: CHART.left, x2: width - CHART.right, y1: chart.y(value), y2: chart.y(value) }));
    svg.append(draw("text", { class: "tick", x: CHART.left - 7, y: chart.y(value) + 3.5, "text-anchor": "end" }, number(value, 2)));
  }
  for (const step of stepTicks(first, last, width)) {
    svg.append(draw("text", { class: "tick", x: chart.x(step), y: CHART.height - 4, "text-anchor": "middle" }, String(step)));
  }
  for (const step of SHOWN_STEPS) {
    svg.append(draw("line", { class: "has-groups", x1: chart.x(step.step), x2: chart.x(step.step), y1: CHART.height - CHART.bottom, y2: CHART.height - CHART.bottom + 4 }));
  }
  for (const line of chart.lines) drawLine(svg, chart, line);
  chart.hover = draw("line", { class: "hover", y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden" });
  chart.mark = draw("line", { class: "here", y1: CHART.top - 6, y2: CHART.height - CHART.bottom, visibility: "hidden" });
  svg.append(chart.hover, chart.mark);
  chart.box.replaceChildren(svg);
}

function drawLine(svg, chart, line) {
  const path = line.points.map(([step, value], index) => `${index ? "L" : "M"}${chart.x(step).toFixed(1)} ${chart.y(value).toFixed(1)}`).join("");
  svg.append(draw("path", { class: "line " + line.kind, d: path }));
  if (line.points.length > 60 && !line.kind.startsWith("held-out")) return;
  for (const [step, value] of line.points) {
    const dot = draw("circle", { class: "dot " + line.kind, cx: chart.x(step), cy: chart.y(value), r: line.kind.startsWith("held-out") ? 3 : 1.8 });
    dot.append(draw("title", {}, `${line.name}: ${number(value)}`));
    svg.append(dot);
  }
}

// Round values from below `low` to above `high`, three to five of them.
function niceLevels(low, high) {
  const wish = (high - low) / 3 || 1;
  const power = 10 ** Math.floor(Math.log10(wish));
  const grain = [1, 2, 2.5, 5, 10].map((base) => base * power).find((one) => one >= wish * 0.999);
  const levels = [];
  for (let step = Math.floor(low / grain + 1e-9); (step - 1) * grain < high - 1e-9; step += 1) levels.push(step * grain);
  return levels;
}

function stepTicks(first, last, width) {
  const wish = (last - first) / Math.max(2, width / 80);
  const grain = [1, 2, 5].map((base) => base * 10 ** Math.floor(Math.log10(Math.max(wish, 1)))).find((one) => one >= wish) ??
    10 ** Math.ceil(Math.log10(wish));
  const ticks = [];
  for (let step = Math.ceil(first / grain) * grain; step <= last; step += grain) ticks.push(step);
  return ticks;
}

function nearest(steps, chart, event) {
  const at = event.clientX - chart.box.getBoundingClientRect().left;
  let best = null;
  for (const step of steps) {
    if (best === null || Math.abs(chart.x(step.step) - at) < Math.abs(chart.x(best.step) - at)) best = step;
  }
  return best;
}

function hoverChart(chart, event) {
  const step = event ? nearest(STEPS, chart, event) : null;
  chart.hover.setAttribute("visibility", step ? "visible" : "hidden");
  chart.readout.textContent = "";
  if (!step) return;
  chart.hover.setAttribute("x1", chart.x(step.step));
  chart.hover.setAttribute("x2", chart.x(step.step));
  const values = chart.lines.map((line) => [line.name, line.points.find((point) => point[0] === step.step)])
    .filter(([, point]) => point).map(([name, point]) => `${name} ${number(point[1])}`);
  chart.readout.textContent = `step ${step.step}: ` + (values.join(", ") || "not committed") +
    (step.skipped ? ", skipped" : "") + (step.shown ? "" : " (groups not on this page)");
}

function markStep() {
  for (const chart of charts) {
    if (!chart.mark) continue;
    const known = state.step !== null && STEP_OF.has(state.step);
    chart.mark.setAttribute("visibility", known ? "visible" : "hidden");
    if (!known) continue;
    chart.mark.setAttribute("x1", chart.x(state.step));
    chart.mark.setAttribute("x2", chart.x(state.step));
  }
}
