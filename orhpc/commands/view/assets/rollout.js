"use strict";
// Draws one rollout: its messages, or its tokens colored by what engine and trainer computed for them.

const MOST_TOKENS = 3000;   // of one stretch that are drawn at first
const TEXT = 0, ID = 1, ENGINE = 2, TRAINER = 3, VERSION = 4;   // places in a token
const ADVANTAGE = 5, VALUE = 6;   // further ones, if there was a critic

// Log-probabilities differ by 0.001 as well as by 10: colors follow the logarithm.
const strength = (value) => Math.min(1, Math.log10(1 + Math.abs(value) / 0.01) / 2);

const COLORINGS = {
  difference: {
    name: "trainer − engine",
    about: "log-probability under the trainer minus the engine's; they should agree, up to rounding",
    value: (token) => (token[TRAINER] === null ? null : token[TRAINER] - token[ENGINE]),
    color: (value) => diverging(Math.sign(value) * strength(value)),
    legend: [[-1, "−1"], [-0.1, "−0.1"], [0, "0"], [0.1, "0.1"], [1, "1"]],
  },
  surprise: {
    name: "log-probability",
    about: "the engine's log-probability of the sampled token; dark: it was improbable",
    value: (token) => token[ENGINE],
    color: (value) => sequential(Math.min(1, -value / 5)),
    legend: [[0, "0"], [-1, "−1"], [-2.5, "−2.5"], [-5, "−5"]],
  },
  age: {
    name: "age",
    about: "updates between the policy that sampled the token and the one that was trained with it",
    value: (token, rollout) => (rollout.version === null ? null : rollout.version - token[VERSION]),
    color: (value) => sequential(Math.min(1, value / 4)),
    legend: [[0, "0"], [1, "1"], [2, "2"], [4, "4 or more"]],
  },
  advantage: {
    name: "advantage",
    about: "of the rollout, with a critic of the token: blue tokens became more probable, orange ones less",
    value: (token, rollout) => token[ADVANTAGE] ?? rollout.advantage,
    color: (value) => diverging(Math.max(-1, Math.min(1, value / 2))),
    legend: [[-2, "−2"], [-1, "−1"], [0, "0"], [1, "1"], [2, "2"]],
  },
  none: { name: "nothing", about: "", value: () => null, color: () => "", legend: [] },
};

const alpha = (share) => (0.06 + 0.64 * share).toFixed(3);
const diverging = (share) =>
  (share === 0 ? "" : `rgba(${share > 0 ? "46,107,230" : "232,89,12"},${alpha(Math.abs(share))})`);
const sequential = (share) => (share <= 0 ? "" : `rgba(156,54,181,${alpha(share)})`);
const number = (value, digits = 3) =>
  (value === null || value === undefined ? "–" : Number(value).toFixed(digits).replace("-", "−"));

function legend(parent, coloring) {
  const { about, legend: entries, color } = COLORINGS[coloring];
  for (const [value, label] of entries) {
    make(parent, "span", { className: "swatch" }, label).style.background = color(value);
  }
  make(parent, "span", { className: "faint small" }, about);
}

// --- messages ----------------------------------------------------------------------------------

// How many messages at the start are the same in all rollouts.
function sharedMessages(rollouts) {
  const texts = rollouts.map((rollout) => rollout.messages.map((message) => JSON.stringify(message)));
  let count = 0;
  while (texts.length > 1 && texts.every((one) => count < one.length && one[count] === texts[0][count])) count += 1;
  return count;
}

// A user's agent may write a list of parts instead of a text.
const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

function drawMessages(parent, messages) {
  for (const message of messages) {
    const box = make(parent, "div", { className: `message ${message.role === "assistant" ? "sampled" : "given"}` });
    const head = make(box, "div", { className: "role" }, [message.role, message.name].filter(Boolean).join(" "));
    if (message.reward !== undefined && message.reward !== null) {
      make(head, "span", { className: "tag" }, `reward ${message.reward}`);
    }
    for (const kind of ["error", "unfinished"]) {
      if (message[kind]) make(head, "span", { className: "tag bad" }, `${kind}: ${message[kind]}`);
    }
    if (message.reasoning) {
      const reasoning = textOf(message.reasoning);
      const folded = make(box, "details", { open: reasoning.length < 400 });
      make(folded, "summary", {}, "reasoning");
      make(folded, "div", { className: "text faint" }, reasoning);
    }
    if (message.content) make(box, "div", { className: "text" }, textOf(message.content));
    for (const call of message.tool_calls || []) drawCall(box, call);
    if (message.metadata && Object.keys(message.metadata).length) {
      make(box, "div", { className: "faint small" }, `metadata ${JSON.stringify(message.metadata)}`);
    }
  }
}

function drawCall(parent, call) {
  if (call === null || typeof call !== "object" || (call.error === undefined && call.name === undefined)) {
    make(make(parent, "div", { className: "call" }), "div", { className: "text" }, textOf(call));
    return;
  }
  const malformed = call.error !== undefined;
  const box = make(parent, "div", { className: malformed ? "call bad" : "call" });
  make(box, "b", {}, malformed ? "malformed call" : call.name);
  make(box, "div", { className: "text" }, malformed ? String(call.error) : JSON.stringify(call.arguments, null, 1));
}

// --- tokens ------------------------------------------------------------------------------------

// How many stretches at the start are the same text in all rollouts: the prompt, or none.
function sharedSegments(rollouts) {
  const first = rollouts[0].segments[0];
  const same = (rollout) => rollout.segments.length && rollout.segments[0].text === first.text;
  return rollouts.length > 1 && first && first.text !== undefined && rollouts.every(same) ? 1 : 0;
}

function drawSegments(parent, rollout, segments, coloring) {
  for (const segment of segments) {
    const sampled = segment.text === undefined;
    const box = make(parent, "div", { className: sampled ? "stretch sampled" : "stretch given" });
    const what = sampled ? `sampled: ${segment.tokens.length}` : `not sampled, not trained on: ${segment.count}`;
    make(box, "div", { className: "role" }, `${what} tokens`);
    const text = make(box, "div", { className: "text tokens" }, sampled ? null : segment.text);
    if (sampled) drawTokens(text, rollout, segment.tokens, 0, coloring);
  }
}

function drawTokens(parent, rollout, tokens, start, coloring) {
  const { value, color } = COLORINGS[coloring];
  const end = Math.min(tokens.length, start + MOST_TOKENS);
  for (const token of tokens.slice(start, end)) {
    const element = make(parent, "span", { token, rollout }, token[TEXT]);
    const found = value(token, rollout);
    if (found !== null && found !== undefined) element.style.background = color(found);
  }
  if (end === tokens.length) return;
  const button = make(parent, "button", {}, `show ${tokens.length - end} more tokens`);
  button.onclick = () => { button.remove(); drawTokens(parent, rollout, tokens, end, coloring); };
}

function describe({ token, rollout }) {
  const found = [`${JSON.stringify(token[TEXT])}  token ${token[ID]}`, `engine ${number(token[ENGINE], 4)}`];
  if (token[TRAINER] !== null) {
    found.push(`trainer ${number(token[TRAINER], 4)}`, `difference ${number(token[TRAINER] - token[ENGINE], 4)}`);
  }
  if (token[VALUE] !== undefined) {
    found.push(`advantage ${number(token[ADVANTAGE], 4)}`, `value ${number(token[VALUE], 4)}`);
  }
  const age = rollout.version === null ? "" : `, ${rollout.version - token[VERSION]} updates old`;
  return [...found, `policy ${token[VERSION]}${age}`].join("   ");
}
