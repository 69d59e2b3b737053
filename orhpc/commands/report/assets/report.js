"use strict";
// Draws the report from the JSON block, with the elements of dom.js.

const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#2e6be6", "#e8590c", "#2b8a3e", "#9c36b5", "#c92a2a", "#0c8599", "#a87900", "#5f3dc4"];
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const view = { smoothing: 0.8, axis: "step" };
const several = data.runs.length > 1;
const waiting = new Map();   // element of a chart that has not been drawn yet -> its option
const drawn = new Map();     // element -> { chart, option }

// --- elements ----------------------------------------------------------------------------------

function card(parent, title, unit = "", wide = false) {
  const box = make(parent, "div", { className: "card" });
  const heading = make(box, "h3", {}, title);
  if (unit) make(heading, "span", { className: "unit" }, `  ${unit}`);
  return make(box, "div", { className: wide ? "chart wide" : "chart" });
}

// --- charts ------------------------------------------------------------------------------------

// A chart is drawn when it comes into view: a report may have a hundred of them.
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const option = waiting.get(entry.target);
    if (entry.isIntersecting && option) { waiting.delete(entry.target); draw(entry.target, option); }
  }
}, { rootMargin: "300px" });

function add(element, option) {
  waiting.set(element, option);
  observer.observe(element);
}

function draw(element, option) {
  const old = drawn.get(element);
  if (old) old.chart.dispose();
  const chart = echarts.init(element, dark.matches ? "dark" : null);
  chart.setOption({ backgroundColor: "transparent", animation: false, color: COLORS, ...option(chart) });
  drawn.set(element, { chart, option });
}

function redraw() { for (const [element, { option }] of drawn) draw(element, option); }

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toString();
}

// Local date and time, as the program prints them.
function clock(seconds) { return new Date(seconds * 1000).toLocaleString("sv"); }

// Time of a step, between the two nearest that are known.
function timeOf(run, step) {
  const [steps, times] = run.times;
  if (!steps.length) return 0;
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
  const span = steps[high] - steps[low];
  const share = span > 0 ? Math.min(1, Math.max(0, (step - steps[low]) / span)) : 0;
  return times[low] + share * (times[high] - times[low]);
}

// What a point's place on the axis is: its step, or the hours since the run's first step.
function place(run, step) {
  return view.axis === "step" ? step : (timeOf(run, step) - run.times[1][0]) / 3600;
}

// Limits of the vertical axis around values that are all equal, whose rounding errors would fill it otherwise.
function around(series) {
  const values = series.flatMap((one) => one.data.map(([, y]) => y));
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const size = Math.max(Math.abs(low), Math.abs(high));
  return high - low > 1e-6 * size ? {} : { min: low - 0.1 * (size || 1), max: high + 0.1 * (size || 1) };
}

