"use strict";
// Where the page's data come from: the server that sent it, or the JSON block of an exported file.
// Both give about(), rows(part), rollout(part, id) and search(wanted, onFound, onProgress, signal).

const source = document.getElementById("data") ? exported() : served();

function served() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) sessionStorage.setItem("key", given);
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("key")}` };

  async function ask(path, values = {}, signal = undefined) {
    let answer;
    try {
      answer = await fetch(`/data/${path}?${new URLSearchParams(values)}`, { headers, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The command that shows this page has ended. Start it again.");
    }
    if (answer.status === 401) throw new Error("The key is missing: open the address that the command printed.");
    if (!answer.ok) throw new Error((await answer.json()).error);
    return answer;
  }

  return {
    about: async () => (await ask("about")).json(),
    rows: async (part) => (await ask("rows", { part })).json(),
    rollout: async (part, id) => (await ask("rollout", { part, id })).json(),
    async search(wanted, onFound, onProgress, signal) {
      const answer = await ask("search", { filter: filterLine(wanted) }, signal);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ;) {
        const { done, value } = await reader.read();
        const lines = (rest + (value || "")).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const found = JSON.parse(line);
          if (found.row) onFound(found); else onProgress(found);
        }
        if (done) return;
      }
    },
  };
}

function exported() {
  const data = JSON.parse(document.getElementById("data").textContent);
  return {
    about: async () => data.about,
    rows: async (part) => data.rows[part],
    rollout: async (part, id) => data.rollouts[`${part}/${id}`],
    async search(wanted, onFound, onProgress) {
      const newer = (a, b) => stepOf(b) - stepOf(a) || a.localeCompare(b);   // an evaluation is newer than its step
      const parts = data.about.parts.filter((part) => inSteps(wanted, stepOf(part))).sort(newer);
      for (const [index, part] of parts.entries()) {
        for (const row of data.rows[part]) {
          if (!accepts(wanted, row)) continue;
          const snippet = snippetOf(row, data.rollouts[`${part}/${row.id}`], wanted.text.toLowerCase());
          if (snippet !== null) onFound({ part, row, snippet });
        }
        onProgress({ searched: index + 1, of: parts.length });
      }
    },
  };
}

// --- filters -----------------------------------------------------------------------------------

const stepOf = (part) => Number(part.split("_")[1]);
const titleOf = (part) => (part.startsWith("step_") ? "step " : "evaluation after step ") + stepOf(part);

// The line that `orhpc view --filter` reads.
function filterLine(wanted) {
  const words = wanted.text ? [wanted.text] : [];
  if (wanted.environment) words.push(`env:${wanted.environment}`);
  if (wanted.end) words.push(`end:${wanted.end}`);
  if (wanted.low !== "" || wanted.high !== "") words.push(`reward:${wanted.low}..${wanted.high}`);
  if (wanted.first !== "" || wanted.last !== "") words.push(`step:${wanted.first}..${wanted.last}`);
  for (const name of ["trained", "failed"]) if (wanted[name]) words.push(`${name}:${wanted[name]}`);
  return words.join(" ");
}

function accepts(wanted, row) {
  const byReward = wanted.low !== "" || wanted.high !== "";
  return (!wanted.environment || wanted.environment === row.environment)
    && (!wanted.end || wanted.end === row.end)
    && (!wanted.trained || (wanted.trained === "yes") === row.trained)
    && (!wanted.failed || (wanted.failed === "yes") === Boolean(row.error))
    && (!byReward || (row.reward !== null && (wanted.low === "" || row.reward >= Number(wanted.low))
      && (wanted.high === "" || row.reward <= Number(wanted.high))));
}

function inSteps(wanted, step) {
  return (wanted.first === "" || step >= Number(wanted.first)) && (wanted.last === "" || step <= Number(wanted.last));
}

// The text around the needle; null if the rollout does not contain it.
function snippetOf(row, rollout, needle) {
  if (!needle || row.task.toLowerCase().includes(needle)) return "";
  const strings = [];
  (function collect(value) {
    if (typeof value === "string") strings.push(value);
    else if (value && typeof value === "object") Object.values(value).forEach(collect);
  })(rollout ? rollout.messages : []);
  for (const text of strings) {
    const at = text.toLowerCase().indexOf(needle);
    if (at >= 0) return text.slice(Math.max(0, at - 80), at + needle.length + 80);
  }
  return null;
}
