"""The launcher of one node of a job: ``python -m orhpc.launch.node [CONFIG] [key=value ...]``.

The batch script's srun starts one launcher per node.  The first node claims the run and an attempt, waits for
the others, and runs Ray's head and the driver; the others join with a raylet and their own environment
servers, and exit when the first node has ended the attempt.
"""

from __future__ import annotations

import asyncio
import fcntl
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from orhpc.config import Config, RunSettings
from orhpc.config.files import load_config
from orhpc.errors import (
    EXIT_CONFIG,
    EXIT_CRASH_LOOP,
    EXIT_FAILED,
    EXIT_OK,
    CrashLoop,
    EndedFromOutside,
    NodeLost,
    OrhpcError,
    PreflightError,
    StopRequested,
    StorageRefused,
    policy_of,
)
from orhpc.launch import model, prepare
from orhpc.launch.checks import checklist, preflight
from orhpc.launch.checks.memory_limit import MemoryWatch
from orhpc.launch.command_line import split_command_line
from orhpc.launch.node import rendezvous
from orhpc.launch.node.first_node import RAYLETS_S, SECRETS, TICK_S, Urls, run_first_node
from orhpc.launch.node.network_variables import bypass_proxies, say, use_address, use_switches
from orhpc.launch.node.other_node import other_node
from orhpc.launch.node.ray_cluster import RayNode
from orhpc.launch.node.scratch import sweep_job_folders
from orhpc.launch.slurm import back_off, holder, ledger, scheduler
from orhpc.launch.slurm.batch_output import BatchOutput
from orhpc.launch.slurm.job import Job, this_node
from orhpc.launch.slurm.ledger import Outcome, Reason
from orhpc.launch.slurm.preempt import LimitWatch, Signals
from orhpc.launch.slurm.verdict import AttemptEvidence
from orhpc.models import chat_formats
from orhpc.plan.placement import Node
from orhpc.rundir import write_atomic
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import Tail, read_events
from orhpc.rundir.storage import StorageRetry, probe, refusals, retry_write

