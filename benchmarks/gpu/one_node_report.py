"""The report of ``one_node.py``: figures from the runs' events, with published ones for comparison.

Every figure is a median over the steps after the first :data:`WARM`, in which kernels compile and pinned
memory is first touched.  MFU is defined as for PaLM (Chowdhery et al., arXiv:2204.02311, appendix B): FLOPs
of the forward and backward pass of the trained tokens without recomputation, over seconds times the peak,

    MFU = tokens * flops(token) / (seconds * GPUs * peak),

with ``flops(token)`` from :meth:`orhpc.models.ModelShape.training_flops` (attention included, at the mean
length) and the dense bfloat16 peak of NVIDIA's H100 and H200 SXM data sheets, 989.5 TFLOP/s, for every
precision. ``update`` counts only the seconds of the trainers' step, as published figures do.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orhpc.rundir.events import read_events, steps_of

OUTCOMES = "one_node.json"
WARM = 2
TURNS = ("trainer_copy", "trainer_sleep", "engines_resume", "engines_release", "trainer_wake")
PEAK_FLOPS = {"H100": 989.5e12, "H200": 989.5e12}
"""Peak dense bfloat16 FLOPs per second."""
PUBLISHED = """\
Published, other machines and lengths (Qwen3-30B-A3B):
  train-rollout KL without / with routing replay        1.5e-3 / 7.5e-4
  weight sync co-located / NCCL / P2P, H100              7 s / 2.67 s / 2.16 s
  trainer sleep + wake                                   5.2 s + 1.3 s
  NeMo-RL, 32 H100, on-policy / one step off             1102 / 1414 tokens/s/GPU
  verl, MFU on 8 / 16 / 32 GPUs                          0.40 / 0.37 / 0.31
  FP8 rollouts against bf16                              +35 %"""

Event = Mapping[str, Any]
Row = tuple[str, str]


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / OUTCOMES
    return json.loads(path.read_text()) if path.exists() else {}


def measured(folder: Path) -> set[str]:
    """Cases that were measured completely."""
    return {n for n, o in outcomes(folder).items() if not o["problem"] and o["exits"][-1:] == [0]}


def report(folder: Path) -> str:
    """All cases, one block each, then the published figures."""
    blocks: list[str] = []
    rates: dict[str, float] = {}
    kl: dict[str, float] = {}
    for name, outcome in outcomes(folder).items():
        events = read_events(folder / f"{name}-events.jsonl")
        steps = [step for _, step in sorted(steps_of(events).items())]
        rows = case_rows(outcome, events, steps)
        title = f"{name}: {outcome['layers']} layers, {outcome['gpus']} x {outcome['machine']}"
        blocks.append("\n".join([title, *(f"  {what:<46}{value}" for what, value in rows)]))
        if steps:
            rates[name] = middle(_warm(steps), rollout_rate(outcome)) or 0.0
            kl[name] = middle(_warm(steps), lambda s: s.get("rollout_kl")) or 0.0
    if "bf16" in rates and "fp8" in rates and rates["bf16"]:
        blocks.append(f"FP8 rollouts against bf16: {100 * (rates['fp8'] / rates['bf16'] - 1):+.0f} %")
    if kl.get("plain") and "bf16" in kl:
        blocks.append(f"train-rollout KL with replay over without: {kl['bf16'] / kl['plain']:.2f}")
    return "\n\n".join([*blocks, PUBLISHED])


def case_rows(outcome: Mapping[str, Any], events: Sequence[Event], steps: Sequence[Event]) -> list[Row]:
    """The figures of one case; parts that it did not reach are left out."""
    exits = ", ".join(map(str, outcome["exits"])) or "-"
    rows: list[Row] = [("exit codes; steps done", f"{exits}; {len(steps)}")]
    if outcome["problem"]:
        rows.append(("problem", outcome["problem"]))
    if starts := _starts(outcome, events):
        rows.append(("start to ready, s", starts))
    if parts := next((e["phases"] for e in events if e["event"] == "ready" and "phases" in e), None):
        rows.append(("of the first, s", ", ".join(f"{name} {took:.0f}" for name, took in parts.items())))
    if parts := next((e["engine_start"] for e in events if e.get("engine_start")), None):
        rows.append(("of its engine, s", ", ".join(f"{name} {took:.0f}" for name, took in parts.items())))
    if steps:
        warm = _warm(steps)
        rows += _phases(warm) + _rates(outcome, warm) + _weights(warm) + _memory(outcome, steps)
        rows += _mismatch(warm) + _commits(events, steps)
    if outcome["stopped"]:
        rows += _restart(outcome, events, steps)
    return rows


def middle(steps: Iterable[Event], value: Callable[[Event], float | None]) -> float | None:
    """Median over the steps that have this value; None if no step has it."""
    found = [v for step in steps if (v := value(step)) is not None]
    return statistics.median(found) if found else None


def _warm(steps: Sequence[Event]) -> Sequence[Event]:
    return steps[WARM:] or steps


def _turns(step: Event) -> float:
    """Seconds in which trainer and engine exchanged the GPU; the rollout phase includes them."""
    return sum(step.get(f"seconds_{name}", 0.0) for name in TURNS)


def rollout_rate(outcome: Mapping[str, Any]) -> Callable[[Event], float]:
    """Sampled tokens per second per engine GPU."""
    gpus = outcome["engine_gpus"]
    return lambda s: s["response_tokens"] / (s["phases"]["rollout"] - _turns(s)) / gpus


def _starts(outcome: Mapping[str, Any], events: Sequence[Event]) -> str:
    ready = [event["time"] for event in events if event["event"] == "ready"]
    return ", ".join(
        f"{min((r for r in ready if r > began), default=float('nan')) - began:.0f}"
        for began in outcome["began"]
        if any(r > began for r in ready)
    )


def _phases(steps: Sequence[Event]) -> list[Row]:
    whole = middle(steps, lambda s: s["seconds"])
    names = dict.fromkeys(name for step in steps for name in step["phases"])
    parts = ", ".join(f"{n} {middle(steps, lambda s, n=n: s['phases'].get(n)):.2f}" for n in names)
    inner = {n: middle(steps, lambda s, n=n: s.get(f"seconds_{n}")) for n in ("fetch", "update", "optimiser")}
    inside = ", ".join(f"{n} {v:.2f}" for n, v in inner.items() if v is not None)
    return [("a step, s", f"{whole:.2f}: {parts}"), ("of the update, s", inside)]


def _rates(outcome: Mapping[str, Any], steps: Sequence[Event]) -> list[Row]:
    gpus, trainers = outcome["gpus"], outcome["trainer_gpus"]
    train = middle(steps, lambda s: s["total_tokens"] / s["seconds_total"] / trainers)
    whole = middle(steps, lambda s: s["total_tokens"] / s["seconds"] / gpus)
    sampled = middle(steps, lambda s: s["response_tokens"])
    rows = [
        ("sampled tokens a step; mean of a rollout", f"{sampled:.0f}; "
         f"{middle(steps, lambda s: s['response_length_mean']):.0f}"),
        ("rollout, tokens/s/GPU (engines' GPUs)", f"{middle(steps, rollout_rate(outcome)):.0f}"),
        ("training, tokens/s/GPU (trainers' GPUs)", f"{train:.0f}"),
        ("whole step, tokens/s/GPU (all, prompts too)", f"{whole:.0f}"),
    ]  # fmt: skip
    peak = next((p for name, p in PEAK_FLOPS.items() if name in outcome["machine"]), None)
    if peak and outcome["flops"] and train and whole:
        flops = outcome["flops"]["token"]
        rows.append(("MFU, update; whole step", f"{train * flops / peak:.3f}; {whole * flops / peak:.3f}"))
    return rows


def _weights(steps: Sequence[Event]) -> list[Row]:
    rows: list[Row] = []
    seconds = middle(steps, lambda s: s["sync_seconds_total"] - s.get("sync_seconds_check", 0.0))
    size = middle(steps, lambda s: s.get("sync_bytes"))
    if seconds and size:
        gather = middle(steps, lambda s: s.get("sync_seconds_gather")) or 0.0
        rate = size / seconds / 1e9
        note = f"{size / 1e9:.2f} GB in {seconds:.2f} s (gather {gather:.2f}): {rate:.1f} GB/s"
        rows.append(("weight sync", note))
    moved = middle(steps, lambda s: s.get("memory_trainer_moved_gb"))
    if moved:
        sleep = middle(steps, lambda s: s["seconds_trainer_sleep"]) or float("nan")
        wake = middle(steps, lambda s: s["seconds_trainer_wake"]) or float("nan")
        note = f"{moved:.1f} GB, most of it beside sync and update: sleep {sleep:.2f} s, wake {wake:.2f} s"
        rows.append(("waited for the trainer's sleep and wake", note))
    turns = {name: middle(steps, lambda s, name=name: s.get(f"seconds_{name}")) for name in TURNS}
    if any(turns.values()):
        shown = ", ".join(f"{name} {took:.2f}" for name, took in turns.items() if took is not None)
        rows.append(("switching between the two sides, s", shown))
    return rows


def _memory(outcome: Mapping[str, Any], steps: Sequence[Event]) -> list[Row]:
    found = {
        name: max(step[f"memory_{name}_gb"] for step in steps if f"memory_{name}_gb" in step)
        for name in ("trainer_peak", "trainer_left", "engines_left")
        if any(f"memory_{name}_gb" in step for step in steps)
    }
    rows: list[Row] = []
    if "trainer_peak" in found and outcome["planned_gb"]:
        peak, planned = found["trainer_peak"], outcome["planned_gb"]
        note = f"{peak:.1f} GB, planned {planned:.1f}: {peak / planned:.3f}"
        rows.append(("trainer's largest memory against orhpc plan", note))
    left = ", ".join(f"{n} {v:.1f}" for n, v in found.items() if n.endswith("left"))
    return [*rows, ("left behind by the sleeping side, all GPUs, GB", left)] if left else rows


def _mismatch(steps: Sequence[Event]) -> list[Row]:
    names = (
        "rollout_kl", "logprob_diff_mean", "logprob_diff_max", "token_mismatch_fraction", "expert_max_vio",
        "expert_rank_max_vio", "grad_norm",
    )  # fmt: skip
    found = {n: middle(steps, lambda s, n=n: s.get(n)) for n in names}
    note = ", ".join(f"{n} {v:.3g}" for n, v in found.items() if v is not None)
    return [("train-rollout", note)]


def _commits(events: Sequence[Event], steps: Sequence[Event]) -> list[Row]:
    commits = [event for event in events if event["event"] == "commit"]
    if not commits:
        return []
    shown = ", ".join(f"step {e['step']}: {e['bytes'] / 1e9:.2f} GB in {e['seconds']:.1f} s" for e in commits)
    at = {event["step"] for event in commits}
    stalls = ", ".join(f"{s['phases']['checkpoint']:.2f}" for s in steps if s["step"] in at)
    return [("commits, written during training", shown), ("checkpoint stall, s", stalls)]


def _restart(outcome: Mapping[str, Any], events: Sequence[Event], steps: Sequence[Event]) -> list[Row]:
    stopped, attempts = outcome["stopped"], [step["attempt"] for step in steps]
    commits = [e["time"] - stopped for e in events if e["event"] == "commit" and e["time"] > stopped]
    after = [s["time"] for s in steps if s["attempt"] == max(attempts, default=0)]
    rows: list[Row] = [("stopped in step; attempts of the steps", f"{_before(steps, stopped)}; {attempts}")]
    if commits:
        rows.append(("SIGTERM to its commit, s", f"{min(commits):.1f}"))
    if len(outcome["began"]) > 1 and after:
        took = min(after) - outcome["began"][1]
        rows.append(("same command again to its first new step, s", f"{took:.1f}"))
    return rows


def _before(steps: Sequence[Event], when: float) -> int:
    return max((step["step"] for step in steps if step["time"] <= when), default=0) + 1
