"use strict";
// The page of `orhpc view`: the groups of one step or evaluation on the left, one group's rollouts side by side.

const AT_ONCE = 8;   // rollouts of a group that are read and drawn at first
const SHOWN = 500;   // entries of a list that are drawn
const NARROW = "(max-width: 800px)";
const state = { part: "", group: null, id: "", mode: "messages", coloring: "difference", shown: AT_ONCE };
const wanted = { text: "", environment: "", end: "", trained: "", failed: "", low: "", high: "", first: "", last: "" };
const page = document.getElementById("view");
const ui = {};
let about = null;
let rows = [];        // of the part
let rollouts = [];    // of the group, as many as are drawn
let searching = null;

const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const rewardsOf = (list) => list.map((row) => row.reward).filter((reward) => reward !== null);

function groupsOf(list) {
  const groups = new Map();
  for (const row of list) groups.set(row.group, [...(groups.get(row.group) || []), row]);
  return groups;
}

function fail(error) {
  if (error.name === "AbortError") return;
  const box = document.getElementById("error") || make(document.body, "div", { id: "error", className: "error" });
  box.textContent = error.message;
}

// --- frame -------------------------------------------------------------------------------------

function choice(parent, label, values, onChange) {
  const box = make(parent, "select", { ariaLabel: label });
  for (const [value, text] of values) make(box, "option", { value }, text);
  box.onchange = () => onChange(box.value);
  return box;
}

function range(parent, label, low, high) {
  const row = make(parent, "div", { className: "row" });
  make(row, "span", { className: "faint" }, label);
  for (const [name, placeholder] of [[low, "from"], [high, "to"]]) {
    const box = make(row, "input", { placeholder, ariaLabel: `${label} ${placeholder}`, type: "number", step: "any" });
    box.oninput = () => { wanted[name] = box.value; drawList(); };
  }
}

function frame() {
  page.replaceChildren();
  const head = make(page, "header");
  make(head, "h1", {}, about.name);
  const steps = make(head, "div", { className: "row" });
  make(steps, "button", { title: "previous (key [)" }, "‹").onclick = () => move(-1);
  ui.part = choice(steps, "step", about.parts.map((part) => [part, titleOf(part)]), (part) => open(part));
  make(steps, "button", { title: "next (key ])" }, "›").onclick = () => move(1);
  ui.summary = make(steps, "span", { className: "faint" });
  if (about.left_out) make(head, "p", { className: "faint" }, about.left_out);
  const body = make(page, "div", { className: "body" });
  const side = make(body, "nav");
  const folded = make(side, "details", { open: !matchMedia(NARROW).matches });
  make(folded, "summary", {}, "filter and search");
  filters(make(folded, "form", { className: "filters" }));
  ui.progress = make(side, "div", { className: "faint small" });
  ui.list = make(side, "div", { className: "list" });
  ui.group = make(body, "section");
  ui.inspector = make(page, "div", { className: "inspector", hidden: true });
}

function filters(form) {
  const by = (name) => (value) => { wanted[name] = value; drawList(); };
  const text = make(form, "input", { type: "search", placeholder: "text in all steps, then Enter", ariaLabel: "text" });
  text.oninput = () => { wanted.text = text.value; if (!wanted.text) { endSearch(); drawList(); } };
  ui.environment = choice(form, "environment", [["", "all environments"]], by("environment"));
  ui.end = choice(form, "end", [["", "all ends"]], by("end"));
  choice(form, "trained", [["", "trained on or not"], ["yes", "trained on"], ["no", "not trained on"]], by("trained"));
  choice(form, "failed", [["", "with and without error"], ["yes", "with error"], ["no", "without error"]], by("failed"));
  range(form, "reward", "low", "high");
  range(form, "steps", "first", "last");
  make(form, "button", {}, "search all steps");
  form.onsubmit = (event) => { event.preventDefault(); search(); };
}

function setOptions(select, values) {
  const kept = select.value;
  while (select.options.length > 1) select.remove(1);
  for (const value of values) make(select, "option", { value }, value);
  select.value = values.includes(kept) ? kept : "";
  return select.value;
}

// --- a step or evaluation, and its groups ------------------------------------------------------

function move(by) {
  const next = about.parts[about.parts.indexOf(state.part) + by];
  if (next) open(next);
}

