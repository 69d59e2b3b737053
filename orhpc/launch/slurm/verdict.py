"""Why an attempt ended: the one place that puts exit status, signals, SLURM and the kernel together."""

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
"""Nothing listens there: a node that is up refuses the connection, one that is off says nothing."""

_OF_FAILURE = {"OutOfMemory": Reason.OUT_OF_MEMORY, "StorageRefused": Reason.STORAGE}
"""Failures that let a job come back, by class; all others are infrastructure."""


@dataclass(slots=True)
class Ended:
    """What is known of an attempt that is over."""

    job: Job
    config: Config
    rundir: RunDir
    attempt: int
    status: int
    """The driver's exit status, or the exit code of the failure that kept it from starting."""
    problem: str = ""
    """That failure."""
    kind: str = ""
    """Its class."""
    output: BatchOutput = field(default_factory=lambda: BatchOutput(None))
    """What SLURM has written into the batch script's output."""
    memory: str = ""
    """What the kernel's memory limit did, where it did anything."""
    nodes: Sequence[Node] = ()
    """The other nodes that had joined."""
    lost: list[str] = field(default_factory=list)
    """Nodes the next start has to do without; more may be found here."""

    def outcome(self) -> Outcome:
        """The attempt's outcome, with the exit code of the job's step."""
        stop = self.job.stop_file
        try:
            signalled = stop.stat().st_mtime
        except FileNotFoundError:
            signalled = None
        reason, detail, code = self._why(signalled is not None)
        step = ledger.last_committed(self.rundir)
        excluded = sorted(set(self.lost))
        return Outcome(self.attempt, reason, step, detail, code, self.job.chain, signalled, excluded=excluded)

    def _why(self, signalled: bool) -> tuple[Reason, str, int]:
        code = self.status if self.status >= 0 else EXIT_FAILED
        if self.status == EXIT_OK:
            return Reason.FINISHED, self.problem, code
        if self.problem and code == EXIT_PREFLIGHT:
            return Reason.REFUSED, self.problem, code
        if self.memory:
            return Reason.OUT_OF_MEMORY, self.memory, EXIT_REQUEUE
        if signalled:
            return self._why_signalled()
        if self.lost:
            return Reason.BAD_NODE, self.problem, EXIT_REQUEUE
        if down := scheduler.nodes_down():
            return Reason.NODE_LOST, f"{', '.join(down)}: down", EXIT_REQUEUE
        # SLURM may take minutes to notice.  Only nodes that have worked together are asked: where a
        # firewall swallows everything, silence says nothing.
        if self._was_ready() and (off := silent(self.nodes)):
            self.lost += off
            return Reason.NODE_LOST, f"{', '.join(off)}: no answer", EXIT_REQUEUE
        return self._failure(code)

    def _why_signalled(self) -> tuple[Reason, str, int]:
        await_notes(self.job)
        info = info_at_signal(self.job)
        # The script may have been rendered before the first commit was measured, or not for this run.
        lead_s = max(submission.DEFAULT_LEAD_S, submission.signal_lead(self.config, self.rundir))
        reason = why_stopped(info, lead_s, self.job.restart, granted_until=grace_ends(self.job))
        if reason not in (Reason.REQUEUED, Reason.SIGNALLED):
            return reason, self.problem, EXIT_REQUEUE
        if down := scheduler.nodes_down():
            return Reason.NODE_LOST, f"{', '.join(down)}: down", EXIT_REQUEUE
        if self.output.preempted():
            return Reason.PREEMPTED, "without grace time", EXIT_REQUEUE
        if info is not None and info.running and not self.job.signalled:
            return self._why_step_ended()
        return reason, self.problem or said(info), EXIT_REQUEUE

    def _why_step_ended(self) -> tuple[Reason, str, int]:
        """SLURM has not told the batch script: srun, which does so once a task has failed, or a user."""
        tasks = self.output.ended_tasks()
        refused = tasks.exit_codes & {EXIT_CONFIG, EXIT_PREFLIGHT}
        if refused and not self._was_ready():
            return Reason.REFUSED, f"{tasks}; its own line says why", max(refused)
        if tasks.out_of_memory:
            return Reason.OUT_OF_MEMORY, str(tasks), EXIT_REQUEUE
        if tasks.killed_from_outside:
            return Reason.KILLED, str(tasks), EXIT_REQUEUE
        if tasks.lines or not self.output.known:
            line = str(tasks) or "another node's task ended"
            return Reason.INFRASTRUCTURE, f"{line}; its own line says why", EXIT_REQUEUE
        return Reason.KILLED, "the job's step was cancelled, or sent a signal", EXIT_REQUEUE

    def _events(self, kind: str) -> list[dict[str, Any]]:
        events = read_events(self.rundir.events)
        return [e for e in events if e["event"] == kind and e["attempt"] == self.attempt]

    def _was_ready(self) -> bool:
        return bool(self._events("ready"))

    def _failure(self, code: int) -> tuple[Reason, str, int]:
        if self.status in (-signal.SIGKILL, -signal.SIGTERM):
            name = signal.Signals(-self.status).name
            return Reason.KILLED, f"the driver was ended by {name}, not for its memory", EXIT_REQUEUE
        last = next(reversed(self._events("failed")), None)
        detail = f"{last['kind']}: {last['error']}" if last else self.problem
        if code == EXIT_REQUEUE:
            kind = last["kind"] if last else self.kind
            return _OF_FAILURE.get(kind, Reason.INFRASTRUCTURE), detail, code
        if code == EXIT_FAILED:
            return Reason.CRASH, detail or f"driver exit status {self.status}", code
        return Reason.REFUSED, detail, code


def said(info: JobInfo | None) -> str:
    """What SLURM said of a job that it gave no reason to stop."""
    if info is None:
        return "SLURM said nothing of it"
    asked = ("JobState", "Reason", "Restarts", "EndTime")
    return "SLURM said " + " ".join(f"{name}={info.fields.get(name, '')}" for name in asked)


def silent(nodes: Sequence[Node]) -> list[str]:
    """Names of nodes whose machine answers no more."""
    return [n.name for n in nodes if not _answers(n.address) and not _answers(n.address)]


def _answers(address: str) -> bool:
    """Whether a machine's kernel still answers, be it with a refusal."""
    try:
        with socket.create_connection((address, _PROBE_PORT), _PROBE_S):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
