"""Record why an attempt ended, and end it for the other nodes and the batch script."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from orhpc.config import Config
from orhpc.errors import (
    EXIT_CONFIG,
    EXIT_CRASH_LOOP,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PREFLIGHT,
    OrhpcError,
    StorageRefused,
    policy_of,
)
from orhpc.launch.node import rendezvous
from orhpc.launch.node.network_variables import say
from orhpc.launch.slurm import back_off, ledger
from orhpc.launch.slurm.batch_output import BatchOutput
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Outcome
from orhpc.launch.slurm.verdict import AttemptEvidence
from orhpc.plan.placement import Node
from orhpc.process.memory_limit import MemoryWatch
from orhpc.rundir import RunDir
from orhpc.rundir.storage import retry_write


class OutcomeRecorder:
    """Collects evidence while an attempt runs, and writes its outcome when it ends.

    Create it when the launcher starts: from then on, lines that srun writes into the job's output and kills
    for memory are evidence.
    """

    def __init__(self, job: Job, config: Config, rundir: RunDir) -> None:
        self.exit_code = EXIT_FAILED
        """Exit code of the job's step, once the outcome is recorded."""
        self.lost: list[str] = []
        """Nodes that the next start must not use."""
        self.bad: list[str] = []
        """Nodes that failed their health check, and without which the attempt began."""
        self.replaced: list[str] = []
        """Nodes that were lost, and whose places spares have taken."""
        self.gone: list[str] = []
        """Nodes that were lost when no spare was left."""
        self.others: tuple[Node, ...] = ()
        """The other nodes that take part."""
        self.memory = ""
        """One line about kills by the kernel's memory limit on one of the nodes."""
        self.watch = MemoryWatch()
        self._job, self._config, self._rundir = job, config, rundir
        self._output = BatchOutput(job.output)

    def refused_tasks(self) -> bool:
        """Whether srun has reported tasks that refused to run: a wrong config, or something is missing."""
        return bool(self._output.ended_tasks().exit_codes & {EXIT_CONFIG, EXIT_PREFLIGHT})

    def killed_for_memory(self, status: int) -> bool:
        """Whether the driver ended because processes were killed for memory; ``status``: its exit status."""
        self.memory = self._memory_at_end(status)
        return bool(self.memory)

    def record(self, attempt: int, status: int, error: OrhpcError | None = None) -> None:
        """Record the outcome and end the attempt for the other nodes; call it before the teardown.

        If the run directory stays unavailable, the next start infers the outcome.

        Args:
            status: the driver's exit status, or the exit code of the failure that prevented its start.
            error: that failure.
        """
        wait_s = 0.0 if isinstance(error, StorageRefused) else self._config.run.storage_wait_s
        try:
            retry_write(lambda: self._write(attempt, status, error), wait_s, say)
        except StorageRefused as refused:
            say(f"attempt {attempt} ended, but its outcome cannot be written: {refused}")
            self.exit_code = policy_of(refused).exit_code

    def _write(self, attempt: int, status: int, error: OrhpcError | None) -> None:
        job = self._job
        before = ledger.read(self._rundir, attempt - 1)
        outcome = self._given_up(self._evidence(attempt, status, error).outcome(), before)
        ledger.write(self._rundir, outcome)
        say(f"attempt {attempt} ended: {outcome.reason}, step {outcome.step} committed. {outcome.detail}")
        if outcome.given_up is not None:
            say(f"CrashLoop: {outcome.given_up}")
        elif (why := back_off.due([*before, outcome], job.chain)) and job.folder.is_dir():
            say(back_off.request(job, why))
        if job.folder.is_dir():
            (job.folder / "exclude").write_text(",".join(outcome.excluded))
            readmitted = ledger.to_readmit([*before, outcome], job.chain)
            (job.folder / "readmit").write_text("\n".join(readmitted))
        self.exit_code = outcome.exit_code if outcome.exit_code is not None else EXIT_FAILED
        rendezvous.end(self._rundir, attempt, self.exit_code)

    def _evidence(self, attempt: int, status: int, error: OrhpcError | None) -> AttemptEvidence:
        kind = type(error).__name__ if error is not None else ""
        return AttemptEvidence(
            self._job,
            self._config,
            self._rundir,
            attempt,
            status,
            problem=f"{kind}: {error}" if error is not None else "",
            kind=kind,
            output=self._output,
            memory=self._memory_at_end(status),
            nodes=self.others,
            lost=tuple(self.lost),
            bad=tuple(self.bad),
            replaced=tuple(self.replaced),
            gone=tuple(self.gone),
        )

    def _memory_at_end(self, status: int) -> str:
        """One line about kills for memory, checked again because the driver may have ended by one."""
        name = self._job.node_name
        found = self.memory or self.watch.verdict(name)
        if not found and status == -signal.SIGKILL:
            found = self.watch.verdict_on_machine(name)
        return found or ""

    def _given_up(self, outcome: Outcome, before: Sequence[Outcome]) -> Outcome:
        """The outcome, with the exit code of a crash loop if it has used up the job's budget."""
        if outcome.exit_code in (EXIT_OK, EXIT_CONFIG):
            return outcome
        spent = ledger.exhausted([*before, outcome], self._job.chain)
        return outcome if spent is None else replace(outcome, exit_code=EXIT_CRASH_LOOP, given_up=spent)
