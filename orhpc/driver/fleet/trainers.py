"""All ranks of the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.actor import ActorHandle

from orhpc.config import Config
from orhpc.driver.fleet import hang
from orhpc.driver.fleet.actors import CONTROL, POLL_S, call, call_all, spawn
from orhpc.driver.fleet.pace_watch import PaceWatch
from orhpc.driver.fleet.peer_copies import PeerCopies
from orhpc.errors import CheckpointError, OrhpcError, TrainerHangs
from orhpc.plan.placement import Placement
from orhpc.rundir.commits import ShardFile
from orhpc.rundir.storage import Store
from orhpc.train.actor import TrainerRank
from orhpc.train.checkpoint.copy_files import CopyId
from orhpc.train.checkpoint.copy_transfer import Address
from orhpc.train.weights.update_requests import SyncPlan, SyncReport
from orhpc.types import BatchPlan, MiniBatch

COLLECTIVE_TIMEOUT_S = 900.0
"""Maximum seconds that ranks wait for each other in a collective."""
ANSWER_S = 30.0
"""Seconds without an answer after which a rank counts as stuck or dead."""
_AS_LONG_AS_IT_TAKES = frozenset({"build", "restore", "restore_copy", "export_hf", "step", "send_weights"})
"""Calls that load or write a model, and those that have limits of their phases."""
RECOVERY_S = 60.0
"""Seconds within which all ranks must have left their collectives, and then have formed new groups."""

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class Trainers:
    """All ranks of the trainer: consumes batch plans, produces metrics, weights and shards."""

    def __init__(
        self,
        start_ranks: Callable[[], list[ActorHandle[Any]]],
        host: str,
        limit: hang.UpdateLimit,
        peers: PeerCopies | None,
        *,
        one_node: bool,
        save_timeout_s: float = 0.0,
    ) -> None:
        """Args:
        start_ranks: starts an actor for each rank.
        host: address of rank 0's node.
        limit: of an update.
        peers: holds copies on other nodes; None: none are made.
        one_node: whether all ranks are on that node.
        save_timeout_s: how long a call may wait for a commit that is being written.
        """
        self._answer_s = COLLECTIVE_TIMEOUT_S + save_timeout_s
        self._start_ranks, self.host, self._one_node = start_ranks, host, one_node
        self._limit, self._peers = limit, peers
        self.ranks: list[ActorHandle[Any]] = []
        self.info: dict[str, Any] = {}
        self.paces = PaceWatch()
        self.short_of_memory = False
        """Whether a step has run out of memory: see :meth:`TrainerRank.step`."""
        self.copies_problem: str | None = None
        """Why a node cannot hold copies of its ranks' state; None if all can."""

    @classmethod
    async def start(
        cls,
        config: Config,
        placement: Placement,
        ids: Sequence[str],
        model_dir: str,
        notice: Callable[[str], None],
    ) -> Trainers:
        """Spawn every rank and connect them; :meth:`build` loads the model.

        ``notice``: reports to the user what does not work and does not end the run.
        This uses hardly any device memory, so engines that share the devices may start concurrently.
        """
        world = len(placement.trainers)
        rank_class: type[TrainerRank] = TrainerRank
        if config.faults.inject:
            from orhpc.train.fault_injection import FaultyTrainerRank

            rank_class = FaultyTrainerRank

        def start_ranks() -> list[ActorHandle[Any]]:
            return [
                spawn(
                    rank_class, ids[t.node], config.secret_sources, config, model_dir, t.rank, world,
                    t.threads, t.device if config.placement.device == "cuda" else None,
                    # Training runs on one thread, to which torch's thread count applies; this group lets a
                    # stop request run while that thread is busy.
                    concurrency_groups={CONTROL: 1},
                )
                for t in placement.trainers
            ]  # fmt: skip

        host = placement.nodes[placement.trainers[0].node].address
        limit = hang.UpdateLimit(config.train.update_timeout_s)
        peers = PeerCopies.of(config, placement, ids, notice)
        one_node = len({t.node for t in placement.trainers}) == 1
        waits_s = config.checkpoint.save_timeout_s
        self = cls(start_ranks, host, limit, peers, one_node=one_node, save_timeout_s=waits_s)
        await self._connect()
        return self

    async def _connect(self) -> None:
        self._limit.started()
        self.ranks = self._start_ranks()
        if self._peers is not None:
            self._peers.start()
        # Rank 0 still imports its libraries, which can take minutes from a cold or busy filesystem.
        meeting = await self._meeting(COLLECTIVE_TIMEOUT_S)
        await self.all(TrainerRank.connect, self.host, meeting, COLLECTIVE_TIMEOUT_S)

    async def _meeting(self, timeout_s: float) -> int | str:
        """Return what the ranks form a process group with; see :meth:`TrainerRank.connect`."""
        if self._one_node:
            return await call(self.ranks[0].meeting_file.remote(), "trainer meeting_file", timeout_s)
        return await self.hold_port(timeout_s)

    async def recover(self) -> bool:
        """Bring all ranks out of a step in which one of them ran out of memory, without a new process.

        Ranks that wait for the failed one in a collective are freed first: NCCL is aborted, and gloo ends
        when the failed rank closes its connections.  Then all form new process groups and forget the step.
        Rank 0 leaves the group of the engines too, in which a broadcast may have failed.

        Returns whether all ranks hold the state of before the step.

        Raises:
            OrhpcError: a rank has died, does not answer in time, or cannot recover.
        """
        if len(self.ranks) == 1:
            await self.all_within(RECOVERY_S, TrainerRank.leave_weight_group)
        else:
            await self._abandon_collectives(RECOVERY_S)
            # Each rank does this once its step has ended; the failed one's has.
            await self.all_within(RECOVERY_S, TrainerRank.leave_groups)
            connect, meeting = TrainerRank.rejoin, await self._meeting(RECOVERY_S)
            await self.all_within(RECOVERY_S, connect, self.host, meeting, COLLECTIVE_TIMEOUT_S)
        return all(await self.all_within(RECOVERY_S, TrainerRank.recover))

    async def _abandon_collectives(self, timeout_s: float) -> None:
        controls = [rank.abandon_collectives.options(concurrency_group=CONTROL) for rank in self.ranks]
        await call_all([c.remote() for c in controls], "trainer abandon_collectives", timeout_s)

    async def restart(self) -> None:
        """End all ranks and start them again, with the base model's weights.

        Raises:
            RayLost: a node of theirs is gone.
        """
        await self.close()
        await self._connect()
        await self.build()

    async def hold_port(self, timeout_s: float | None = None) -> int:
        """Have rank 0 reserve a free port for the store that it hosts next; returns its number."""
        return await call(self.ranks[0].hold_port.remote(self.host), "trainer hold_port", timeout_s)

    async def build(self) -> None:
        """Load the model on every rank."""
        built = await self.all(TrainerRank.build)
        sizes = [rank.pop("copy_bytes") for rank in built]
        problems = [p for rank in built if (p := rank.pop("copies_problem")) is not None]
        self.info, self.copies_problem = built[0], next(iter(problems), None)
        if self.copies_problem is None:
            await self.all(TrainerRank.prepare_copies)
            if self._peers is not None:
                await self._peers.prepare(sizes)

    async def all(
        self, method: Callable[Concatenate[TrainerRank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method on every rank; returns their answers in order.

        Raises:
            RayLost: a rank has died, or has not answered for longer than any collective or commit may take.
        """
        limit_s = None if method.__name__ in _AS_LONG_AS_IT_TAKES else self._answer_s
        return await self.all_within(limit_s, method, *args, **kwargs)

    async def all_within(
        self,
        timeout_s: float | None,
        method: Callable[Concatenate[TrainerRank, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """:meth:`all` with a deadline, after which it raises RayLost."""
        name = method.__name__
        references = [getattr(rank, name).remote(*args, **kwargs) for rank in self.ranks]
        return await call_all(references, f"trainer {name}", timeout_s)

    async def restore(self, folder: Path | None, *, of_another_run: bool = False) -> None:
        await self.all(TrainerRank.restore, str(folder) if folder else None, of_another_run=of_another_run)

    async def copies(self) -> set[CopyId]:
        """Return the copies in the nodes' memory from which every rank's state can be restored."""
        own = await self.all(TrainerRank.copies)
        return set.intersection(*map(set, own)) if self._peers is None else await self._peers.held(own)

    async def restore_copy(self, copy: CopyId) -> None:
        """Restore a state from the nodes' memory; ranks without a copy on their node get it from another.

        Raises:
            CheckpointError: a rank has no such copy.
        """
        if self._peers is not None:
            await self._peers.deliver(copy, await self.all(TrainerRank.copies))
        await self.all(TrainerRank.restore_copy, copy)

    async def copy_state(self, copy: CopyId) -> dict[str, float]:
        """Start to copy every rank's state to its node's memory, and then to another node's.

        Returns metrics of the step: ``peer_copies_skipped``, if there are copies on other nodes.

        Raises:
            CheckpointError: a rank's copy before failed.
        """
        statuses = await self.all(TrainerRank.copy_state, copy)
        return {} if self._peers is None else await self._peers.after_copy(copy, statuses, self._send_copies)

    async def _send_copies(self, copy: CopyId, targets: Sequence[Address]) -> None:
        sending = [rank.send_copy.remote(copy, to) for rank, to in zip(self.ranks, targets, strict=True)]
        await call_all(sending, "trainer send_copy")

    async def step(
        self,
        plan: BatchPlan,
        step: int,
        stop: Callable[[], bool] = lambda: False,
        traces: Path | None = None,
    ) -> dict[str, float]:
        """Train on all mini-batches of a step; returns metrics, already reduced over the ranks.

        ``traces``: folder for the profiles of the profiled ranks; None: no profile.

        Raises:
            StopRequested: ``stop`` became true before the first optimizer step.
            TrainerHangs: the update takes too long.
        """
        folder, tokens, elapsed = str(traces or ""), plan.tokens, hang.Stopwatch(5 * POLL_S)
        limit = float("inf") if folder else self._limit.seconds(tokens)  # tracing slows an update down
        # Ray passes every rank the list itself, from one copy in its object store.
        minibatches = cast(list[MiniBatch], ray.put(plan.minibatches))
        short = self.short_of_memory
        work = self.all(TrainerRank.step, minibatches, step=step, traces=folder, short_of_memory=short)
        stepping = asyncio.ensure_future(work)
        asked = False
        while not (await asyncio.wait([stepping], timeout=POLL_S))[0]:
            if not asked and stop():
                control = self.ranks[0].request_stop.options(concurrency_group=CONTROL)
                await call(control.remote(), "trainer request_stop", 30.0)
                asked = True  # a rank that hangs does not stop
            if elapsed.seconds() > limit:
                stepping.cancel()
                raise await self._hang(f"the update of step {step + 1}", self._limit.why(tokens))
        metrics = (await stepping)[0]
        self._limit.note(tokens, elapsed.seconds())
        return metrics | await self._compare_paces()

    async def _compare_paces(self) -> dict[str, float]:
        """Metrics of :meth:`PaceWatch.note`; empty with one rank, or if a device had no memory for it."""
        if len(self.ranks) == 1:
            return {}
        paces = await self.all(TrainerRank.pace)
        known = [seconds for seconds in paces if seconds is not None]
        return self.paces.note(known) if len(known) == len(paces) else {}

    async def _hang(self, what: str, limit: str) -> TrainerHangs:
        found = await hang.report(self.ranks, CONTROL)
        message = f"{what} has not ended in time ({limit}): {found.line}"
        return TrainerHangs(message, stacks=found.text(message))

    async def send_weights(self, plan: SyncPlan) -> list[SyncReport]:
        """Have the ranks send the weights to the engines; returns what each has done.

        Raises:
            TrainerHangs: the ranks have not ended a bucket within twice the limit of a transfer: one for the
                engines, one to gather it.
        """
        sending = asyncio.ensure_future(self.all(TrainerRank.send_weights, plan))
        limit, pause = 2 * plan.timeout_s, plan.timeout_s / 4
        reached, waited = cast(int | None, None), hang.Stopwatch(2 * pause)
        try:
            while not (await asyncio.wait([sending], timeout=pause))[0]:
                progress = await self._sync_progress()
                if progress != reached:
                    reached = progress
                    waited.restart()
                elif waited.seconds() > limit:
                    why = f"{limit:g} s, engine.sync_timeout_s"
                    raise await self._hang("a bucket of the weight sync", why)
            return await sending
        finally:
            sending.cancel()

    async def _sync_progress(self) -> int | None:
        """Rank 0's progress in a sync; all ranks are at the same bucket.  None: it does not answer."""
        asking = self.ranks[0].sync_progress.options(concurrency_group=CONTROL).remote()
        try:
            return await call(asking, "trainer sync_progress", ANSWER_S)
        except OrhpcError:
            return None

    async def record(self, folder: Path, store: Store) -> None:
        """Write what the last step computed for its rollouts to the folder of their record.

        Rank 0 writes it, through ``store``; the arrays do not pass through the driver.

        Raises:
            OrhpcError: what ``store`` raises.
        """
        parts = [rank.take_trained.remote() for rank in self.ranks]
        writer = self.ranks[0].write_trained
        await store(lambda: call(writer.remote(str(folder), *parts), "trainer write_trained"))

    async def hold_whole_step(self) -> bool:
        """Whether all ranks hold the state after the last complete step, so that it can be committed.

        Use it only at the end of an attempt: ranks stop waiting for a failed one, and no rank can take part
        in a collective afterwards.  False if a rank has died or does not answer in time.
        """
        try:
            await self._abandon_collectives(ANSWER_S)
            return all(await self.all_within(ANSWER_S, TrainerRank.holds_whole_step))
        except OrhpcError as error:
            log.warning("the trainers cannot commit: %s", error)
            return False

    async def sleep(self, *, all_moves: bool) -> dict[str, float]:
        """Leave the devices to engines (:meth:`orhpc.train.rank_state.RankState.sleep`); returns, summed over
        the ranks, ``freed_gb``, ``moved_gb`` and ``left_gb``, and of the slowest rank ``seconds`` and
        ``copy_seconds``; nothing on CPUs."""
        reports = await self.all(TrainerRank.sleep, all_moves)
        if "own_bytes" not in reports[0]:
            return {}
        return {
            "freed_gb": sum(r["freed_bytes"] for r in reports) / 1e9,
            "moved_gb": sum(r["moved_bytes"] for r in reports) / 1e9,
            "left_gb": sum(r["own_bytes"] for r in reports) / 1e9,
            **{name: max(r[name] for r in reports) for name in ("seconds", "copy_seconds")},
        }

    async def wake(self) -> dict[str, float]:
        """Undo :meth:`sleep`; returns ``others_gb``, the memory that engines still use, and ``seconds``."""
        reports = await self.all(TrainerRank.wake)
        if "own_bytes" not in reports[0]:
            return {}
        return {
            "others_gb": sum(r["other_bytes"] for r in reports) / 1e9,
            "seconds": max(r["seconds"] for r in reports),
        }

    async def save_begin(self, folder: Path) -> None:
        await self.all(TrainerRank.save_begin, str(folder))

    async def save_poll(self) -> tuple[ShardFile, ...] | None:
        """Shards of the pending save once every rank has written its own, else None."""
        written = await self.all(TrainerRank.save_poll)
        if any(files is None for files in written):
            return None
        return tuple(ShardFile(**f) for files in written if files is not None for f in files)

    async def finish_save(self, timeout_s: float) -> tuple[ShardFile, ...]:
        """Wait for the pending save.

        Raises:
            CheckpointError: a rank failed, or it took too long.
        """
        end = time.monotonic() + timeout_s
        while (files := await self.save_poll()) is None:
            if time.monotonic() > end:
                raise CheckpointError(f"the save took longer than {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)
        return files

    async def save_give_up(self) -> bool:
        """Have all ranks end a save in which one rank failed; returns whether all have stopped writing."""
        return all(await self.all_within(2 * ANSWER_S, TrainerRank.save_give_up))

    async def close(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)
        if self._peers is not None:
            self._peers.close()
