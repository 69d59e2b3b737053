"""The holder of a run directory: one SLURM job at a time, recorded in a file and checked with squeue.

A file lock is not sufficient: a node that SLURM considers dead may hold it forever, and some shared
filesystems have no locks.  So the holder's job id is stored in ``holder.json``; it is valid as long as squeue
shows that job as running or waiting.  The same job may always claim the run again after a requeue.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from orhpc.errors import InfraError, RunDirBusy, StopRequested
from orhpc.launch.slurm import ledger, scheduler
from orhpc.launch.slurm.scheduler import ControllerAway
from orhpc.rundir import RunDir
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed

log = logging.getLogger(__name__)

_NAME = "holder.json"
_SUBMITTED = "submitted.json"
SUCCESSOR = "successor"
"""File in the batch shell's folder, and then in the attempt's, with the id of the successor job."""
_LOCK_WAIT_S = 10.0
_CONTROLLER_WAIT_S = 1800.0
"""The same limit as in the batch script."""


def holder_of(rundir: RunDir) -> str | None:
    """Id of the last job that held the run; None if there was none."""
    try:
        return _job_in(rundir.path / _NAME)
    except Damaged as error:
        log.warning("%s; the newest attempt's job counts as the holder", error)
        return ledger.newest_job(rundir)


def note_submission(rundir: RunDir, job: str) -> None:
    """Record the last submitted job, which may be queued for long before it holds the run."""
    write_sealed(rundir.path / _SUBMITTED, {"job": job, "time": time.time()})


def known_jobs(rundir: RunDir) -> list[str]:
    """Jobs of the run that may be running or waiting."""
    found = [holder_of(rundir)]
    try:
        found.append(_job_in(rundir.path / _SUBMITTED))
    except Damaged as error:
        log.warning("%s", error)
    with contextlib.suppress(FileNotFoundError):
        found.append((rundir.attempt(rundir.newest_attempt()) / SUCCESSOR).read_text().strip() or None)
    return sorted({job for job in found if job is not None})


def _job_in(path: Path) -> str | None:
    try:
        job = read_sealed(path, ("job", "time")).get("job")
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(job, str):
        raise Damaged(f"{path} is damaged: it names no job")
    return job


def check_free(rundir: RunDir, job: str | None = None) -> None:
    """Raises RunDirBusy, naming the holder, when another job than ``job`` holds the run."""
    held_by = holder_of(rundir)
    if held_by is None or held_by == job or not scheduler.available():
        return
    if state := scheduler.job_state(held_by):
        if state not in scheduler.ACTIVE:
            return
        raise RunDirBusy(
            f"{rundir.path} is held by job {held_by} ({state.lower()}); "
            f"cancel it with `scancel {held_by}`, or choose another run.name"
        )


def claim(rundir: RunDir, job: str, stopped: Callable[[], bool] = lambda: False) -> None:
    """Make a job the holder, after SLURM has confirmed that no other active job is.

    Args:
        rundir: of the run.
        job: id of the job.
        stopped: polled while the controller is away.

    Raises:
        StopRequested: ``stopped`` returned True.
        RunDirBusy: another job, or a process started with ``--local``, holds the run.
        InfraError: SLURM's controller did not answer in time.
    """
    end = time.monotonic() + _LOCK_WAIT_S
    away_until = time.monotonic() + _CONTROLLER_WAIT_S
    while True:
        try:
            with rundir.locked():
                check_free(rundir, job)
                write_sealed(rundir.path / _NAME, {"job": job, "time": time.time()})
                return
        except ControllerAway as error:
            if time.monotonic() > away_until:
                raise InfraError(str(error)) from None
            if stopped():
                raise StopRequested("asked to stop while SLURM's controller was away") from None
            time.sleep(0.5)
        except RunDirBusy as error:
            # Another job holds the lock only briefly during its check; --local holds it for the whole run.
            if "held by job" in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.5)
