"""Weights & Biases beside ``events.jsonl``: never needed, and never able to stop or slow training.

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
from collections.abc import Callable
from typing import Any

from orhpc.config import Config
from orhpc.rundir import RunDir, write_atomic

log = logging.getLogger(__name__)

_QUEUE = 10_000
_FINISH_S = 30.0


class Tracker:
    """Logs metrics of one attempt to the run's W&B run."""

    def __init__(self, config: Config, rundir: RunDir) -> None:
        self.dropped = 0
        """Metric rows and alarms that did not fit into the queue."""
        self._queue: queue.Queue[Callable[[Any], None] | None] = queue.Queue(_QUEUE)
        self._config, self._rundir = config, rundir
        self._thread: threading.Thread | None = None
        if config.wandb.enabled:
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand over one step's metrics; returns at once."""
        self._hand_over(lambda run: run.log(metrics, step=step))

    def alert(self, text: str) -> None:
        """Hand over an alarm, which W&B sends to whoever wants it; returns at once."""
        self._hand_over(lambda run: run.alert(title="orhpc", text=text, wait_duration=600))

    def _hand_over(self, work: Callable[[Any], None]) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = _FINISH_S) -> None:
        """Let the thread finish, within a deadline."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            log.warning("W&B is stuck; its last metrics are only in events.jsonl")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("W&B did not finish within %.0f s; events.jsonl has everything", timeout_s)

    def _work(self) -> None:
        run = None
        try:
            run = self._start()
        except Exception as error:  # noqa: BLE001 - whatever a logger raises, training goes on
            log.warning("W&B is off for this attempt: %s", " ".join(str(error).split())[:300])
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
            except Exception as error:  # noqa: BLE001
                log.warning("W&B did not finish: %s", " ".join(str(error).split())[:300])

    def _start(self) -> Any:
        import wandb  # two seconds, and only this thread needs it

        w, rundir = self._config.wandb, self._rundir
        online = bool(os.environ.get("WANDB_API_KEY")) and os.environ.get("WANDB_MODE") != "offline"
        return wandb.init(
            project=w.project,
            entity=w.entity,
            group=w.group,
            tags=w.tags,
            name=self._config.run.name,
            id=run_id(rundir),
            resume="allow",
            dir=str(rundir.path),
            mode="online" if online else "offline",
            config=self._config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )


def run_id(rundir: RunDir) -> str:
    """The W&B id of a run: made once, then the same for every attempt."""
    path = rundir.path / "wandb_id"
    if not path.exists():
        write_atomic(path, secrets.token_hex(8))
    return path.read_text().strip()
