"""Weights & Biases, in addition to ``events.jsonl``: optional, and never able to stop or slow training.

All calls happen in one background thread that takes metrics from a bounded queue.  The run's id is
kept in the run directory, so that every attempt continues the same W&B run.  Without a key in the
environment the run is offline, in ``RUN/wandb``.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from orhpc.config import Config
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.metrics import tracker_name

log = logging.getLogger(__name__)

_QUEUE = 10_000
_FINISHED = "wandb_step"
"""File of the run directory: the newest step whose row an attempt has finished writing."""
_FINISH_S = 30.0
_START_S = 60.0
"""Seconds to wait for W&B's server."""
_FAILED = {
    "online": "W&B does not answer (%s); its data are stored, and `wandb sync %s/wandb/offline-*` sends them",
    "offline": "W&B is off for this attempt: %s (%s)",
}


class Tracker:
    """Logs metrics of one attempt to the run's W&B run."""

    def __init__(self, config: Config, rundir: RunDir) -> None:
        self.dropped = 0
        """Metric rows and alarms that did not fit into the queue."""
        self._last = -1
        """Newest step for which W&B has a row."""
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(_QUEUE)
        self._config, self._rundir = config, rundir
        self._thread: threading.Thread | None = None
        if config.wandb.enabled:
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Queue one step's metrics; returns at once."""

        def write(run: Any) -> None:
            run.log(metrics, step=step)
            self._last = step

        self._hand_over(write)

    def catch_up(self, step: int) -> None:
        """Queue rows up to ``step``, where this attempt starts, that no earlier attempt has finished.

        A killed attempt may have left any of its rows unwritten, and which ones is not known.  W&B keeps one
        row per step and refuses rows before its newest.
        """
        self._hand_over(lambda run: self._repeat(run, step))

    def _repeat(self, run: Any, step: int) -> None:
        first = max(_finished_step(self._rundir), int(getattr(run, "starting_step", 0) or 0) - 1)
        events = read_events(self._rundir.events)
        rows: dict[int, dict[str, float]] = {}
        for event in [*steps_of(events).values(), *(e for e in events if e["event"] == "evaluation")]:
            if first < event["step"] <= step:
                rows.setdefault(event["step"], {}).update(row_of(event))
        for number, row in sorted(rows.items()):
            run.log(row, step=number)
        self._last = max(self._last, step)

    def alert(self, text: str) -> None:
        """Queue an alarm, which W&B sends to its subscribers; returns at once."""
        self._hand_over(lambda run: run.alert(title="orhpc", text=text, wait_duration=600))

    def _hand_over(self, work: Callable[[Any], None]) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = _FINISH_S) -> None:
        """Wait until the thread has written everything, within a deadline."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            log.warning("W&B is blocked; its last metrics are only in events.jsonl")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("W&B did not finish within %.0f s; events.jsonl has everything", timeout_s)

    def _work(self) -> None:
        run = None
        online = bool(os.environ.get("WANDB_API_KEY")) and os.environ.get("WANDB_MODE") != "offline"
        for mode in ("online", "offline") if online else ("offline",):
            try:
                run = self._start(mode, again=online and mode == "offline")
                break
            except Exception as error:  # noqa: BLE001 - no error of a logger may stop training
                log.warning(_FAILED[mode], " ".join(str(error).split())[:300], self._rundir.path)
        while (work := self._queue.get()) is not None:
            if run is None:
                continue
            try:
                work(run)
            except Exception as error:  # noqa: BLE001
                log.warning("W&B refused a row or an alarm: %s", " ".join(str(error).split())[:300])
        if run is not None:
            try:
                run.finish()
                write_atomic(self._rundir.path / _FINISHED, str(self._last))
            except Exception as error:  # noqa: BLE001
                log.warning("W&B did not finish: %s", " ".join(str(error).split())[:300])

    def _start(self, mode: Literal["online", "offline"], *, again: bool) -> Any:
        import wandb  # takes two seconds, and only this thread needs it

        if again:  # W&B's service still holds the run's id
            wandb.teardown()
        w, rundir = self._config.wandb, self._rundir
        return wandb.init(
            project=w.project,
            entity=w.entity,
            group=w.group,
            tags=w.tags,
            name=self._config.run.name,
            id=run_id(rundir),
            resume="allow",
            dir=str(rundir.path),
            mode=mode,
            config=self._config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=_START_S),
        )


def row_of(event: Mapping[str, Any]) -> dict[str, float]:
    """A step's or an evaluation's event as a W&B row, in sections (:mod:`orhpc.rundir.metrics`)."""
    evaluation = event["event"] == "evaluation"
    row: dict[str, float] = {}
    for key, value in event.items():
        number = _number(value)
        if key in ("event", "time", "attempt", "step", "steps", "phases") or number is None:
            continue
        if evaluation:
            row |= {} if key == "seconds" else {f"eval/{key}": number}
        else:
            row[tracker_name(key)] = number
    return row | {f"phase/{name}": seconds for name, seconds in event.get("phases", {}).items()}


def _number(value: Any) -> float | None:
    """The value as a number; events store NaN and infinity, which JSON lacks, as text."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    return value if isinstance(value, int | float) else None


def _finished_step(rundir: RunDir) -> int:
    try:
        return int((rundir.path / _FINISHED).read_text())
    except (FileNotFoundError, ValueError):
        return -1


def run_id(rundir: RunDir) -> str:
    """The W&B id of a run: created once, then the same for every attempt."""
    path = rundir.path / "wandb_id"
    if not path.exists():
        write_atomic(path, secrets.token_hex(8))
    return path.read_text().strip()
