"""All trackers of one attempt, each in a thread of its own, so that none can stop or slow training."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from orhpc.config import Config
from orhpc.process.secrets import redact
from orhpc.rundir import RunDir
from orhpc.rundir.events import last_events
from orhpc.tracking.backend import Backend
from orhpc.tracking.details import DetailsReader
from orhpc.tracking.feed import Feed
from orhpc.tracking.mlflow import Mlflow
from orhpc.tracking.rows import Row
from orhpc.tracking.tensorboard import Tensorboard
from orhpc.tracking.weights_and_biases import WeightsAndBiases, switched_off

log = logging.getLogger(__name__)
_QUEUE = 10_000
_FINISH_S = 30.0
_RETRY_S = 60.0
_MOST_RETRY_S = 900.0
"""Seconds until a tracker that failed is tried again; doubled each time up to the latter."""


class Tracker:
    """Sends the metrics of one attempt to every enabled tracker."""

    def __init__(
        self, config: Config, rundir: RunDir, problem: Callable[[str], object] = lambda line: None
    ) -> None:
        """``problem`` gets one line when a tracker fails for the first time, in that tracker's thread."""
        details = DetailsReader(rundir, config.tracking)
        backends = enabled(config, rundir, problem)
        self._workers = [_Worker(Feed(backend, rundir, details), rundir, problem) for backend in backends]

    @property
    def dropped(self) -> int:
        """Rows and alarms that did not fit into a queue; the rows are sent later."""
        return sum(worker.dropped for worker in self._workers)

    def log(self, event: Mapping[str, Any]) -> None:
        """Queue the row of a step's or an evaluation's event; returns at once."""
        for worker in self._workers:
            worker.put(Row.of(event))

    def catch_up(self, step: int) -> None:
        """Queue the rows up to ``step``, where this attempt starts, that no earlier attempt has written.

        A killed attempt may have left any of its rows unwritten.
        """
        for worker in self._workers:
            worker.put(step)

    def alert(self, text: str) -> None:
        """Queue an alarm or a notice; returns at once."""
        for worker in self._workers:
            worker.put(text)

    def close(self, timeout_s: float = _FINISH_S) -> None:
        """Wait until all threads have written everything, within a deadline."""
        end = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.finish()
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))


def enabled(config: Config, rundir: RunDir, problem: Callable[[str], object]) -> list[Backend]:
    """The enabled trackers of a run."""
    found: list[Backend] = []
    if config.wandb.enabled and not switched_off():
        found.append(WeightsAndBiases(config, rundir, warn=problem))
    if config.tensorboard.enabled:
        found.append(Tensorboard(rundir))
    if config.mlflow.enabled:
        found.append(Mlflow(config, rundir))
    return found


class _Worker:
    """The thread of one tracker.  After a failure, rows wait in ``events.jsonl`` until it works again."""

    def __init__(self, feed: Feed, rundir: RunDir, problem: Callable[[str], object]) -> None:
        self.dropped = 0
        self._feed, self._rundir, self._problem = feed, rundir, problem
        self._name = feed.backend.name
        self._queue: queue.Queue[Row | int | str | None] = queue.Queue(_QUEUE)
        """Rows, steps to catch up to, and alerts; None ends the thread."""
        self._incomplete = False
        """Whether the tracker lacks rows, because of a failure or a full queue."""
        self._failures = 0
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._work, name=feed.backend.key, daemon=True)
        self._thread.start()

    def put(self, item: Row | int | str) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1
            self._incomplete = True

    def finish(self) -> None:
        """Ask the thread to write the rest and end."""
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            log.warning("%s is blocked; its last metrics are only in events.jsonl", self._name)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s did not finish in time; events.jsonl has everything", self._name)

    def _work(self) -> None:
        self._try(self._feed.open)
        while True:
            wait_s = max(0.0, self._retry_at - time.monotonic()) if self._incomplete else None
            try:
                item = self._queue.get(timeout=wait_s)
            except queue.Empty:
                self._sync()
                continue
            if item is None:
                break
            self._handle(item)
        if self._incomplete:
            self._sync()
        events = last_events(self._rundir.events)
        end = str(events[-1]["event"]) if events else ""
        self._try(lambda: self._feed.close(end))

    def _handle(self, item: Row | int | str) -> None:
        feed = self._feed
        if isinstance(item, str):
            self._try(lambda: feed.alert(item))
            return
        if isinstance(item, int):
            feed.begin(item)
            self._incomplete = True  # nobody knows which rows earlier attempts have written
        else:
            feed.advance(item.step)
        if not self._incomplete:
            assert isinstance(item, Row)
            self._incomplete = not self._try(lambda: feed.add(item))
        elif time.monotonic() >= self._retry_at:
            self._sync()

    def _sync(self) -> None:
        self._incomplete = False  # before it, because the queue may overflow again meanwhile
        if self._try(self._feed.sync):
            self._failures = 0
        else:
            self._incomplete = True

    def _try(self, work: Callable[[], object]) -> bool:
        """Do one piece of work; returns whether it succeeded.  The first of several failures is reported."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - no error of a tracker may stop training
            self._feed.drop()
            self._retry_at = time.monotonic() + min(_RETRY_S * 2**self._failures, _MOST_RETRY_S)
            self._failures += 1
            if self._failures == 1:
                reason = redact(" ".join(str(error).split()))[:300] or type(error).__name__
                self._problem(
                    f"{self._name} does not work: {reason}; it is tried again, and gets what it lacks then, "
                    f"from the next attempt, or by `orhpc sync {self._rundir.path}`"
                )
            return False
        return True
