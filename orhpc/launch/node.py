"""What runs once on every node of a job: ``python -m orhpc.launch.node [CONFIG] [key=value ...]``.

The batch script's srun starts one of these a node.  The first claims the run and an attempt, waits
for the others, and runs Ray's head and the driver; the others join with a raylet and their own
environment servers, and leave when the first says that the attempt is over.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from orhpc.config import Config
from orhpc.config_files import load_config
from orhpc.errors import (
    EXIT_CONFIG,
    EXIT_CRASH_LOOP,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PREFLIGHT,
    EXIT_REQUEUE,
    CrashLoop,
    NodeLost,
    OrhpcError,
    PreflightError,
    RayLost,
    StopRequested,
    policy_of,
)
from orhpc.events import read_events
from orhpc.launch import holder, ledger, preflight, prepare, rendezvous, slurm
from orhpc.launch.first_node import SECRETS, TICK_S, Urls, object_store_bytes, run_first_node
from orhpc.launch.job import Job, interface_of, this_node
from orhpc.launch.ledger import Outcome, Reason
from orhpc.launch.placement import Node, Placement
from orhpc.launch.preempt import Signals, info_at_signal, why_stopped
from orhpc.launch.ray_cluster import RayNode
from orhpc.launch.rendezvous import Joined
from orhpc.launch.served import ServedEnvironments
from orhpc.launch.words import split_words

_RAY_RESTARTS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; every failure is one line on standard error."""
    try:
        job = Job.from_environment()
        path, overrides = split_words(sys.argv[1:] if arguments is None else arguments)
        config = load_config(path, [*overrides, f"placement.nodes={job.nodes}"])
        if job.rank == 0:
            return FirstNode(job, config).run()
        return other_node(job, config)
    except OrhpcError as error:
        say(f"{type(error).__name__}: {error}")
        return policy_of(error).exit_code


def say(line: str) -> None:
    """One line to the job's output."""
    print(
        f"orhpc: {os.environ.get('SLURMD_NODENAME', '')}: {' '.join(line.split())}",
        file=sys.stderr,
        flush=True,
    )


def use_address(address: str) -> None:
    """Have collective libraries use the interface of our own traffic, unless the user chose one."""
    if name := interface_of(address):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def bypass_proxies(nodes: Sequence[Node]) -> None:
    """Traffic between the job's own nodes never goes through a proxy."""
    for variable in ("no_proxy", "NO_PROXY"):
        known = [os.environ[variable]] if os.environ.get(variable) else []
        os.environ[variable] = ",".join([*known, "127.0.0.1", "localhost", *(n.address for n in nodes)])


