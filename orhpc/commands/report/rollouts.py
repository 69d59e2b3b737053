"""Rollouts for the report: distributions of rewards and lengths over the run, and a few samples to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orhpc.commands.view.transcript import lines
from orhpc.errors import RecordError, StorageRefused
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile, read_step
from orhpc.types import RolloutSummary

_STEPS = 24
"""Recorded steps whose rollouts are counted, evenly over the run."""
_BINS = 20
_MOST_BYTES = 256 << 20
"""Size of the records that one report reads; the newest step is always read."""
_MOST_CHARACTERS = 6000
"""Of one sample."""


def recorded_steps(run: RunDir) -> list[int]:
    """Training steps whose rollouts are recorded, in order."""
    names = (path.name.removeprefix("step_") for path in run.rollouts.glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def distributions(run: RunDir) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Histograms of rewards and response lengths over the run, and samples of the newest recorded step.

    A record that is damaged or being written is left out.

    Returns:
        ``{"steps", "rewards", "lengths"}``, where each of the latter has ``edges`` and, by step, ``counts``;
        and the samples: ``title`` and ``text``.
    """
    steps = recorded_steps(run)
    found = dict(_read(run, _chosen(run, steps)))
    if not found:
        return {}, []
    rollouts = [r for of_step in found.values() for r in of_step if r.reward is not None]
    histograms: dict[str, Any] = {"steps": list(found)}
    for name, value in (("rewards", "reward"), ("lengths", "response_tokens")):
        edges = _edges([float(getattr(r, value)) for r in rollouts])
        histograms[name] = {
            "edges": [float(f"{e:.6g}") for e in edges],
            "counts": [
                np.histogram([getattr(r, value) for r in of_step if r.reward is not None], edges)[0].tolist()
                for of_step in found.values()
            ],
        }
    newest = max(found)
    return histograms, list(_samples(newest, found[newest]))


def _chosen(run: RunDir, steps: Sequence[int]) -> list[int]:
    """Steps to read, evenly over the run and within the limit on their size."""
    if not steps:
        return []
    size = sum(path.stat().st_size for path in run.rollouts_of(steps[-1]).glob("*.h5"))
    count = min(_STEPS, max(1, _MOST_BYTES // max(size, 1)), len(steps))
    places = {round(i) for i in np.linspace(0, len(steps) - 1, count)} if count > 1 else set()
    return [steps[i] for i in sorted(places | {len(steps) - 1})]


def _read(run: RunDir, steps: Sequence[int]) -> Iterator[tuple[int, list[RolloutSummary]]]:
    for step in steps:
        try:
            if rollouts := read_step(run.rollouts_of(step), trained_only=False):
                yield step, rollouts
        except (RecordError, StorageRefused, OSError):
            continue


def _edges(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Edges of equally wide bins from the lowest to the highest value."""
    if not values:
        return np.linspace(0, 1, _BINS + 1)
    low, high = float(min(values)), float(max(values))
    return np.linspace(low, high if high > low else low + 1.0, _BINS + 1)


def _samples(step: int, rollouts: Sequence[RolloutSummary]) -> Iterator[dict[str, str]]:
    """The best, the worst, the longest and a failed rollout of a step."""
    judged = sorted((r for r in rollouts if r.reward is not None), key=lambda r: r.reward or 0.0)
    failed = [r for r in rollouts if r.reward is None]
    longest = max(rollouts, key=lambda r: r.length, default=None)
    chosen = [
        ("highest reward", judged[-1] if judged else None),
        ("lowest reward", judged[0] if judged else None),
        ("longest", longest),
        ("failed", failed[0] if failed else None),
    ]
    shown: set[str] = set()
    for what, rollout in chosen:
        if rollout is None or rollout.id in shown or rollout.location.file is None:
            continue
        shown.add(rollout.id)
        reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:.3f}"
        title = f"step {step}, {what}: {rollout.task.id}, {reward}, {rollout.length} tokens, {rollout.end}"
        yield {"title": title, "text": _text(Path(rollout.location.file), rollout.location.row)}


def _text(file: Path, row: int) -> str:
    try:
        with RolloutFile(file) as record:
            text = "\n".join(lines(record.rollout(row)))
    except (RecordError, StorageRefused) as error:
        return str(error)
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    left_out = len(text) - _MOST_CHARACTERS
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
