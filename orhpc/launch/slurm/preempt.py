"""Determine the reason for a signal.

SLURM sends USR2 to the batch shell before the time limit, and before a preemption if the site sends user
signals; at other sites a preemption sends SIGTERM to the tasks only.  In both cases the stop file is created
and the driver commits; SLURM's description of the job then distinguishes the reasons.
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
"""SLURM checks time limits about twice a minute, and its signal may come that much early."""


_ENDING = {
    "CANCELLED": Reason.CANCELLED,
    "NODE_FAIL": Reason.NODE_LOST,
    "NodeDown": Reason.NODE_LOST,
    "PREEMPTED": Reason.PREEMPTED,
    "TIMEOUT": Reason.TIME_LIMIT,
    "TimeLimit": Reason.TIME_LIMIT,
    "OUT_OF_MEMORY": Reason.OUT_OF_MEMORY,
}
"""Job states, and reasons of a COMPLETING job, that determine alone why the job ended."""


class Signals:
    """Creates the stop file on SIGTERM, SIGUSR2 or SIGINT to this process; later signals have no effect."""

    def __init__(self, stop_file: Path | None) -> None:
        self._stop_file = stop_file
        self.received: list[int] = []
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self.received.append(number)
        if self._stop_file is not None and not self._stop_file.exists():
            self._stop_file.touch()  # only once: its mtime is the time of the first signal


class LimitWatch:
    """Stops the job in time if commits take longer than the lead time of the job's ``--signal``.

    A job keeps the ``--signal`` it was submitted with over all requeues, and that was set before the first
    commit was measured.
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
    """Why the job was signaled to stop, from SLURM's description of it at that time.

    Args:
        info: SLURM's description; None if SLURM does not know the job any more.
        lead_s: seconds before the time limit at which the job is signaled.
        restart: the job's restart count at its start.  SLURM increments it when it requeues the job, after a
            node failure or by hand; a canceled job keeps its count.
        now: current time in seconds since the epoch.
        granted_until: end of the grace time of an earlier preemption, in seconds since the epoch; a job that
            ends before it was canceled during the grace time.
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
    """End of the grace time of the preemption at the batch shell's first signal, in seconds since the epoch.

    SLURM sets a running job's EndTime to it, but shows none for a job without a time limit, and for a job
    canceled before the batch shell's query it shows the time of the cancellation.  In these cases the result
    is PreemptTime plus the partition's grace time.  None if not known.
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
    """Wait for the batch shell, which may just have been signaled, to save SLURM's description of the job."""
    end = time.monotonic() + _NOTES_S
    while job.asking and time.monotonic() < end:
        time.sleep(0.1)


def info_at_signal(job: Job) -> JobInfo | None:
    """SLURM's description of the job, as saved by the batch shell or queried now; None if there is none."""
    if job.last_note.exists():
        return JobInfo.parse(job.last_note.read_text())
    if not scheduler.available():
        return None
    try:
        return scheduler.job_info(job.id)
    except PreflightError:
        return None
