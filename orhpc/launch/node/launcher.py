"""The launcher of one node of a job: ``python -m orhpc.launch.node [CONFIG] [key=value ...]``.

The batch script's srun starts one launcher per node.  The first node claims the run and an attempt, waits for
the others, and runs Ray's head and the driver; the others join with a raylet and their own environment
servers, and exit when the first node has ended the attempt.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

from orhpc.config import Config, RunSettings
from orhpc.config.files import load_config
from orhpc.errors import (
    EXIT_OK,
    ConfigError,
    CrashLoop,
    EndedFromOutside,
    OrhpcError,
    StorageRefused,
    policy_of,
)
from orhpc.launch import model, prepare, task_files
from orhpc.launch.checks import checklist, preflight
from orhpc.launch.command_line import (
    faults_of_environment,
    nodes_of_job,
    show_faults,
    split_command_line,
)
from orhpc.launch.node import rendezvous
from orhpc.launch.node.first_node import SECRETS
from orhpc.launch.node.job_attempt import JobAttempt, Superseded
from orhpc.launch.node.network_variables import bypass_proxies, say, use_address, use_switches
from orhpc.launch.node.notifications import Notifier
from orhpc.launch.node.other_node import other_node
from orhpc.launch.node.outcome_recorder import OutcomeRecorder
from orhpc.launch.node.scratch import sweep_job_folders
from orhpc.launch.slurm import back_off, holder, ledger, submission
from orhpc.launch.slurm.job import Job, this_node
from orhpc.launch.slurm.ledger import Reason
from orhpc.launch.slurm.preempt import Signals
from orhpc.models import chat_formats
from orhpc.process.access import use_access
from orhpc.rundir import write_atomic
from orhpc.rundir.event_lines import BUDGETS
from orhpc.rundir.events import read_events
from orhpc.rundir.storage import StorageRetry, probe, refusals, retry_write


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; every failure is one line on standard error."""
    job, first = None, None
    try:
        job = Job.from_environment()
        _held = _held_until_exit(job.folder) if job.rank == 0 and job.folder.is_dir() else None
        path, overrides = split_command_line(sys.argv[1:] if arguments is None else arguments)
        config = retry_write(partial(_config, path, overrides, job.nodes), RunSettings().storage_wait_s, say)
        _check_spares(config)
        use_access(config.run.access)
        if job.rank == 0:
            show_faults(config, say)
        with refusals("the run directory refuses", below=prepare.run_directory(config).path):
            if job.rank:
                return other_node(job, config)
            first = FirstNode(job, config)
            code = first.run()
    except OrhpcError as error:
        if not isinstance(error, EndedFromOutside):
            say(f"{type(error).__name__}: {error}")
        code = policy_of(error).exit_code
        if job is not None and job.rank == 0 and not (job.folder / "attempt").exists():
            _stay_away(job, error)
    if job is not None and job.rank == 0 and job.folder.is_dir():
        (job.folder / "code").write_text(str(code))
    # A failing task makes srun end its step, and the newer start's step has the same number.
    return EXIT_OK if first is not None and first.superseded else code


def _held_until_exit(folder: Path) -> IO[str]:
    """Create and lock the file whose lock tells the batch script that this process runs; returns it open."""
    held = (folder / "held.new").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    (folder / "held.new").rename(folder / "held")  # locked from the first moment that the script sees it
    return held


def _config(path: str, overrides: Sequence[str], nodes: int) -> Config:
    """Read the config of a job of ``nodes`` nodes, spares among them."""
    words = [*overrides, nodes_of_job(path, overrides, nodes), *faults_of_environment()]
    return load_config(path, words)


def _check_spares(config: Config) -> None:
    """Check that the batch script knows the number of spares: it starts srun accordingly.

    Raises:
        ConfigError: it does not; or there are spares for a single node.
    """
    submission.nodes_to_request(config)
    spares = config.slurm.spares
    if os.environ.get("ORHPC_SPARES", "0") != str(spares):
        raise ConfigError(
            f"slurm.spares: submit with `python -m orhpc.launch`, or with `sbatch --no-kill` and "
            f"slurm.spares={spares} after the script's name: the script does not read it from a config file"
        )


def _stay_away(job: Job, error: OrhpcError) -> None:
    """Delay the requeue of a job that could not begin an attempt and would soon fail again."""
    if isinstance(error, StorageRefused):
        error = back_off.before_any_attempt(job)
    if isinstance(error, EndedFromOutside) and job.folder.is_dir():
        say(back_off.request(job, error))


