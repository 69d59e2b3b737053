"""One attempt at a run: its folder, config, logs and stop file, and how far it has come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.driver.copies import Copies
from orhpc.driver.fault_injection import FaultInjector
from orhpc.driver.step_report import CompletedStep, report
from orhpc.errors import NodeLost, StopRequested
from orhpc.plan.placement import Placement
from orhpc.process.state_folder import state_folder
from orhpc.rundir import RunDir
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import EventLog
from orhpc.rundir.prompt_ledger import PromptLedger
from orhpc.rundir.storage import StorageRetry, refusals
from orhpc.tracking import Tracker

log = logging.getLogger("orhpc.driver")
T = TypeVar("T")
_STOP_POLL_S = 0.2
_STORAGE_ALERT_S = 60.0
"""Minimum seconds between two storage alerts."""
CLOSE_AFTER_STOP_S = 5.0
"""Seconds that sessions and loggers may take to close after a stop and its commit."""


class Run:
    """One attempt at a run, over all its restarts in place."""

    def __init__(self, rundir: RunDir, attempt: int, stop_file: Path) -> None:
        self.rundir, self.attempt = rundir, attempt
        self.folder = rundir.attempt(attempt)
        self.config: Config = load_config(self.folder / "config.yaml")
        self.placement = Placement.from_yaml((self.folder / "placement.yaml").read_text())
        self.events = EventLog(rundir.events, attempt, _log_event)
        self.ledger = PromptLedger(rundir.prompts, attempt)
        self.tracker = Tracker(self.config, rundir, self._report_tracker)
        self.max_tokens = self.config.train.max_tokens_per_gpu
        """Token budget of a micro-batch since the newest start; lowered after running out of memory."""
        self.last_step = -1
        """Newest step that was reported; -1 before the first."""
        self.last_step_non_finite = False
        """Whether a loss or gradient that is not finite ended that step."""
        self.unreported: CompletedStep | None = None
        """The trainers' last step, if it is not reported yet."""
        self.storage = StorageRetry(self.config.run.storage_wait_s, self._refused, self.stop_requested)
        self.copies = Copies(state_folder(), self.notice)
        """Copies of the state in memory, from which a restart in place continues."""
        self.faults = FaultInjector(self.config.faults, rundir, attempt, self.placement.nodes, self.events)
        """Failures that the config asks for; none unless a recovery is rehearsed."""
        self._stop_file = stop_file
        self._alerted = -_STORAGE_ALERT_S

    @property
    def is_job(self) -> bool:
        """Whether the attempt is one of a SLURM job."""
        return self.rundir.attempt_metadata(self.attempt).get("kind") == "slurm"

    def stop_requested(self) -> bool:
        return self._stop_file.exists()

    def raise_if_stopped(self) -> None:
        """Raises StopRequested once the stop file exists."""
        if self.stop_requested():
            raise StopRequested("asked to stop")

    async def require_newest(self) -> None:
        """Check that no newer attempt has begun; it would own the files that this attempt replaces.

        Raises:
            NodeLost: a newer attempt has begun.
            StorageRefused: the run directory cannot be read.
        """
        with refusals("the run directory cannot be read"):
            newest = self.rundir.newest_attempt()
        if newest > self.attempt:
            raise NodeLost("a newer attempt has begun")

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that does not check the stop file itself.

        Raises:
            StopRequested: the stop file appeared first.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_STOP_POLL_S))[0]:
                self.raise_if_stopped()
            return await task
        finally:
            task.cancel()

    def report_step(self) -> None:
        """Report the completed step, unless it has been reported."""
        if self.unreported is None:
            return
        step, self.unreported = self.unreported, None
        report(self, step)
        self.last_step = step.state.step
        self.last_step_non_finite = bool(step.metrics.get("non_finite"))

    def notice(self, line: str) -> None:
        """Report a problem that does not end the run but needs a person's attention."""
        log.warning("%s", line)
        self.events.write("notice", reason=line)
        self.tracker.alert(line)

    def _report_tracker(self, line: str) -> None:
        """Report a tracker that does not work; called by its thread."""
        log.warning("%s", line)
        self.events.write("notice", reason=line)

    def close(self) -> None:
        self.tracker.close(*([CLOSE_AFTER_STOP_S] if self.stop_requested() else []))
        self.events.close()
        self.ledger.close()

    def _refused(self, problem: str) -> None:
        """Report a refused write; all workers of a step may report the same one."""
        log.error(problem)
        if time.monotonic() >= self._alerted + _STORAGE_ALERT_S:
            self._alerted = time.monotonic()
            self.events.write("storage_refused", error=problem)
            self.tracker.alert(problem)


def _log_event(event: dict[str, Any]) -> None:
    """Log what users look for: steps, commits and evaluations."""
    if (line := line_of(event)) is not None:
        log.info("%s", line)
