"""Copies of the trainers' state in the memory of other nodes, so that the loss of a node costs no step.

Each node with trainers has a holder on another one (:meth:`orhpc.plan.placement.Placement.copy_holders`), to
which its ranks send their copies once they are complete.  Nothing here delays or fails a step: when a copy
cannot be sent, the run continues without such copies, and reports it once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from orhpc.config import Config
from orhpc.driver.fleet.actors import call, call_all, spawn
from orhpc.errors import CheckpointError, OrhpcError
from orhpc.plan.placement import Placement
from orhpc.train.checkpoint.copy_files import COPIES, CopyId
from orhpc.train.checkpoint.copy_holder import CopyHolder
from orhpc.train.checkpoint.copy_transfer import Address
from orhpc.train.checkpoint.memory import SendStatus

_START_S = 120.0
"""Seconds for the first answers of a holder, whose process may still be starting."""
_ANSWER_S = 30.0
_FUTILE = 3
"""Copies in a row that took longer than two steps, after which no more are sent."""

log = logging.getLogger(__name__)
Held = Mapping[int, set[CopyId]]
"""The copies of each rank."""


class PeerCopies:
    """The holders of a run of several nodes."""

    def __init__(
        self,
        placement: Placement,
        start_holders: Callable[[], list[ActorHandle[Any]]],
        notice: Callable[[str], None],
        *,
        sends: bool,
    ) -> None:
        """Args:
        placement: of the run.
        start_holders: starts a :class:`CopyHolder` on each node.
        notice: reports to the user that no copies are sent.
        sends: whether copies are sent after each step; they are delivered to ranks that moved anyway.
        """
        self._placement, self._start_holders, self._notice = placement, start_holders, notice
        self._node_of = [t.node for t in placement.trainers]
        self._holder_of = placement.copy_holders()
        self._sends = sends
        self._holders: list[ActorHandle[Any]] = []
        self._reported: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._targets: list[Address] | None = None
        """Where each rank sends its copies; None: nowhere."""
        self._in_use = False
        self._futile = 0

    @classmethod
    def of(
        cls, config: Config, placement: Placement, ids: Sequence[str], notice: Callable[[str], None]
    ) -> PeerCopies | None:
        """Return the holders of this run; None if it has one node or makes no copies.

        ``ids``: Ray's id of each node.
        """
        settings = config.checkpoint
        if not placement.copy_holders() or not settings.keep_in_memory:
            return None

        def start() -> list[ActorHandle[Any]]:
            return [
                spawn(CopyHolder, node, config.secret_sources, max_concurrency=len(placement.trainers) + 1)
                for node in ids
            ]

        return cls(placement, start, notice, sends=settings.peer_copies)

    def start(self) -> None:
        """Start the holders; no copies are sent until :meth:`prepare`."""
        self._reset()
        self._holders = self._start_holders()

    def close(self) -> None:
        """End the holders; their files stay."""
        for holder in self._holders:
            ray.kill(holder)
        self._holders = []

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks of which a node holds copies: its own, and those of other nodes."""
        return [r for r, n in enumerate(self._node_of) if node in (n, self._holder_of[n])]

    async def prepare(self, sizes: Sequence[int]) -> None:
        """Check that the copies fit the nodes' memory, and have the holders listen.

        ``sizes``: bytes of one copy of each rank.
        """
        if not self._sends:
            return
        try:
            for node in range(len(self._placement.nodes)):
                if not (ranks := self.ranks_on(node)):
                    continue
                wanted = COPIES * sum(sizes[r] for r in ranks)
                asked = self._holders[node].problem.remote(wanted, ranks)
                problem = await call(asked, "copy holder problem", _START_S)
                if problem is not None:
                    self._end(f"{self._placement.nodes[node].name}: {problem}")
                    return
            addresses = {n: await self._listen(n) for n in set(self._holder_of.values())}
        except OrhpcError as error:
            self._end(str(error))
            return
        self._targets = [addresses[self._holder_of[n]] for n in self._node_of]

    async def after_copy(
        self,
        copy: CopyId,
        statuses: Sequence[SendStatus],
        send: Callable[[CopyId, Sequence[Address]], Any],
    ) -> dict[str, float]:
        """Have all ranks send the copy that they have just begun; returns the step's metrics.

        While any rank still sends an older copy, none sends this one: only a step whose copies all arrive can
        be restored.

        Args:
            copy: its name.
            statuses: of each rank's last sending.
            send: has each rank send its copy to an address.
        """
        if self._targets is None:
            return {}
        problem = next((s.error for s in statuses if s.error is not None), None)
        cancelled = any(s.cancelled for s in statuses)
        busy = any(s.busy for s in statuses)
        self._futile = self._futile + 1 if cancelled else self._futile if busy else 0
        if problem is None and self._futile >= _FUTILE:
            problem = "sending one takes longer than two steps"
        if problem is not None:
            self._end(problem)
            return {}
        if not busy:
            if not self._in_use:
                await self._remove_others()
            await send(copy, self._targets)
        return {"peer_copies_skipped": float(cancelled) + float(busy)}

    async def held(self, own: Sequence[Iterable[CopyId]]) -> set[CopyId]:
        """Return the copies that every rank has on some node; ``own``: those on each rank's own node."""
        everywhere = [set(copies) for copies in own]
        for held in await self._held_by_node():
            for rank, copies in held.items():
                if rank < len(everywhere):
                    everywhere[rank] |= copies
        return set.intersection(*everywhere)

    async def deliver(self, copy: CopyId, own: Sequence[Iterable[CopyId]]) -> None:
        """Bring the copy to the node of every rank that does not have it there.

        Raises:
            CheckpointError: a rank's copy is on no node, or cannot be delivered.
        """
        missing = [rank for rank, copies in enumerate(own) if copy not in copies]
        if not missing:
            return
        held = await self._held_by_node()
        deliveries: list[Any] = []
        try:
            for rank in missing:
                sources = [node for node, found in enumerate(held) if copy in found.get(rank, ())]
                if not sources:
                    raise CheckpointError(f"no node holds a copy of step {copy.step} of rank {rank}")
                target = await self._listen(self._node_of[rank])
                deliveries.append(self._holders[sources[0]].deliver.remote(rank, copy, target))
            await call_all(deliveries, "copy holder deliver")
        except CheckpointError:
            raise
        except OrhpcError as error:
            raise CheckpointError(f"a copy could not be delivered: {error}") from error
        log.info("the copies of step %d of ranks %s came from other nodes", copy.step, missing)

    async def _listen(self, node: int) -> Address:
        host = self._placement.nodes[node].address
        return await call(self._holders[node].listen.remote(host), "copy holder listen", _START_S)

    async def _held_by_node(self) -> list[Held]:
        """Return what each node holds; a holder that does not answer holds nothing."""
        asked = [call(h.held.remote(), "copy holder held", _START_S) for h in self._holders]
        found: list[Held] = []
        for answer in await _answers(asked, []):
            held: dict[int, set[CopyId]] = {}
            for rank, copy in answer:
                held.setdefault(rank, set()).add(CopyId(*copy))
            found.append(held)
        return found

    async def _remove_others(self) -> None:
        """Free the memory of copies that earlier placements have left."""
        self._in_use = True
        asked = [
            call(holder.keep_only.remote(self.ranks_on(node)), "copy holder keep_only", _ANSWER_S)
            for node, holder in enumerate(self._holders)
        ]
        await _answers(asked, None)

    def _end(self, problem: str) -> None:
        """Send no more copies until the trainers start again."""
        self._targets = None
        if problem in self._reported:  # before the trainers started again
            return
        self._reported.add(problem)
        self._notice(
            f"the trainers' state is not copied to other nodes (checkpoint.peer_copies): {problem}; the loss "
            "of a node costs the steps since the last commit"
        )


async def _answers(asked: Iterable[Awaitable[Any]], otherwise: Any) -> list[Any]:
    """Return the answers to calls; ``otherwise`` for one that failed, which is logged."""

    async def answer(one: Awaitable[Any]) -> Any:
        try:
            return await one
        except OrhpcError as error:
            log.warning("%s", error)
            return otherwise

    return list(await asyncio.gather(*map(answer, asked)))
