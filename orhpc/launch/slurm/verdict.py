"""Why an attempt ended, determined from its exit status, signals, SLURM and the kernel."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orhpc.config import Config
from orhpc.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_PREFLIGHT, EXIT_REQUEUE
from orhpc.launch.slurm import ledger, scheduler, submission
from orhpc.launch.slurm.batch_output import BatchOutput
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Outcome, Reason
from orhpc.launch.slurm.preempt import await_notes, grace_ends, info_at_signal, why_stopped
from orhpc.launch.slurm.scheduler import JobInfo
from orhpc.plan.placement import Node
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events

_PROBE_S = 3.0
_PROBE_PORT = 15001
"""Nothing listens on it: a node that is up refuses the connection, a node that is off does not answer."""

_PLACE_LOST = "PlaceLost"
"""Class of the failure that another node's launcher has ended and no spare was left."""
_OF_FAILURE = {
    "OutOfMemory": Reason.OUT_OF_MEMORY,
    "StorageRefused": Reason.STORAGE,
    "SlowNode": Reason.BAD_NODE,
}
"""Reasons for failures after which a job is requeued, by class; all others are infrastructure."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an attempt ended."""

    reason: Reason
    detail: str
    exit_code: int
    """Of the job's step."""
    off: tuple[str, ...] = ()
    """Nodes that were found off, which the next start must not use."""