async function open(part, group = null, id = "") {
  endSearch();
  rows = await source.rows(part);
  Object.assign(state, { part, id });
  ui.part.value = part;
  wanted.environment = setOptions(ui.environment, [...new Set(rows.map((row) => row.environment))].sort());
  wanted.end = setOptions(ui.end, [...new Set(rows.map((row) => row.end))].sort());
  ui.summary.textContent = `${count(rows.length, "rollout")}, mean reward ${number(mean(rewardsOf(rows)))}`;
  drawList();
  const groups = [...groupsOf(rows).keys()];
  if (groups.length) await show(groups.includes(group) ? group : groups[0], Boolean(id));
}

function drawList() {
  if (searching) return;
  ui.list.replaceChildren();
  const groups = groupsOf(rows.filter((row) => accepts(wanted, row)));
  const highest = Math.max(...rows.map((row) => Math.abs(row.reward || 0)), 1e-9);
  ui.progress.textContent = `${groups.size} of ${groupsOf(rows).size} groups`;
  for (const [group, members] of [...groups].slice(0, SHOWN)) drawEntry(group, members, highest);
  if (groups.size > SHOWN) make(ui.list, "p", { className: "faint" }, `the first ${SHOWN} are listed: filter them`);
}

function drawEntry(group, members, highest) {
  const entry = make(ui.list, "button", { className: group === state.group ? "entry chosen" : "entry", group });
  entry.onclick = () => { state.id = ""; show(group, true).catch(fail); };
  make(entry, "div", { className: "name" }, members[0].task);
  const line = make(entry, "div", { className: "row" });
  const dots = make(line, "span", { className: "dots" });
  for (const row of members) {
    const title = `${row.id}: ${row.reward === null ? row.end : `reward ${number(row.reward)}`}`;
    const dot = make(dots, "i", { title, className: row.reward === null ? "failed" : "" });
    if (row.reward !== null) {
      dot.style.background = `rgba(43,138,62,${(0.12 + 0.88 * Math.max(0, row.reward) / highest).toFixed(2)})`;
    }
  }
  const rewards = rewardsOf(members);
  make(line, "span", {}, number(mean(rewards), 2));
  if (new Set(rewards).size === 1 && rewards.length > 1) make(line, "span", { className: "tag", title: "All rewards are equal, so all advantages are 0: this group trains nothing." }, "equal rewards");
}

// --- a group -----------------------------------------------------------------------------------

async function show(group, scroll = false) {
  Object.assign(state, { group, shown: AT_ONCE });
  for (const entry of ui.list.children) entry.classList.toggle("chosen", entry.group === group);
  await load();
  if (scroll && matchMedia(NARROW).matches) ui.group.scrollIntoView();
}

async function load() {
  const { part, group, id, shown } = state;
  // One that was searched for comes first.
  const members = groupsOf(rows).get(group).sort((a, b) => (b.id === id) - (a.id === id));
  const found = await Promise.all(members.slice(0, shown).map((row) => source.rollout(part, row.id)));
  if (group !== state.group || part !== state.part) return;   // the user has moved on
  rollouts = found.filter(Boolean);
  history.replaceState(null, "", `#part=${part}&group=${group}${id ? `&id=${id}` : ""}`);
  drawGroup(members);
}

function drawGroup(members) {
  ui.group.replaceChildren();
  ui.inspector.hidden = true;
  make(ui.group, "h2", {}, members[0].task);
  make(ui.group, "p", { className: "faint" }, `${titleOf(state.part)}, group ${state.group}: `
    + `${count(members.length, "rollout")}, mean reward ${number(mean(rewardsOf(members)))}`);
  drawChoices(make(ui.group, "div", { className: "row" }), members);
  if (!rollouts.length) return;
  const tokens = state.mode === "tokens" && !about.problem;
  const shared = tokens ? sharedSegments(rollouts) : sharedMessages(rollouts);
  const draw = (parent, rollout, from, to) => (tokens
    ? drawSegments(parent, rollout, rollout.segments.slice(from, to), state.coloring)
    : drawMessages(parent, rollout.messages.slice(from, to)));
  if (shared) {
    const folded = make(ui.group, "details", { className: "shared", open: true });
    make(folded, "summary", {}, "the same in all of them");
    draw(folded, rollouts[0], 0, shared);
  }
  const columns = make(ui.group, "div", { className: "columns" });
  for (const rollout of rollouts) {
    const column = make(columns, "article", { className: rollout.id === state.id ? "found" : "" });
    drawHead(column, rollout);
    draw(column, rollout, shared);
  }
  if (state.shown < members.length) {
    const more = make(ui.group, "button", {}, `show ${members.length - state.shown} more rollouts`);
    more.onclick = () => { state.shown = members.length; load().catch(fail); };
  }
}