class FirstNode:
    """The first node: claims the run, leads an attempt, and writes down how it ended."""

    def __init__(self, job: Job, config: Config) -> None:
        self.job, self.config = job, config
        self.rundir = prepare.run_directory(config)
        self.signals = Signals(job.stop_file)
        self.lost: list[str] = []
        """Nodes that the next start has to do without."""
        self.max_tokens: int | None = None
        """Halved token budget, after an attempt that ran out of memory."""

    def run(self) -> int:
        """Returns the exit code of the job's step."""
        self.rundir.create()
        try:
            done = self._prepare()
        except OrhpcError as error:
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
        )
        (self.job.folder / "attempt").write_text(str(self.rundir.attempt(attempt)))
        rendezvous.announce(self.rundir, self.job, attempt=attempt)
        return self._lead(attempt)

    def _prepare(self) -> bool:
        """Everything that can refuse the start; True when the run is finished already.

        Raises:
            OrhpcError: a wrong config, another holder, used-up budgets.
        """
        prepare.check_paths(self.config)
        holder.claim(self.rundir, self.job.id)
        outcomes = ledger.read(self.rundir)
        if outcomes and outcomes[-1].reason is Reason.OUT_OF_MEMORY:
            self.max_tokens = max(1, self.config.train.max_tokens_per_gpu // 2)
        if problem := ledger.exhausted(outcomes, self.job.chain):
            raise CrashLoop(problem)
        for change in prepare.write_config(self.rundir, self.config):
            say(f"changed since the last start: {change}")
        for old in self.rundir.attempts.iterdir():
            for secret in SECRETS:
                (old / secret).unlink(missing_ok=True)
        prepare.check_keys(self.config)
        if prepare.committed_step(self.rundir) >= self.config.train.steps:
            return True
        prepare.check_machine(self.config)
        prepare.ensure_model(self.config)
        return False

    def _lead(self, attempt: int) -> int:
        say(f"{self.rundir.path}: attempt {attempt}, {self.job.nodes} nodes")
        code, problem = EXIT_FAILED, ""
        try:
            preflight.require(self.config, self.job, self.rundir)
            node = this_node(self.job, self.config.slurm.interface)
            use_address(node.address)
            self._node, self._attempt = node, attempt
            code = run_first_node(
                self.rundir, attempt, self.config, node, self.job.stop_file, gather=self._gather,
                max_tokens=self.max_tokens, tick=self._tick,
            )  # fmt: skip
        except OrhpcError as error:
            code, problem = policy_of(error).exit_code, f"{type(error).__name__}: {error}"
            if isinstance(error, preflight.BadNode):
                self.lost.append(self.job.node_name)
            say(problem)
        outcome = self._outcome(attempt, code, problem)
        ledger.write(self.rundir, outcome)
        say(f"attempt {attempt} ended: {outcome.reason}, step {outcome.step} committed. {outcome.detail}")
        code = outcome.exit_code if outcome.exit_code is not None else EXIT_FAILED
        if code not in (EXIT_OK, EXIT_CONFIG) and (
            spent := ledger.exhausted(ledger.read(self.rundir), self.job.chain)
        ):
            say(f"CrashLoop: {spent}")
            code = EXIT_CRASH_LOOP
        if self.lost:
            (self.job.folder / "exclude").write_text(",".join(sorted(set(self.lost))))
        rendezvous.end(self.rundir, attempt, code)
        return code

    def _tick(self) -> None:
        if self.rundir.newest_attempt() > self._attempt:
            raise NodeLost("a newer attempt has begun: SLURM took this node for dead")

    def _waiting(self) -> None:
        self._tick()
        if self.signals.came or self.job.stop_file.exists():
            if why_stopped(info_at_signal(self.job), slurm.signal_lead(self.config)) is Reason.REQUEUED:
                # srun ends every task once one has failed.
                raise PreflightError("another node gave up before the attempt began; its own line says why")
            raise StopRequested("asked to stop before the attempt began")

    def _gather(self, urls: Urls) -> tuple[tuple[Node, ...], Urls]:
        timeout_s = self.config.slurm.start_timeout_s
        try:
            joined = rendezvous.gather(self.rundir, self._attempt, self.job.nodes, timeout_s, self._waiting)
        except NodeLost as error:
            if preflight.nodes_down():
                raise
            raise PreflightError(str(error)) from None  # it is up, and sees nothing of what is written here
        if bad := [j for j in joined if j.problem]:
            self.lost += [j.name for j in bad]
            raise preflight.BadNode(f"{bad[0].name}: {bad[0].problem}")
        for other in joined:
            for name, more in other.environments.items():
                urls.setdefault(name, []).extend(more)
        nodes = (self._node, *(Node(j.name, j.address, j.cpus) for j in joined))
        bypass_proxies(nodes)
        return nodes, urls

    def _outcome(self, attempt: int, status: int, problem: str) -> Outcome:
        """Why the attempt ended, from the exit status and what else is known."""
        code = status if status >= 0 else EXIT_FAILED
        step = ledger.last_committed(self.rundir)

        def because(reason: Reason, detail: str = "", exit_code: int = code) -> Outcome:
            return Outcome(attempt, reason, step, detail or problem, exit_code, self.job.chain)

        if status == EXIT_OK:
            return because(Reason.FINISHED)
        if problem and code == EXIT_PREFLIGHT:
            return because(Reason.REFUSED)
        if self.job.stop_file.exists():
            lead_s = slurm.signal_lead(self.config, self.rundir)
            return because(why_stopped(info_at_signal(self.job), lead_s), exit_code=EXIT_REQUEUE)
        if self.lost:
            return because(Reason.BAD_NODE, exit_code=EXIT_REQUEUE)
        if down := preflight.nodes_down():
            self.lost += down
            return because(Reason.NODE_LOST, f"{', '.join(down)}: down", EXIT_REQUEUE)
        if status == -9:
            return because(
                Reason.OUT_OF_MEMORY, "the driver was killed, most likely for its memory", EXIT_REQUEUE
            )
        failures = [
            e for e in read_events(self.rundir.events) if e["event"] == "failed" and e["attempt"] == attempt
        ]
        kind, detail = (failures[-1]["kind"], failures[-1]["error"]) if failures else ("", problem)
        if code == EXIT_REQUEUE:
            memory = kind == "OutOfMemory"
            return because(Reason.OUT_OF_MEMORY if memory else Reason.INFRASTRUCTURE, f"{kind}: {detail}")
        if code == EXIT_FAILED:
            return because(Reason.CRASH, f"{kind}: {detail}" if kind else f"driver exit status {status}")
        return because(Reason.REFUSED, f"{kind}: {detail}" if kind else detail)


def other_node(job: Job, config: Config) -> int:
    """Join the first node's attempt, and leave when it is over."""
    Signals(None)  # the first node commits; until it has, nothing here may end
    rundir = prepare.run_directory(config)
    timeout_s = config.slurm.start_timeout_s
    announced = rendezvous.await_announcement(rundir, job, timeout_s)
    if "exit" in announced:
        return EXIT_OK  # the first node's own exit code is the job's
    attempt = int(announced["attempt"])
    folder = rundir.attempt(attempt)
    try:
        preflight.require(config, job, rundir)
        node = this_node(job, config.slurm.interface)
    except OrhpcError as error:
        say(str(error))
        rendezvous.join(rundir, attempt, Joined(job.rank, job.node_name, problem=str(error)))
        _wait_for(lambda: rendezvous.ended(rundir, attempt), timeout_s)
        return EXIT_OK
    use_address(node.address)
    environments = ServedEnvironments(config, node.address, folder, node.name)
    ray_node: RayNode | None = None
    try:
        urls = environments.start()
        rendezvous.join(rundir, attempt, Joined(job.rank, node.name, node.address, node.cpus, urls))
        placed = folder / "placement.yaml"
        if not _wait_for(lambda: placed.exists() or rendezvous.ended(rundir, attempt), 2 * timeout_s):
            raise NodeLost(f"{node.name}: the first node did not bring Ray up")
        if rendezvous.ended(rundir, attempt):
            return EXIT_OK
        placement = Placement.from_yaml(placed.read_text())
        bypass_proxies(placement.nodes)
        ray_node = RayNode(
            node.name, node.address, folder / "ray.token", folder / f"ray_{job.rank:03d}.log",
            cpus=placement.processes_on(job.rank), object_store_bytes=object_store_bytes(),
        )  # fmt: skip
        _stay(ray_node, placement.ray_address, environments, lambda: rendezvous.ended(rundir, attempt))
        return EXIT_OK
    finally:
        if ray_node is not None:
            ray_node.stop()
        environments.stop()


def _stay(ray_node: RayNode, head: str, environments: ServedEnvironments, over: object) -> None:
    """Keep this node's part up until the attempt is over.

    Raises:
        RayLost: the raylet keeps ending.
    """
    assert callable(over)
    ray_node.start_worker(head)
    restarts = 0
    while not over():
        environments.keep_up()
        if not ray_node.alive():
            restarts += 1
            if restarts > _RAY_RESTARTS:
                raise RayLost(f"the raylet ended {restarts} times; see its log")
            time.sleep(1.0)
            ray_node.start_worker(head)
        time.sleep(TICK_S)


def _wait_for(condition: object, timeout_s: float) -> bool:
    assert callable(condition)
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(TICK_S)
    return True


if __name__ == "__main__":
    sys.exit(main())
