"""From a signal to the reason for it.

The batch shell has USR2 sent to it ahead of the time limit, and ahead of a preemption where the
site sends user signals; elsewhere a preemption is a SIGTERM to the tasks alone.  Either way the
stop file appears, the driver commits, and what SLURM says of the job then tells one from another.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from orhpc.config import Config
from orhpc.errors import PreflightError
from orhpc.launch.slurm import scheduler
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Reason
from orhpc.launch.slurm.scheduler import JobInfo
from orhpc.launch.slurm.submission import DEFAULT_LEAD_S, signal_lead
from orhpc.rundir import RunDir

_ASK_S = 60.0
_NOTES_S = 5.0
_SCAN_S = 90.0
"""SLURM looks at time limits about twice a minute, and its signal may come that much early."""


_ENDING = {
    "CANCELLED": Reason.CANCELLED,
    "NODE_FAIL": Reason.NODE_LOST,
    "NodeDown": Reason.NODE_LOST,
    "PREEMPTED": Reason.PREEMPTED,
    "TIMEOUT": Reason.TIME_LIMIT,
    "TimeLimit": Reason.TIME_LIMIT,
    "OUT_OF_MEMORY": Reason.OUT_OF_MEMORY,
}
"""States, and reasons of a job that is COMPLETING, that say by themselves how it ended."""


class Signals:
    """Turns SIGTERM and SIGUSR2 of this process into the stop file; more of them change nothing."""

    def __init__(self, stop_file: Path | None) -> None:
        self._stop_file = stop_file
        self.came: list[int] = []
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: object) -> None:
        self.came.append(number)
        if self._stop_file is not None and not self._stop_file.exists():
            self._stop_file.touch()  # once: its time is that of the first signal


class LimitWatch:
    """Has the job stop in time where commits have come to take longer than its script's signal allows for.

    A job keeps the ``--signal`` it was submitted with however often it is requeued, and the first
    one is from before the first commit.
    """

    def __init__(self, job: Job, config: Config, rundir: RunDir) -> None:
        self._job, self._config, self._rundir = job, config, rundir
        self._asked = -_ASK_S

    def due(self) -> bool:
        """Whether the time left is less than two of the slowest recent commits; asks once a minute."""
        if time.monotonic() < self._asked + _ASK_S:
            return False
        self._asked = time.monotonic()
        lead_s = signal_lead(self._config, self._rundir)
        if lead_s <= DEFAULT_LEAD_S or not scheduler.available():
            return False
        try:
            info = scheduler.job_info(self._job.id)
        except PreflightError:
            return False
        left_s = info.seconds_left() if info is not None and info.running else None
        return left_s is not None and left_s <= lead_s


def why_stopped(
    info: JobInfo | None,
    lead_s: float,
    restart: int = 0,
    now: float | None = None,
    granted_until: float | None = None,
) -> Reason:
    """Why the job was told to stop, by what SLURM said of it at that time.

    ``restart``: how often it had been started again before.  SLURM counts one more as soon as it has
    requeued the job, for a node's failure or by hand; a job that is cancelled keeps its count.
    ``granted_until``: end of the grace time that an earlier preemption gave it, in seconds since the
    epoch: a job that ends before was cancelled in that time.
    """
    if info is None:
        return Reason.REQUEUED
    why = info.fields.get("Reason", "")
    ending = _ENDING.get(info.state) or _ENDING.get(why)
    if ending is not None:
        return ending
    requeued = info.restarts > restart or why not in ("None", "")
    if (
        info.state == "COMPLETING"
        and not requeued
        and (not info.being_preempted or _cut_short(info, granted_until))
    ):
        return Reason.CANCELLED
    if info.being_preempted:
        return Reason.PREEMPTED
    left = info.seconds_left(now)
    if info.running and left is not None and left <= lead_s + _SCAN_S:
        return Reason.TIME_LIMIT
    return Reason.SIGNALLED if info.running and not requeued else Reason.REQUEUED


def _cut_short(info: JobInfo, granted_until: float | None) -> bool:
    ends = info.time_of("EndTime")
    return ends is not None and granted_until is not None and ends < granted_until - 1


def grace_ends(job: Job) -> float | None:
    """When the grace time of the preemption that the batch shell was first told of ends, since the epoch.

    SLURM brings a running job's end forward to it, but shows no end of one without a time limit; and of
    one that has been cancelled since, before the batch shell had asked, it shows when that was.  Then it
    is reckoned from the partition's grace time.  None where there is none to know.
    """
    first = JobInfo.parse(job.first_note.read_text()) if job.first_note.exists() else None
    if first is None or not first.being_preempted:
        return None
    if first.running and (end := first.time_of("EndTime")) is not None:
        return end
    preempted, partition = first.time_of("PreemptTime"), first.fields.get("Partition")
    if preempted is None or partition is None or not scheduler.available():
        return None
    try:
        grace_s = scheduler.grace_time_s(partition)
    except PreflightError:
        return None
    return preempted + grace_s if grace_s else None


def await_notes(job: Job) -> None:
    """Give the batch shell, which may have been signalled a moment ago, the time to note what SLURM says."""
    end = time.monotonic() + _NOTES_S
    while job.asking and time.monotonic() < end:
        time.sleep(0.1)


def info_at_signal(job: Job) -> JobInfo | None:
    """What SLURM says of the job: asked now, or as the batch shell noted it; None: it does not say."""
    if job.last_note.exists():
        return JobInfo.parse(job.last_note.read_text())
    if not scheduler.available():
        return None
    try:
        return scheduler.job_info(job.id)
    except PreflightError:
        return None