function drawChoices(bar, members) {
  const by = (name) => (value) => { state[name] = value; drawGroup(members); };
  choice(bar, "show", [["messages", "messages"], ["tokens", "tokens"]], by("mode")).value = state.mode;
  if (state.mode !== "tokens") return;
  if (about.problem) { make(bar, "span", { className: "bad" }, `no tokenizer: ${about.problem}`); return; }
  const colorings = Object.entries(COLORINGS).map(([name, one]) => [name, `colored by ${one.name}`]);
  choice(bar, "color", colorings, by("coloring")).value = state.coloring;
  legend(make(bar, "span", { className: "legend" }), state.coloring);
}

function drawHead(parent, rollout) {
  const head = make(parent, "div", { className: "head" });
  const line = make(head, "div", { className: "row" });
  make(line, "b", { className: "reward" }, rollout.reward === null ? "no reward" : number(rollout.reward));
  if (rollout.advantage !== null) {
    const tag = make(line, "span", { className: "tag" }, `advantage ${number(rollout.advantage, 2)}`);
    tag.style.background = COLORINGS.advantage.color(rollout.advantage);
  }
  if (!rollout.trained && state.part.startsWith("step_")) make(line, "span", { className: "tag" }, "not trained on");
  make(line, "span", { className: rollout.error ? "tag bad" : "tag" }, rollout.end);
  const age = rollout.age ? `, ${count(rollout.age, "update")} old` : "";
  make(head, "div", { className: "faint small" }, `${rollout.id}: ${rollout.response_tokens} of ${rollout.length} `
    + `tokens sampled, ${count(rollout.turns, "turn")}, ${count(rollout.tool_calls, "tool call")}, `
    + `${number(rollout.seconds, 1)} s${age}`);
  if (rollout.error) make(head, "div", { className: "bad small" }, rollout.error);
}

// --- search ------------------------------------------------------------------------------------

function endSearch() {
  if (searching) searching.abort();
  searching = null;
}

async function search() {
  endSearch();
  searching = new AbortController();
  const { signal } = searching;
  ui.list.replaceChildren();
  ui.progress.textContent = "searching";
  let hits = 0;
  let last = "";
  const onFound = ({ part, row, snippet }) => {
    hits += 1;
    if (signal.aborted || hits > SHOWN) return;
    if (part !== last) make(ui.list, "h3", {}, titleOf(part));
    last = part;
    const entry = make(ui.list, "button", { className: "entry" });
    make(entry, "div", { className: "name" }, `${row.reward === null ? row.end : number(row.reward, 2)}  ${row.task}`);
    if (snippet) make(entry, "div", { className: "faint small" }, snippet);
    entry.onclick = () => reveal(part, row).catch(fail);
  };
  const onProgress = ({ searched, of }) => {
    if (signal.aborted) return;
    const limit = hits > SHOWN ? `, the first ${SHOWN} are listed` : "";
    ui.progress.textContent = `${hits} found in ${searched} of ${of} steps and evaluations${limit}`;
  };
  await source.search({ ...wanted }, onFound, onProgress, signal).catch(fail);
}

// Shows a found rollout, and keeps the list of what was found.
async function reveal(part, row) {
  rows = await source.rows(part);
  Object.assign(state, { part, id: row.id });
  ui.part.value = part;
  await show(row.group, true);
}

// --- start -------------------------------------------------------------------------------------

function inspect({ target }) {
  if (!target.token) return;
  ui.inspector.hidden = false;
  ui.inspector.textContent = describe(target);
}

function onKey(event) {
  if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "[") move(-1);
  if (event.key === "]") move(1);
  const groups = [...groupsOf(rows.filter((row) => accepts(wanted, row))).keys()];
  const near = groups[groups.indexOf(state.group) + { j: 1, k: -1 }[event.key]];
  if (near !== undefined) show(near).catch(fail);
}

async function start() {
  about = await source.about();
  const chosen = new URLSearchParams(location.hash.slice(1));
  frame();
  page.addEventListener("mouseover", inspect);
  page.addEventListener("click", inspect);
  document.addEventListener("keydown", onKey);
  if (!about.parts.length) { make(ui.group, "p", {}, "Nothing is recorded yet."); return; }
  const part = about.parts.includes(chosen.get("part")) ? chosen.get("part") : about.first;
  if (chosen.get("mode") === "tokens") state.mode = "tokens";
  await open(part, chosen.has("group") ? Number(chosen.get("group")) : null, chosen.get("id") || "");
}

window.addEventListener("unhandledrejection", (event) => fail(event.reason));
start().catch(fail);