_COMPLAINTS_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; every failure is one line on standard error."""
    job, first = None, None
    try:
        job = Job.from_environment()
        hold = (job.folder / "held").open("w") if job.rank == 0 and job.folder.is_dir() else None
        if hold is not None:
            fcntl.flock(hold, fcntl.LOCK_EX)  # until this process ends: the batch script checks the lock
        path, overrides = split_command_line(sys.argv[1:] if arguments is None else arguments)
        words = [*overrides, f"placement.nodes={job.nodes}"]
        config = retry_write(lambda: load_config(path, words), RunSettings().storage_wait_s, say)
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


def _stay_away(job: Job, error: OrhpcError) -> None:
    """Delay the requeue of a job that could not begin an attempt and would soon fail again."""
    if isinstance(error, StorageRefused):
        error = back_off.before_any_attempt(job)
    if isinstance(error, EndedFromOutside) and job.folder.is_dir():
        say(back_off.request(job, error))


class Superseded(NodeLost):
    """SLURM considered this node dead and has started the job elsewhere."""


class FirstNode:
    """The first node: claims the run, runs an attempt, and records its outcome."""

    def __init__(self, job: Job, config: Config) -> None:
        self.job, self.config = job, config
        self.rundir = prepare.run_directory(config)
        self.signals = Signals(job.stop_file)
        self.lost: list[str] = []
        """Nodes that the next start must not use."""
        self.max_tokens: int | None = None
        """Halved token budget, after an attempt that ran out of memory."""
        self.memory = ""
        """One line about kills by the kernel's memory limit on one of the nodes."""
        self.others: tuple[Node, ...] = ()
        self.superseded = False
        """Whether a newer attempt has begun while this one still ran."""
        self._code = EXIT_FAILED
        self._watch = MemoryWatch()
        self._output = BatchOutput(job.output)
        self._limit = LimitWatch(job, config, self.rundir)
        self._tail = Tail(self.rundir.events, 0)
        self._looked = 0.0

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
            self.rundir.create(known=known)
            probe(self.rundir.path)

        asyncio.run(StorageRetry(wait_s, say, lambda: bool(self.signals.received)).run(ready))

    def _prepare(self) -> bool:
        """Run everything that can refuse the start; return True if the run is already finished.

        Raises:
            OrhpcError: a wrong config, another holder, or used-up budgets.
        """
        checklist.require(checklist.of_config(self.config))
        holder.claim(self.rundir, self.job.id)
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
            model.ensure_models(self.config, self.rundir, lambda: bool(self.signals.received))
        chat_formats.check(self.config, model.model_folder(self.config, self.rundir))
        return False

    def _lower_budget(self, attempt: int) -> int | None:
        """Half the token budget of an attempt that ran out of memory; None if the setting has changed."""
        setting = self.config.train.max_tokens_per_gpu
        begun = [e for e in read_events(self.rundir.events) if e["event"] == "bring_up"]
        had = next((e for e in reversed(begun) if e["attempt"] == attempt), {})
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
        say(f"{self.rundir.path}: attempt {attempt}, {self.job.nodes} nodes")
        self._attempt = attempt
        self._tail = Tail(self.rundir.events, attempt)
        try:
            preflight.require(self.config, self.job, self.rundir)
            use_switches(self.config)
            self._node = this_node(self.job, self.config.slurm.interface)
            use_address(self._node.address)
            bypass_proxies((self._node,))
            with refusals("the run directory refuses", below=self.rundir.path):
                run_first_node(
                    self.rundir, attempt, self.config, self._node, self.job.stop_file, gather=self._gather,
                    settle=self._settle if self.job.nodes > 1 else None,
                    max_tokens=self.max_tokens, tick=self._tick, driver_ended=self._conclude,
                )  # fmt: skip
        except OrhpcError as error:
            if isinstance(error, preflight.BadNode):
                self.lost.append(self.job.node_name)
            say(f"{type(error).__name__}: {error}")
            self._conclude(policy_of(error).exit_code, error)
        return self._code

    def _conclude(self, status: int, error: OrhpcError | None = None) -> None:
        """Record the outcome and end the attempt for the other nodes, before the teardown.

        If the run directory stays unavailable, the next start infers the outcome.
        """
        wait_s = 0.0 if isinstance(error, StorageRefused) else self.config.run.storage_wait_s
        try:
            retry_write(lambda: self._record_outcome(status, error), wait_s, say)
        except StorageRefused as refused:
            say(f"attempt {self._attempt} ended, but its outcome cannot be written: {refused}")
            self._code = policy_of(refused).exit_code

    def _record_outcome(self, status: int, error: OrhpcError | None) -> None:
        attempt = self._attempt
        ended = AttemptEvidence(self.job, self.config, self.rundir, attempt, status, output=self._output)
        if error is not None:
            ended.kind, ended.problem = type(error).__name__, f"{type(error).__name__}: {error}"
        ended.memory, ended.nodes, ended.lost = self._memory_at_end(status), self.others, self.lost
        before = ledger.read(self.rundir, attempt - 1)
        outcome = self._given_up(ended.outcome(), before)
        ledger.write(self.rundir, outcome)
        say(f"attempt {attempt} ended: {outcome.reason}, step {outcome.step} committed. {outcome.detail}")
        if outcome.given_up is not None:
            say(f"CrashLoop: {outcome.given_up}")
        elif (why := back_off.due([*before, outcome], self.job.chain)) and self.job.folder.is_dir():
            say(back_off.request(self.job, why))
        if self.job.folder.is_dir():
            (self.job.folder / "exclude").write_text(",".join(outcome.excluded))
            (self.job.folder / "readmit").write_text(
                "\n".join(ledger.to_readmit([*before, outcome], self.job.chain))
            )
        self._code = outcome.exit_code if outcome.exit_code is not None else EXIT_FAILED
        rendezvous.end(self.rundir, attempt, self._code)

    def _memory_at_end(self, status: int) -> str:
        """One line about kills for memory, checked again because the driver may have ended by one."""
        found = self.memory or self._watch.verdict(self.job.node_name)
        if not found and status == -signal.SIGKILL:
            found = self._watch.verdict_on_machine(self.job.node_name)
        return found or ""

    def _given_up(self, outcome: Outcome, before: Sequence[Outcome]) -> Outcome:
        """The outcome, with the exit code of a crash loop if it has used up the job's budget."""
        if outcome.exit_code in (EXIT_OK, EXIT_CONFIG):
            return outcome
        spent = ledger.exhausted([*before, outcome], self.job.chain)
        return outcome if spent is None else replace(outcome, exit_code=EXIT_CRASH_LOOP, given_up=spent)

    def _tick(self) -> None:
        for event in self._tail.new():
            if (line := line_of(event)) is not None:
                say(line)
        if self.rundir.newest_attempt() > self._attempt:
            self.superseded = True
            raise Superseded("a newer attempt has begun: SLURM considered this node dead")
        if self.memory or time.monotonic() < self._looked + _COMPLAINTS_S:
            return
        self._looked = time.monotonic()
        if self._limit.due() and not self.job.stop_file.exists():
            say("the time limit is near, and commits take long: stopping")
            self.job.stop_file.touch()
        verdicts = [self._watch.verdict(self._node.name), *rendezvous.complaints(self.rundir, self._attempt)]
        self.memory = next((line for line in verdicts if line), "")
        if self.memory:
            say(self.memory)
            self.job.stop_file.touch()  # the remaining processes commit

    def _waiting(self) -> None:
        self._tick()
        if self.signals.received or self.job.stop_file.exists():
            raise StopRequested("asked to stop before the attempt began")

    def _settle(self, ray_node: RayNode) -> None:
        """Wait for the raylets of all nodes, with a time limit: the driver names the missing nodes."""
        end = time.monotonic() + RAYLETS_S
        joined = False
        while rendezvous.raylets_up(self.rundir, self._attempt) < self.job.nodes and time.monotonic() < end:
            self._tick()
            if self.signals.received or self.job.stop_file.exists():
                raise StopRequested("asked to stop before the driver began")
            if not ray_node.alive():
                return
            if not joined and ray_node.joined():
                rendezvous.raylet_up(self.rundir, self._attempt, 0)
                joined = True
            time.sleep(TICK_S)

    def _gather(self, urls: Urls) -> tuple[tuple[Node, ...], Urls]:
        timeout_s = self.config.slurm.start_timeout_s
        try:
            joined = rendezvous.gather(self.rundir, self._attempt, self.job.nodes, timeout_s, self._waiting)
        except NodeLost as error:
            if scheduler.nodes_down():
                raise
            raise PreflightError(str(error)) from None  # the node is up, but run.root is not shared
        if refused := [j for j in joined if j.refused]:
            raise PreflightError(f"{refused[0].name}: {refused[0].problem}")
        if bad := [j for j in joined if j.problem]:
            self.lost += [j.name for j in bad]
            raise preflight.BadNode(f"{bad[0].name}: {bad[0].problem}")
        for other in joined:
            for name, more in other.environments.items():
                urls.setdefault(name, []).extend(more)
        self.others = tuple(Node(j.name, j.address, j.cpus) for j in joined)
        nodes = (self._node, *self.others)
        bypass_proxies(nodes)
        return nodes, urls