@dataclass(frozen=True, slots=True)
class AttemptEvidence:
    """The evidence about an attempt that has ended."""

    job: Job
    config: Config
    rundir: RunDir
    attempt: int
    status: int
    """The driver's exit status, or the exit code of the failure that prevented its start."""
    problem: str = ""
    """Message of that failure."""
    kind: str = ""
    """Class of that failure."""
    output: BatchOutput = field(default_factory=lambda: BatchOutput(None))
    """The output of the batch script, with SLURM's lines."""
    memory: str = ""
    """One line about kills by the kernel's memory limit; empty if there were none."""
    nodes: Sequence[Node] = ()
    """The other nodes that had joined."""
    lost: Sequence[str] = ()
    """Nodes that are already known to be unusable for the next start."""
    bad: Sequence[str] = ()
    """Nodes that failed their health check, and without which the attempt began."""
    replaced: Sequence[str] = ()
    """Nodes that were lost, and whose places spares have taken."""
    gone: Sequence[str] = ()
    """Nodes that were lost when no spare was left."""

    def outcome(self) -> Outcome:
        """The attempt's outcome, with the exit code of the job's step."""
        stop = self.job.stop_file
        try:
            signalled = stop.stat().st_mtime
        except FileNotFoundError:
            signalled = None
        why = self._why(signalled is not None)
        bad = {*self.bad, *(e["node"] for e in self._events("slow_rank") if e.get("excluded"))}
        return Outcome(
            self.attempt,
            why.reason,
            ledger.last_committed(self.rundir),
            why.detail,
            why.exit_code,
            self.job.chain,
            signalled,
            excluded=sorted({*self.lost, *bad, *self.replaced, *why.off}),
            replaced=sorted(self.replaced),
            bad=sorted(bad),
        )

    def _why(self, signalled: bool) -> Verdict:
        code = self.status if self.status >= 0 else EXIT_FAILED
        if self.status == EXIT_OK:
            return Verdict(Reason.FINISHED, self.problem, code)
        if self.problem and code == EXIT_PREFLIGHT:
            return Verdict(Reason.REFUSED, self.problem, code)
        if self.memory:
            return Verdict(Reason.OUT_OF_MEMORY, self.memory, EXIT_REQUEUE)
        if signalled:
            return self._why_signalled()
        if self.gone:
            return Verdict(Reason.NODE_LOST, self.problem, EXIT_REQUEUE, tuple(self.gone))
        if self.kind == _PLACE_LOST:
            return self._why_step_ended()
        if self.lost:
            return Verdict(Reason.BAD_NODE, self.problem, EXIT_REQUEUE)
        if down := self._down():
            return Verdict(Reason.NODE_LOST, f"{', '.join(down)}: down", EXIT_REQUEUE)
        # SLURM may take minutes to notice.  Probe only nodes that have already communicated: behind a
        # firewall that drops packets, a missing answer means nothing.
        if self._was_ready() and (off := silent(self.nodes)):
            return Verdict(Reason.NODE_LOST, f"{', '.join(off)}: no answer", EXIT_REQUEUE, tuple(off))
        return self._failure(code)

    def _why_signalled(self) -> Verdict:
        await_notes(self.job)
        info = info_at_signal(self.job)
        # The script may have been rendered before the first commit was measured, or for another run.
        lead_s = max(submission.DEFAULT_LEAD_S, submission.signal_lead(self.config, self.rundir))
        reason = why_stopped(info, lead_s, self.job.restart, granted_until=grace_ends(self.job))
        if reason not in (Reason.REQUEUED, Reason.SIGNALLED):
            return Verdict(reason, self.problem, EXIT_REQUEUE)
        if down := self._down():
            return Verdict(Reason.NODE_LOST, f"{', '.join(down)}: down", EXIT_REQUEUE)
        if self.output.preempted():
            return Verdict(Reason.PREEMPTED, "without grace time", EXIT_REQUEUE)
        if info is not None and info.running and not self.job.signalled:
            return self._why_step_ended()
        return Verdict(reason, self.problem or describe(info), EXIT_REQUEUE)

    def _why_step_ended(self) -> Verdict:
        """The batch script got no signal, so srun (after a task failed) or a user ended the step."""
        tasks = self.output.ended_tasks()
        refused = tasks.exit_codes & {EXIT_CONFIG, EXIT_PREFLIGHT}
        if refused and not self._was_ready():
            return Verdict(Reason.REFUSED, f"{tasks}; see its error line in the job's output", max(refused))
        if tasks.out_of_memory:
            return Verdict(Reason.OUT_OF_MEMORY, str(tasks), EXIT_REQUEUE)
        if tasks.killed_from_outside:
            return Verdict(Reason.KILLED, str(tasks), EXIT_REQUEUE)
        if tasks.lines or not self.output.known:
            line = str(tasks) or "another node's task ended"
            return Verdict(
                Reason.INFRASTRUCTURE, f"{line}; see its error line in the job's output", EXIT_REQUEUE
            )
        return Verdict(Reason.KILLED, "the job's step was canceled or signaled", EXIT_REQUEUE)

    def _down(self) -> list[str]:
        """Nodes that SLURM shows as down, without those that the attempt has replaced."""
        return [name for name in scheduler.nodes_down() if name not in self.replaced]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        events = read_events(self.rundir.events)
        return [e for e in events if e["event"] == kind and e["attempt"] == self.attempt]

    def _was_ready(self) -> bool:
        return bool(self._events("ready"))

    def _failure(self, code: int) -> Verdict:
        if self.status in (-signal.SIGKILL, -signal.SIGTERM):
            name = signal.Signals(-self.status).name
            return Verdict(
                Reason.KILLED, f"the driver was ended by {name}, without a kill for memory", EXIT_REQUEUE
            )
        last = next(reversed(self._events("failed")), None)
        detail = f"{last['kind']}: {last['error']}" if last else self.problem
        if code == EXIT_REQUEUE:
            kind = last["kind"] if last else self.kind
            return Verdict(_OF_FAILURE.get(kind, Reason.INFRASTRUCTURE), detail, code)
        if code == EXIT_FAILED:
            return Verdict(Reason.CRASH, detail or f"driver exit status {self.status}", code)
        return Verdict(Reason.REFUSED, detail, code)


def describe(info: JobInfo | None) -> str:
    """SLURM's fields of a job that was signaled without a known reason."""
    if info is None:
        return "SLURM does not know the job"
    names = ("JobState", "Reason", "Restarts", "EndTime")
    return "SLURM shows " + " ".join(f"{name}={info.fields.get(name, '')}" for name in names)


def silent(nodes: Sequence[Node]) -> list[str]:
    """Names of nodes whose machine does not answer any more."""
    return [n.name for n in nodes if not _answers(n.address) and not _answers(n.address)]


def _answers(address: str) -> bool:
    """Whether a machine's kernel answers; a refused connection is an answer."""
    try:
        with socket.create_connection((address, _PROBE_PORT), _PROBE_S):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
