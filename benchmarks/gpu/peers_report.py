"""The table of ``peers.py``: medians of each side, and the others' over orhpc's."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SIDES = ("orhpc", "verl", "verl-bypass")
WARM = 2
"""Steps of each turn that are left out."""
PHASES = {
    "rollout": "rollout",
    "logprobs": "log-probabilities",
    "update": "update",
    "sync": "weights, sleep and wake",
    "rest": "rest",
    "seconds": "whole step",
    "wall": "from step to step",
}
Step = Mapping[str, float]


def measured(turns: Sequence[Mapping[str, Any]], side: str) -> list[Step]:
    """All steps of a side after the first of each turn, with the seconds since the one before (``wall``)."""
    rows: list[Step] = []
    for turn in turns:
        if turn["side"] == side:
            pairs = list(itertools.pairwise(turn["steps"]))
            rows += [step | {"wall": step["at"] - before["at"]} for before, step in pairs[WARM - 1 :]]
    return rows


def report(found: Mapping[str, Any]) -> str:
    """The table of the contents of ``peers.json``."""
    turns = found["turns"]
    sides = [side for side in SIDES if any(turn["side"] == side for turn in turns)]
    steps = {side: measured(turns, side) for side in sides}
    rows = [(label, 2, _of(name)) for name, label in PHASES.items()]
    rows += [
        ("tokens/s, prompts too", 0, lambda step: step["total_tokens"] / step["seconds"]),
        ("tokens/s, from step to step", 0, lambda step: step["total_tokens"] / step["wall"]),
        ("tokens of a step", 0, _of("total_tokens")),
        ("tokens of an answer", 1, _of("response_length")),
    ]
    lines = [*_head(found, sides), f"{'seconds':<28}" + "".join(f"{side:>13}" for side in sides)]
    for label, digits, value in rows:
        medians = {side: statistics.median(map(value, steps[side])) for side in sides if steps[side]}
        cells = (f"{medians[s]:,.{digits}f}" if s in medians else "-" for s in sides)
        lines.append(f"{label:<28}" + "".join(f"{cell:>13}" for cell in cells) + _ratios(medians, sides))
    lines.append(f"{'steps measured':<28}" + "".join(f"{len(steps[side]):>13}" for side in sides))
    return "\n".join([*lines, *map(_turn, turns)])


def _of(name: str) -> Callable[[Step], float]:
    return lambda step: step[name]


def _head(found: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    shape = found["shape"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number)
    return [
        f"{found['machine']}; {versions}",
        f"{shape['prompts']} prompts x {shape['samples']} x {shape['response']} tokens, shapes of "
        f"Qwen3-{shape['size']}, {shape['layers']} layers, micro-batches of {shape['tokens']} tokens, "
        f"GPUs: {shape.get('gpus', 1)}",
        f"medians without each turn's first {WARM} steps; last column: the others' over orhpc's",
        *(f"- {note}" for note in found["notes"] if set(sides) != {"orhpc"}),
    ]


def _turn(turn: Mapping[str, Any]) -> str:
    took = (turn["ended"] or time.time()) - turn["began"]
    first = f", the first after {turn['steps'][0]['at'] - turn['began']:.0f} s" if turn["steps"] else ""
    done = f"{len(turn['steps'])} steps in {took:.0f} s{first}"
    return f"turn {turn['number']}, {turn['side']}: {done}; exit {turn['exit']}"


def _ratios(medians: Mapping[str, float], sides: Sequence[str]) -> str:
    ours = medians.get("orhpc")
    shown = [f"{medians[s] / ours:7.2f}" for s in sides if s != "orhpc" and s in medians and ours]
    return "   x" + " ".join(shown) if shown else ""
