"""Tables and histograms of a step's rollouts, from its record."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orhpc.config.tracking import TrackingSettings
from orhpc.errors import OrhpcError
from orhpc.process.terminal import safe
from orhpc.rundir import RunDir

if TYPE_CHECKING:
    from orhpc.rundir.trained import TrainedRollout
    from orhpc.types import Float64Array, RolloutSummary

log = logging.getLogger(__name__)
_MOST_BYTES = 512 << 20
"""Size of a step's record above which it is not read."""
_MOST_COMPARED = 64
"""Rollouts whose log-probabilities are compared, evenly over the step."""
_MOST_CHARACTERS = 4000
"""Of a prompt, and of an answer, in a table."""
COLUMNS = ("step", "rollout", "task", "reward", "advantage", "end", "prompt", "answer")


@dataclass(frozen=True, slots=True)
class Details:
    """Values of one step's rollouts that are no single number."""

    samples: list[list[Any]] = field(default_factory=list)
    """Rows of a table with :data:`COLUMNS`."""
    histograms: dict[str, Float64Array] = field(default_factory=dict)
    """Values by tracker name: ``reward/rewards``, ``train/advantages``, ``rollout/response_lengths``,
    ``mismatch/logprob_diffs`` (trainer minus engine, in nats, of each sampled token)."""


class DetailsReader:
    """Reads the details of steps; several trackers that ask for the same step read it once."""

    def __init__(self, rundir: RunDir, settings: TrackingSettings) -> None:
        self._rundir, self._settings = rundir, settings
        self._lock = threading.Lock()
        self._last: tuple[int, float, Details | None] | None = None

    def of(self, step: int, time: float) -> Details | None:
        """Details of the step that was reported at this time; None if none are wanted or readable."""
        if step % self._settings.interval or not (self._settings.samples or self._settings.histograms):
            return None
        with self._lock:
            if self._last is None or self._last[:2] != (step, time):
                self._last = (step, time, self._read(step))
            return self._last[2]

    def _read(self, step: int) -> Details | None:
        folder = self._rundir.rollouts_of(step)
        try:
            size = sum(path.stat().st_size for path in folder.glob("*.h5"))
            return read_details(folder, step, self._settings) if 0 < size <= _MOST_BYTES else None
        except (OrhpcError, OSError, ImportError) as error:
            log.debug("no details of step %d: %s", step, error)
        except Exception as error:  # noqa: BLE001 - a record may have any message; the row must not wait for it
            log.warning("no table and no histograms of step %d: %s: %s", step, type(error).__name__, error)
        return None


def read_details(folder: Path, step: int, settings: TrackingSettings) -> Details:
    """Read the details of one recorded step.

    Raises:
        RecordError: the folder has no record, or a damaged one.
        StorageRefused: the filesystem refuses to read it.
        ImportError: h5py is not installed here.
    """
    import numpy as np

    from orhpc.rundir.record import read_step
    from orhpc.rundir.trained import read_trained

    rollouts = read_step(folder)
    trained = read_trained(folder)
    judged = [r for r in rollouts if r.reward is not None]
    samples = [_sample(step, r, trained) for r in _spread(judged, settings.samples)]
    if not settings.histograms:
        return Details(samples)
    histograms = {
        "reward/rewards": np.array([r.reward for r in judged], np.float64),
        "rollout/response_lengths": np.array([r.response_tokens for r in rollouts], np.float64),
        "train/advantages": np.array([t.advantage for t in trained.values()], np.float64),
        "mismatch/logprob_diffs": _differences(rollouts, trained),
    }
    # W&B and MLflow refuse a histogram with NaN or infinity, and the row with it.
    finite = {name: values[np.isfinite(values)] for name, values in histograms.items()}
    return Details(samples, {name: values for name, values in finite.items() if len(values)})


def _spread(rollouts: Sequence[RolloutSummary], count: int) -> list[RolloutSummary]:
    """``count`` rollouts, evenly from the lowest to the highest reward."""
    ranked = sorted(rollouts, key=lambda r: r.reward or 0.0)
    return [ranked[i] for i in _evenly(len(ranked), count)]


def _evenly(length: int, count: int) -> list[int]:
    """At most ``count`` indices below ``length``, evenly, with the first and the last."""
    if length <= count:
        return list(range(length))
    if count < 2:
        return [length // 2][:count]
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


def _sample(step: int, summary: RolloutSummary, trained: Mapping[str, TrainedRollout]) -> list[Any]:
    from orhpc.rundir.record import RolloutFile

    assert summary.location.file is not None
    with RolloutFile(summary.location.file) as record:
        messages = record.rollout(summary.location.row).messages
    first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
    advantage = trained[summary.id].advantage if summary.id in trained else None
    prompt, answer = _text(messages[:first]), _text(messages[first:])
    end = str(summary.end)
    return [step, summary.id, summary.task.id, summary.reward, advantage, end, prompt, answer]


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    text = safe("\n".join(line for message in messages for line in _lines(message)))
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    """The parts of one message, each with the role in front."""
    role = str(message.get("role"))
    if reasoning := message.get("reasoning"):
        yield f"{role} (reasoning): {reasoning}"
    if content := message.get("content"):
        yield f"{role}: {content}"
    for call in message.get("tool_calls") or ():
        yield f"{role} => {json.dumps(call, ensure_ascii=False)}"


def _differences(rollouts: Sequence[RolloutSummary], trained: Mapping[str, TrainedRollout]) -> Float64Array:
    """The trainer's minus the engine's log-probability of sampled tokens."""
    import numpy as np

    from orhpc.rundir.record import RolloutFile

    found: list[Float64Array] = [np.zeros(0)]
    known = [r for r in rollouts if r.id in trained]
    for summary in (known[i] for i in _evenly(len(known), _MOST_COMPARED)):
        assert summary.location.file is not None
        with RolloutFile(summary.location.file) as record:
            arrays = record.arrays(summary.location.row)
        mask_T = arrays["loss_mask_T"]
        difference_T = trained[summary.id].logprobs_T - arrays["logprobs_T"]
        found.append(difference_T[mask_T].astype(np.float64))
    return np.concatenate(found)
