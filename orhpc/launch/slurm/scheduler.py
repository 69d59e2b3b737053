"""Queries to SLURM, each with a timeout: client commands hang when the controller is down."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from orhpc.errors import PreflightError

_TIMEOUT_S = 20.0
_TRIES = 3
ACTIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD", "RESIZING"}
    | {"SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "REQUEUE_FED", "RESV_DEL_HOLD", "EXPEDITING"}
)
"""States of a job that runs or will run.  A COMPLETING job has ended."""


_AWAY = ("Unable to contact slurm", "timed out", "standby mode", "Zero Bytes")
"""Parts of the errors of a controller that does not answer; the batch script knows the same."""
_UNKNOWN_JOB = "Invalid job id"


class ControllerAway(PreflightError):
    """SLURM's controller does not answer; its restart takes minutes."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """Fields of ``scontrol show job --oneliner``."""

    fields: dict[str, str]

    @classmethod
    def parse(cls, line: str) -> JobInfo:
        return cls({m[1]: m[2] for m in re.finditer(r"(\S+?)=(\S*)", line)})

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "")

    @property
    def running(self) -> bool:
        """Whether the job runs; while SLURM delivers a signal, it shows a running job as SIGNALING."""
        return self.state in ("RUNNING", "SIGNALING")

    @property
    def restarts(self) -> int:
        """How many times the job has been requeued."""
        count = self.fields.get("Restarts", "0")
        return int(count) if count.isdigit() else 0

    @property
    def being_preempted(self) -> bool:
        return self.fields.get("PreemptTime", "None") not in ("None", "(null)", "")

    def seconds_left(self, now: float | None = None) -> float | None:
        """Seconds to the time limit; None without a limit."""
        end = self.time_of("EndTime")
        return None if end is None else end - (time.time() if now is None else now)

    def time_of(self, name: str) -> float | None:
        """A time field, in seconds since the epoch; None if it is not a time."""
        try:
            return datetime.fromisoformat(self.fields.get(name, "")).timestamp()
        except ValueError:
            return None


def available() -> bool:
    return shutil.which("squeue") is not None


def query(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a SLURM client command.

    Raises:
        ControllerAway: the controller does not answer.
        PreflightError: there is no such command.
    """
    problem = ""
    for attempt in range(_TRIES):
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise PreflightError(f"{command[0]}: not found; is this a SLURM login node?") from None
        except subprocess.TimeoutExpired:
            problem = f"no answer within {_TIMEOUT_S:.0f} s"
        else:
            if result.returncode == 0 or not any(part in result.stderr for part in _AWAY):
                return result
            problem = " ".join(result.stderr.split())
        time.sleep(attempt + 1)
    raise ControllerAway(f"{command[0]}: {problem}")


def job_state(job_id: str) -> str | None:
    """State of a job, or of an array's element, from squeue; None if SLURM does not know it any more.

    Raises:
        ControllerAway: the controller does not say.
    """
    shown = _shown("squeue", "--noheader", "--jobs", job_id, "--states", "all", "--format", "%T")
    return shown.split()[0] if shown.strip() else None


def _shown(*command: str) -> str:
    """Output of a query about one job; empty if SLURM does not know the job any more.

    Raises:
        ControllerAway: the query failed for another reason, so the job may well be running.
    """
    result = query(*command)
    if result.returncode and _UNKNOWN_JOB not in result.stderr:
        raise ControllerAway(f"{command[0]}: {' '.join(result.stderr.split())}")
    return result.stdout if result.returncode == 0 else ""


def job_states(job_ids: Sequence[str]) -> dict[str, str]:
    """States of several jobs by id, with one call of squeue; jobs that SLURM does not know are left out."""
    result = query(
        "squeue", "--noheader", "--jobs", ",".join(job_ids), "--states", "all", "--format", "%i %T", "--array"
    )  # --array: a line for each element, also of those that wait together
    if result.returncode:  # squeue refuses a list if it knows none of its jobs
        return {}
    found: dict[str, str] = {}
    for line in result.stdout.splitlines():
        if len(words := line.split()) >= 2:
            # The components of a heterogeneous job are JOB+0, JOB+1; the first stands for all.
            found.setdefault(words[0].partition("+")[0], words[1])
    return {job: found[job] for job in job_ids if job in found}


def job_info(job_id: str) -> JobInfo | None:
    """The controller's fields of a job; None if it does not know the job any more.

    Of a heterogeneous job, they are those of its first component.

    Raises:
        ControllerAway: the controller does not say.
    """
    shown = _shown("scontrol", "show", "job", "--oneliner", job_id).strip()
    return JobInfo.parse(shown.partition("\n")[0]) if shown else None


def grace_time_s(partition: str) -> float:
    """Seconds that a preempted job in this partition may continue; 0 if the partition sets no GraceTime."""
    result = query("scontrol", "show", "partition", "--oneliner", partition)
    named = re.search(r"\bGraceTime=(\d+)", result.stdout)
    return float(named[1]) if named else 0.0


def cancel(job_id: str) -> None:
    """Cancel a job.

    Raises:
        PreflightError: SLURM refuses.
    """
    result = query("scancel", job_id)
    if result.returncode:
        raise PreflightError(f"scancel {job_id}: {' '.join(result.stderr.split())}")


def signal_batch_shell(job_id: str, name: str) -> None:
    """Send a signal to a job's batch shell only, as ``--signal=B:`` does.

    Raises:
        PreflightError: SLURM refuses.
    """
    result = query("scancel", "--batch", f"--signal={name}", job_id)
    if result.returncode:
        raise PreflightError(f"scancel --signal={name} {job_id}: {' '.join(result.stderr.split())}")


def nodes_down(*, given_up: bool = False) -> list[str]:
    """Nodes of this job that SLURM shows as down, failed or not responding.

    ``given_up``: only those that it has taken from the job, if that goes on without them.
    """
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed or not available():
        return []
    try:
        result = query("sinfo", "--noheader", "--Node", "--nodes", listed, "--format", "%N %T")
    except PreflightError:
        return []
    pairs = {(line.split()[0], line.split()[1]) for line in result.stdout.splitlines() if line.strip()}
    if given_up:
        return sorted({name for name, state in pairs if state.startswith("down")})
    return sorted(
        {name for name, state in pairs if state.startswith(("down", "fail")) or state.endswith("*")}
    )
