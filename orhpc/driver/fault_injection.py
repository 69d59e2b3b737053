"""Causes the failures that ``faults.inject`` asks for, to rehearse the recovery of a run.

Each is caused once in the life of a run, also over restarts: before that, its name becomes a file in
``RUN/faults``.  The event ``fault_injected`` says when.  Only processes of the run itself are touched: actors
through their handles, others as descendants of the node's launcher (:mod:`orhpc.process.run_processes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.config.faults import KINDS, Fault, FaultKind, FaultSettings, Phase
from orhpc.driver.fleet.actors import call, call_all, node_ids
from orhpc.errors import RayLost
from orhpc.launch.slurm import scheduler
from orhpc.plan.placement import Node
from orhpc.process import run_processes
from orhpc.process.access import folder_mode
from orhpc.rundir import RunDir, sync_folder
from orhpc.rundir.events import EventLog
from orhpc.rundir.storage import refusals, rehearse_full_disk

if TYPE_CHECKING:
    from orhpc.driver.runtime import Runtime

log = logging.getLogger("orhpc.driver")
_ANSWER_S = 60.0
"""Seconds for a process to carry out a fault."""
_ENVIRONMENT = "orhpc.environments.server"


class FaultInjector:
    """Causes each fault of the config in its step."""

    def __init__(
        self,
        settings: FaultSettings,
        rundir: RunDir,
        attempt: int,
        nodes: Sequence[Node],
        events: EventLog,
    ) -> None:
        """``nodes``: of the job, in order."""
        self._settings, self._rundir, self._attempt = settings, rundir, attempt
        self._nodes, self._events = nodes, events
        self._folder = rundir.path / "faults"
        self._rollouts_s = 0.0
        """Seconds that the rollouts of the last step took."""

    @contextlib.asynccontextmanager
    async def during_rollouts(self, runtime: Runtime, step: int) -> AsyncIterator[None]:
        """Cause the faults of a step's rollouts, after half the time that the last step's took."""
        faults = self._due(step, Phase.ROLLOUTS)
        began = time.monotonic()
        if not faults:
            yield
        else:
            causing = asyncio.ensure_future(self._cause(runtime, faults, after_s=self._rollouts_s / 2))
            try:
                yield
                await causing  # the rollouts may have been faster this time
            finally:
                causing.cancel()
        self._rollouts_s = time.monotonic() - began

    async def before_update(self, runtime: Runtime, step: int) -> None:
        """Cause the faults of a step's update."""
        await self._cause(runtime, self._due(step, Phase.UPDATE))

    def _due(self, step: int, phase: Phase) -> list[Fault]:
        """The faults of a step and phase that have not been caused yet, in the order of the config."""
        own = [f for f in self._settings.parsed if f.step == step and KINDS[f.kind].phase is phase]
        return [f for f in own if not (self._folder / str(f)).exists()]

    async def _cause(self, runtime: Runtime, faults: list[Fault], *, after_s: float = 0.0) -> None:
        if not faults:
            return
        await asyncio.sleep(after_s)
        for fault in faults:
            self._claim(fault)
            log.warning("injecting the fault %s", fault)
            fields = {"index": fault.index} if fault.index is not None else {}
            self._events.write("fault_injected", fault=str(fault), step=fault.step, **fields)
            await self._strike(runtime, fault)

    def _claim(self, fault: Fault) -> None:
        """Record durably that a fault is caused, because it may end this process.

        Raises:
            StorageRefused: the filesystem refuses the file; the fault is not caused.
        """
        with refusals("a fault cannot be recorded"):
            self._folder.mkdir(mode=folder_mode(), exist_ok=True)
            (self._folder / str(fault)).touch(exist_ok=False)
            sync_folder(self._folder)

    async def _strike(self, runtime: Runtime, fault: Fault) -> None:
        index = fault.index or 0
        match fault.kind:
            case FaultKind.ENGINE_KILLED:
                await _signal_engine(runtime, index, signal.SIGKILL)
            case FaultKind.ENGINE_HANG:
                await _signal_engine(runtime, index, signal.SIGSTOP)
            case FaultKind.ENGINE_OOM:
                hosts = _hosts(runtime, index)
                await call_all([host.end_out_of_memory.remote() for host in hosts], "engine", _ANSWER_S)
            case FaultKind.WORKER_KILLED:
                ray.kill(runtime.workers[index].actor)
            case FaultKind.PREEMPTION:
                await asyncio.to_thread(self._preempt)
            case FaultKind.DRIVER_KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.RAY_HEAD_KILLED:
                run_processes.kill_one(["gcs_server"])
            case FaultKind.RAYLET_KILLED:
                await self._on_node(index, run_processes.kill_one, ["raylet"])
            case FaultKind.ENVIRONMENT_KILLED:
                await self._on_node(index, run_processes.kill_one, [_ENVIRONMENT])
            case FaultKind.NODE_LOST:
                await self._on_node(index, run_processes.kill_all)
            case FaultKind.DISK_FULL:
                await _fill_disk(runtime, self._settings.disk_full_s)
            case _:
                rank = runtime.trainers.ranks[index]
                await call(rank.arm.remote(str(fault.kind)), "trainer arm", _ANSWER_S)

    def _preempt(self) -> None:
        """Send the signal that SLURM sends ahead of a preemption to whom SLURM sends it."""
        facts = self._rundir.attempt_metadata(self._attempt)
        if facts.get("kind") == "slurm" and scheduler.available():
            scheduler.signal_batch_shell(str(facts["job"]), "USR2")
        else:
            run_processes.launcher().send_signal(signal.SIGUSR2)

    async def _on_node(self, index: int, action: Callable[..., Any], *args: Any) -> None:
        """Do something to the run's processes on a node, in a process there, which may end with them.

        Raises:
            LookupError: the node does not have that process.
        """
        if index == 0:  # the driver is on the first node, and outlives its raylet
            await asyncio.to_thread(action, *args)
            return
        node = self._nodes[index]
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(action)
        there = NodeAffinitySchedulingStrategy(node_ids([node])[0], soft=False)
        acting = remote.options(scheduling_strategy=there).remote(*args)
        try:
            await call(acting, f"fault on {node.name}", _ANSWER_S)
        except RayLost as error:
            log.info("the process that caused a fault on %s has ended with it: %s", node.name, error)


async def _signal_engine(runtime: Runtime, index: int, number: signal.Signals) -> None:
    hosts = _hosts(runtime, index)
    await call_all([host.signal.remote(int(number)) for host in hosts], "engine signal", _ANSWER_S)


def _hosts(runtime: Runtime, index: int) -> list[ActorHandle[Any]]:
    assert runtime.engines is not None, "the config was checked"
    return runtime.engines.hosts_of(index)


async def _fill_disk(runtime: Runtime, seconds: float) -> None:
    actors = [*runtime.trainers.ranks, *(worker.actor for worker in runtime.workers)]
    rehearsing = [actor.rehearse_full_disk.remote(seconds) for actor in actors]
    rehearse_full_disk(seconds)
    await call_all(rehearsing, "rehearse_full_disk", _ANSWER_S)