class FirstNode:
    """The first node: claims the run, runs an attempt, and records its outcome."""

    def __init__(self, job: Job, config: Config) -> None:
        self.job, self.config = job, config
        self.rundir = prepare.run_directory(config)
        self.signals = Signals(job.stop_file)
        self.recorder = OutcomeRecorder(job, config, self.rundir)
        self.max_tokens: int | None = None
        """Halved token budget, after an attempt that ran out of memory."""
        self.superseded = False
        """Whether a newer attempt has begun while this one still ran."""

    def run(self) -> int:
        """Return the exit code of the job's step."""
        try:
            self._await_storage()
            done = self._prepare()
        except StorageRefused:
            raise  # the other nodes cannot be notified
        except OrhpcError as error:
            if self.rundir.path.is_dir():  # else no node waits for an announcement in it
                rendezvous.announce(self.rundir, self.job, exit=policy_of(error).exit_code)
            raise
        if done:
            say(f"{self.rundir.path}: finished, {self.config.train.steps} steps; raise train.steps to go on")
            rendezvous.announce(self.rundir, self.job, exit=EXIT_OK)
            return EXIT_OK
        attempt = prepare.begin_attempt(
            self.rundir,
            self.config,
            kind="slurm",
            job=self.job.id,
            chain=self.job.chain,
            restart=self.job.restart,
            node=self.job.node_name,
            script_started=self.job.started,
            output=str(self.job.output) if self.job.output is not None else None,
        )
        (self.job.folder / "attempt").write_text(str(self.rundir.attempt(attempt)))
        if (successor := self.job.folder / holder.SUCCESSOR).exists():
            write_atomic(self.rundir.attempt(attempt) / holder.SUCCESSOR, successor.read_text())
        rendezvous.announce(self.rundir, self.job, attempt=attempt)
        return self._lead(attempt)

    def _await_storage(self) -> None:
        """Wait while the run directory refuses writes, so that a full disk does not use up the job's budgets.

        Raises:
            StorageRefused: it refused writes for ``run.storage_wait_s``.
            StopRequested: the job was signaled to stop meanwhile.
        """
        wait_s = self.config.run.storage_wait_s
        known = self.job.restart > 0 or self.job.chain != self.job.id

        async def ready() -> None:
            prepare.create_directory(self.config, known=known)
            probe(self.rundir.path)

        asyncio.run(StorageRetry(wait_s, say, self._stopped).run(ready))

    def _stopped(self) -> bool:
        """Whether this process or the batch shell was signaled to stop."""
        return bool(self.signals.received) or self.job.stop_file.exists()

    def _prepare(self) -> bool:
        """Run everything that can refuse the start; return True if the run is already finished.

        Raises:
            OrhpcError: a wrong config, another holder, or used-up budgets.
        """
        checklist.require(checklist.of_config(self.config))
        holder.claim(self.rundir, self.job.id, self._stopped)
        newest = self.rundir.newest_attempt()
        was_silent = newest > 0 and ledger.outcome_of(self.rundir, newest) is None
        outcomes = ledger.read(self.rundir)
        if outcomes and outcomes[-1].reason is Reason.OUT_OF_MEMORY:
            self.max_tokens = self._lower_budget(outcomes[-1].attempt)
        if problem := ledger.exhausted(outcomes, self.job.chain):
            raise CrashLoop(problem)
        # An attempt that died could not request a delay.  The next start finds its outcome and continues.
        if was_silent and outcomes[-1:] and outcomes[-1].attempt == newest:
            back_off.require(outcomes, self.job.chain)
        for change in prepare.write_config(self.rundir, self.config):
            say(f"changed since the last start: {change}")
        self._sweep()
        prepare.check_keys(self.config)
        if prepare.is_finished(self.rundir, self.config):
            return True
        prepare.check_machine(self.config)
        with rendezvous.preparing(self.rundir, self.job):
            model.ensure_models(self.config, self.rundir, self._stopped)
            task_files.ensure(self.config, self.rundir, self._stopped)
        chat_formats.check(self.config, model.model_folder(self.config, self.rundir))
        return False

    def _lower_budget(self, attempt: int) -> int | None:
        """Half the token budget of an attempt that ran out of memory; None if the setting has changed."""
        setting = self.config.train.max_tokens_per_gpu
        known = [e for e in read_events(self.rundir.events) if e["event"] in BUDGETS]
        had = next((e for e in reversed(known) if e["attempt"] == attempt), {})
        if had.get("max_tokens_per_gpu", setting) != setting:
            return None
        lowered = max(1, int(had.get("max_tokens", setting)) // 2)
        say(f"attempt {attempt} ran out of memory: {lowered} tokens per micro-batch from now on")
        return lowered

    def _sweep(self) -> None:
        """Remove the leftovers of killed attempts: their keys, and the batch shells' folders on this node."""
        for old in self.rundir.attempts.iterdir():
            for secret in SECRETS:
                (old / secret).unlink(missing_ok=True)
        sweep_job_folders({self.job.id, *ledger.jobs(self.rundir)}, self.job.folder)

    def _lead(self, attempt: int) -> int:
        """Run an attempt, record its outcome, and return the exit code of the job's step."""
        say(f"{self.rundir.path}: attempt {attempt}, {self._size()}")
        recorder = self.recorder
        with Notifier(self.config, self.rundir, attempt, self.job.stop_file.exists, say) as notifier:
            try:
                self._run_attempt(attempt)
            except OrhpcError as error:
                self.superseded = isinstance(error, Superseded)
                if (
                    isinstance(error, preflight.BadNode) and not recorder.lost
                ):  # not another node, but this one
                    recorder.lost.append(self.job.node_name)
                say(f"{type(error).__name__}: {error}")
                recorder.record(attempt, policy_of(error).exit_code, error)
                notifier.ended(error)
        return recorder.exit_code

    def _size(self) -> str:
        spares = self.config.slurm.spares
        more = f" and {spares} spare{'s' * (spares > 1)}" if spares else ""
        return f"{self.config.placement.nodes} nodes{more}"

    def _run_attempt(self, attempt: int) -> None:
        """Check this node and run the attempt on it; raises OrhpcError if it could not run."""
        preflight.require(self.config, self.job, self.rundir)
        use_switches(self.config)
        node = this_node(self.job, self.config.slurm.interface)
        use_address(node.address)
        bypass_proxies((node,))
        with refusals("the run directory refuses", below=self.rundir.path):
            JobAttempt(
                self.rundir,
                attempt,
                self.config,
                node,
                self.job,
                self.signals,
                self.recorder,
                self.max_tokens,
            ).run()