// Exponential moving average, corrected for its start (Adam's bias correction, arXiv 1412.6980, section 3).
function smoothed(values) {
  const keep = view.smoothing;
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function axes(log) {
  const text = { color: dark.matches ? "#98a2b3" : "#667085", fontSize: 11 };
  const lines = { lineStyle: { color: dark.matches ? "#2d3340" : "#e3e6ec" } };
  return {
    grid: { left: 52, right: 14, top: 26, bottom: 44 },
    tooltip: { trigger: "axis", confine: true, valueFormatter: number, textStyle: { fontSize: 12 } },
    legend: { type: "scroll", top: 0, textStyle: { ...text }, itemWidth: 14, itemHeight: 3, icon: "rect" },
    dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl" }, { type: "slider", height: 12, bottom: 4, showDetail: false }],
    xAxis: { type: "value", min: "dataMin", max: "dataMax", axisLabel: text, splitLine: { show: false },
      name: view.axis === "step" ? "" : "h", nameTextStyle: text },
    yAxis: { type: log ? "log" : "value", scale: true, axisLabel: { ...text, formatter: number }, splitLine: lines },
  };
}

// Steps at which an attempt other than the first began.
function restarts(run) {
  return run.attempts.filter((a) => a.number > 1 && a.steps !== "none").map((a) => parseInt(a.steps, 10));
}

function panel(parent, spec) {
  const element = card(parent, spec.title, spec.unit);
  element.parentElement.dataset.metrics = spec.metrics.join(" ");
  element.parentElement.querySelector("h3").title = spec.about;
  add(element, () => {
    const series = [];
    let color = 0;
    for (const [index, run] of data.runs.entries()) {
      for (const metric of spec.metrics) {
        const points = run.metrics[metric];
        if (!points) continue;
        // Of one metric, a run has the color that the bar at the top shows.
        const own = COLORS[(spec.metrics.length === 1 ? index : color) % COLORS.length];
        color += 1;
        const isOfAll = spec.metrics.some((other) => other.startsWith(`${metric}/`));
        const label = metric.includes("/") ? metric.slice(metric.indexOf("/") + 1) : isOfAll ? "all" : metric;
        const name = several ? (spec.metrics.length > 1 ? `${run.name} ${label}` : run.name) : label;
        const pairs = (values) => points[0].map((step, i) => [place(run, step), values[i]])
          .filter(([, y]) => !spec.log || y > 0);
        const few = points[0].length < 3;
        const plain = view.smoothing > 0 && points[0].length > 20;
        const common = { type: "line", symbol: few ? "circle" : "none", itemStyle: { color: own } };
        if (plain) series.push({ ...common, name, data: pairs(points[1]), silent: true, tooltip: { show: false },
          lineStyle: { color: own, width: 1, opacity: 0.25 } });
        const main = { ...common, name, data: pairs(plain ? smoothed(points[1]) : points[1]),
          lineStyle: { color: own, width: 1.8 } };
        if (!several && series.length <= 1) main.markLine = { silent: true, symbol: "none", label: { show: false },
          lineStyle: { type: "dashed", width: 1, color: "#98a2b3", opacity: 0.7 },
          data: restarts(run).map((step) => ({ xAxis: place(run, step) })) };
        series.push(main);
      }
    }
    const option = { ...axes(spec.log), series };
    Object.assign(option.yAxis, spec.log ? {} : around(series));
    option.legend.show = color > 1;
    if (color <= 1) option.grid.top = 10;
    return option;
  });
}

function phases(parent, run) {
  const names = Object.keys(run.phases);
  if (!names.length) return;
  const element = card(parent, several ? `Seconds per step by phase: ${run.name}` : "Seconds per step by phase", "s", true);
  add(element, () => ({
    ...axes(false),
    yAxis: { ...axes(false).yAxis, scale: false },
    series: names.map((name, i) => ({
      name, type: "line", stack: "phases", symbol: "none", lineStyle: { width: 0 },
      areaStyle: { color: COLORS[i % COLORS.length], opacity: 0.75 }, itemStyle: { color: COLORS[i % COLORS.length] },
      data: run.phases[name][0].map((step, j) => [place(run, step), run.phases[name][1][j]]),
    })),
  }));
}

const MARK_COLORS = { alarm: "#e8590c", notice: "#667085", evaluation: "#2b8a3e" };

// Attempts as bars on the clock, start-up in gray, with every marked event.
function timeline(parent, run) {
  if (!run.attempts.some((a) => a.last)) return;
  const element = card(parent, several ? `Attempts and events: ${run.name}` : "Attempts and events",
    "gray: starts; dots: evaluations green, alarms orange, failures red", true);
  add(element, () => {
    const option = axes(false);
    const bars = [];
    run.attempts.forEach((a) => {
      if (!a.last) return;
      const ready = a.ready ?? a.last;
      const [began, up, last] = [a.began, ready, a.last].map((time) => Math.round(time * 1000));
      bars.push({ value: [began, up, 0], itemStyle: { color: "#98a2b3" }, about: a });
      bars.push({ value: [up, last, 0], itemStyle: { color: "#2e6be6" }, about: a });
    });
    const bar = (params, api) => {
      const from = api.coord([api.value(0), 0.5]), to = api.coord([api.value(1), 0.5]);
      return { type: "rect", style: api.style(),
        shape: { x: from[0], y: from[1] - 14, width: Math.max(1.5, to[0] - from[0] - 1), height: 28 } };
    };
    option.xAxis = { ...option.xAxis, type: "time", name: "", axisLabel: { ...option.xAxis.axisLabel, hideOverlap: true } };
    option.yAxis = { show: false, min: 0, max: 1 };
    // A bar of which only a part is in view stays.
    option.dataZoom = option.dataZoom.map((zoom) => ({ ...zoom, filterMode: "weakFilter" }));
    option.legend.show = false;
    option.grid.left = option.grid.right = 14;
    option.tooltip = { trigger: "item", confine: true, renderMode: "richText", formatter: (p) => p.data.about.text
      ? `${p.data.about.kind}${p.data.about.step === null ? "" : `, step ${p.data.about.step}`}\n${clock(p.data.about.time)}\n${p.data.about.text.slice(0, 300)}`
      : `attempt ${p.data.about.number}, steps ${p.data.about.steps}\nbegan ${clock(p.data.about.began)}\n${p.data.about.end.slice(0, 300)}` };
    option.series = [
      { type: "custom", renderItem: bar, encode: { x: [0, 1] }, data: bars },
      { type: "scatter", symbolSize: 9, data: run.marks.map((m) => ({
        value: [m.time * 1000, m.kind === "alarm" ? 0.85 : m.kind === "evaluation" ? 0.15 : 0.72],
        itemStyle: { color: MARK_COLORS[m.kind] ?? "#c92a2a" }, about: m })) },
    ];
    return option;
  });
}

// Cells [column, row, value] as colors over the steps; tip says what a cell is.
function heatmap(parent, run, title, unit, { steps, rows, cells, most, label, tip }) {
  const element = card(parent, several ? `${title}: ${run.name}` : title, unit, true);
  add(element, () => {
    const option = axes(false);
    option.xAxis = { ...option.xAxis, type: "category", data: steps.map(String), min: null, max: null };
    option.yAxis = { ...option.yAxis, type: "category", scale: false, data: rows,
      axisLabel: { ...option.yAxis.axisLabel, formatter: label, overflow: "truncate", width: 90 } };
    option.tooltip = { trigger: "item", confine: true, renderMode: "richText", formatter: (p) =>
      `step ${steps[p.data[0]]}\n${rows[p.data[1]]} ${tip(p.data[2])}` };
    option.dataZoom = [];
    option.legend.show = false;
    option.grid.bottom = 26;
    option.visualMap = { show: false, min: 0, max: most,
      inRange: { color: dark.matches ? ["#1f2b45", "#84a9ff"] : ["#dbe6ff", "#123a94"] } };
    option.series = [{ type: "heatmap", data: cells, animation: false }];
    return option;
  });
}

function histograms(parent, run, name, title, unit) {
  const { edges, counts } = run.histograms[name];
  heatmap(parent, run, title, unit, {
    steps: run.histograms.steps,
    rows: edges.slice(0, -1).map((edge, j) => `${number(edge)} to ${number(edges[j + 1])}`),
    cells: counts.flatMap((row, i) => row.map((count, j) => [i, j, count || "-"])),
    most: Math.max(1, ...counts.flat()),
    label: (text) => text.split(" ")[0],
    tip: (count) => `${unit}\n${count} rollouts`,
  });
}

// A lane per GPU, or per node with many GPUs.
function lanes(parent, run, name, title, unit, most) {
  const { steps, lanes: rows, per_node: perNode } = run.gpus;
  const values = run.gpus[name];
  const which = perNode ? (name === "memory" ? ", fullest GPU of each node" : ", least busy GPU of each node") : "";
  heatmap(parent, run, `${title}${which}`, unit, {
    steps, rows, most: most ?? Math.max(...values.flat().filter((v) => v !== null), 1),
    cells: values.flatMap((row, j) => row.map((value, i) => [i, j, value ?? "-"])),
    label: (text) => text,
    tip: (value) => `\n${number(value)} ${unit}`,
  });
}

function evaluations(parent) {
  const metrics = new Set();
  for (const run of data.runs) for (const e of run.evaluations) for (const key of Object.keys(e.numbers))
    if (key.startsWith("reward_mean")) metrics.add(key);
  for (const metric of [...metrics].sort()) {
    const label = metric.slice(metric.indexOf("/") + 1);
    const element = card(parent, `Evaluation: ${label}`);
    add(element, () => {
      const option = axes(false);
      option.series = data.runs.map((run, i) => ({
        name: run.name, type: "line", itemStyle: { color: COLORS[i % COLORS.length] },
        data: run.evaluations.filter((e) => metric in e.numbers).map((e) => [place(run, e.step ?? 0), e.numbers[metric]]),
      }));
      option.legend.show = several;
      return option;
    });
  }
}

// --- the page ----------------------------------------------------------------------------------

function section(title) {
  make(main, "h2", {}, title);
  return make(main, "div", { className: "grid" });
}

function overview(parent, run) {
  const box = make(parent, "div", { className: "card" });
  if (several) make(box, "h3", {}, run.name);
  table(box, [], run.facts);
}

// What the wall-clock time was spent on, with a bar of its share each.
function spent(parent, run) {
  if (!run.spent.length) return;
  const box = make(parent, "div", { className: "card spent" });
  make(box, "h3", {}, several ? `What the time was spent on: ${run.name}` : "What the time was spent on");
  table(box, [], run.spent.map(([cause, time, share]) => [cause, time, `${(100 * share).toFixed(1)} %`]));
  [...box.querySelectorAll("td:last-child")].forEach((cell, i) => {
    cell.className = "share";
    cell.style.setProperty("--share", `${100 * run.spent[i][2]}%`);
  });
}

function findings(run) {
  if (!run.findings.length) return;
  const grid = section(several ? `What to look at first: ${run.name}` : "What to look at first");
  for (const finding of run.findings) {
    const box = make(grid, "div", { className: "card finding" });
    make(box, "h3", {}, finding.title);
    make(box, "div", {}, finding.seen);
    make(box, "div", { className: "faint" }, finding.advice);
    box.addEventListener("click", () => {
      const target = [...document.querySelectorAll("[data-metrics]")]
        .find((e) => e.dataset.metrics.split(" ").includes(finding.metric));
      if (!target) return;
      target.closest("details")?.setAttribute("open", "");
      target.scrollIntoView({ behavior: "smooth", block: "center" });
      target.classList.add("flash");
      setTimeout(() => target.classList.remove("flash"), 1500);
    });
  }
}

function controls() {
  const bar = make(main, "div", { className: "bar" });
  const smoothing = make(make(bar, "label", {}, "Smoothing"), "input",
    { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smoothing });
  smoothing.addEventListener("input", () => { view.smoothing = Number(smoothing.value); redraw(); });
  const axis = make(make(bar, "label", {}, "Axis"), "select");
  for (const [value, text] of [["step", "steps"], ["time", "hours"]]) make(axis, "option", { value }, text);
  axis.addEventListener("change", () => { view.axis = axis.value; redraw(); });
  if (several) data.runs.forEach((run, i) => {
    const key = make(bar, "span", { className: "key" });
    make(key, "i").style.background = COLORS[i % COLORS.length];
    make(key, "span", {}, run.name);
  });
}

function tables(run) {
  const name = several ? `: ${run.name}` : "";
  if (run.environments.length) {
    make(main, "h2", {}, `Environments${name}`);
    table(make(main, "div", { className: "card" }),
      ["environment", "mean reward of its last step", "failed rollouts", "retried rollouts", "groups lost to failures"],
      run.environments);
  }
  if (run.slowest.length) {
    make(main, "h2", {}, `Slowest steps${name}`);
    table(make(main, "div", { className: "card" }), ["step", "seconds", "phase that took longer than usual", "by seconds"],
      run.slowest.map((s) => [s.step, number(s.seconds), s.phase, number(s.over)]));
  }
  make(main, "h2", {}, `Attempts${name}`);
  const box = make(main, "div", { className: "card" });
  const changed = run.attempts.some((a) => a.changed);
  table(box, ["attempt", "began", "steps", "ended", ...(changed ? ["changed since the attempt before"] : [])],
    run.attempts.map((a) => [a.number, a.began ? clock(a.began) : "-", a.steps, a.end, ...(changed ? [a.changed] : [])]));
  const marks = run.marks.filter((m) => m.kind !== "evaluation");
  if (marks.length) {
    make(main, "h2", {}, `Alarms, notices and failures${name}`);
    const left = run.marks_left_out ? [["", "", "", `${run.marks_left_out} older ones are in events.jsonl`]] : [];
    const details = make(make(main, "div", { className: "card" }), "details", { open: marks.length <= 12 });
    make(details, "summary", {}, `${marks.length} events`);
    table(details, ["time", "step", "event", ""],
      [...marks.slice().reverse().map((m) => [clock(m.time), m.step ?? "", m.kind, m.text]), ...left]);
  }
  if (run.samples.length) {
    make(main, "h2", {}, `Rollouts${name}`);
    const samples = make(main, "div", { className: "card" });
    for (const sample of run.samples) {
      const details = make(samples, "details");
      make(details, "summary", {}, sample.title);
      make(details, "pre", {}, sample.text);
    }
  }
  make(main, "h2", {}, `Settings${name}`);
  const settings = make(make(main, "div", { className: "card" }), "details");
  make(settings, "summary", {}, `${Object.keys(run.settings).length} settings`);
  table(settings, [], Object.entries(run.settings));
  const entries = Object.entries(run.provenance);
  if (!entries.length) return;
  make(main, "h2", {}, `Versions, code and machine of the newest attempt${name}`);
  const provenance = make(make(main, "div", { className: "card" }), "details");
  make(provenance, "summary", {}, `${entries.length} entries`);
  table(provenance, [], entries);
}

const main = document.getElementById("report");
make(main, "h1", {}, data.runs.map((run) => run.name).join(" and "));
make(main, "div", { className: "faint" }, `${data.runs.map((run) => run.path).join(", ")} · made ${data.made}`);
controls();
const top_ = make(main, "div", { className: "grid" });
top_.style.marginTop = "12px";
for (const run of data.runs) overview(top_, run);
for (const run of data.runs) spent(top_, run);
for (const run of data.runs) findings(run);
if (data.differences.length) {
  make(main, "h2", {}, "Settings that differ");
  table(make(main, "div", { className: "card" }), ["setting", ...data.runs.map((run) => run.name)],
    data.differences.map(([name, values]) => [name, ...values]));
}
// Learning first, with the evaluations; then time; then the rest.
const [learning, ...others] = data.sections.filter((one) => !one.folded);
if (learning) {
  const grid = section(learning.title);
  for (const spec of learning.panels.slice(0, 1)) panel(grid, spec);
  evaluations(grid);
  for (const spec of learning.panels.slice(1)) panel(grid, spec);
}
const time = section("Where did the time go?");
for (const run of data.runs) { timeline(time, run); phases(time, run); }
for (const { title, panels } of others) {
  const grid = section(title);
  for (const spec of panels) panel(grid, spec);
}
const watched = data.runs.filter((run) => run.gpus.steps);
if (watched.length) {
  const grid = section("What do the GPUs do?");
  for (const run of watched) {
    lanes(grid, run, "utilization", "Fraction of the step in which a kernel ran", "", 1);
    lanes(grid, run, "memory", "Memory in use", "GB");
  }
}
const counted = data.runs.filter((run) => run.histograms.steps);
if (counted.length) {
  const grid = section("How are rewards and lengths distributed?");
  for (const run of counted) {
    histograms(grid, run, "rewards", "Rewards", "");
    histograms(grid, run, "lengths", "Response lengths", "tokens");
  }
}
for (const { title, panels } of data.sections.filter((one) => one.folded)) {
  make(main, "h2", {}, title);
  const details = make(main, "details");
  make(details, "summary", {}, `${panels.length} metrics`);
  const grid = make(details, "div", { className: "grid" });
  for (const spec of panels) panel(grid, spec);
}
for (const run of data.runs) tables(run);
dark.addEventListener("change", redraw);
new ResizeObserver(() => { for (const { chart } of drawn.values()) chart.resize(); }).observe(main);
