"""Which copies go to other nodes, when they end, and how ranks on new nodes get theirs."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from orhpc.config import Config
from orhpc.driver.fleet.peer_copies import PeerCopies
from orhpc.errors import CheckpointError, RayLost
from orhpc.plan.placement import Node, Placement, TrainerPlace
from orhpc.process import state_folder
from orhpc.train.actor import TrainerRank
from orhpc.train.checkpoint.copy_files import CopyId
from orhpc.train.checkpoint.copy_holder import CopyHolder
from orhpc.train.checkpoint.copy_transfer import Address
from orhpc.train.checkpoint.memory import SendStatus, StateCopies
from tests.trainer_kit import make_config, plan, run_ranks
from tests.unit.train.test_copy_transfer import outcome, send, shards_of

FINE, BUSY, CANCELLED = SendStatus(), SendStatus(busy=True), SendStatus(cancelled=True)


class Handle:
    """Calls a local object as Ray calls an actor; ``failure`` is raised instead."""

    def __init__(self, local: Any, failure: Exception | None = None) -> None:
        self.local, self.failure = local, failure

    def __getattr__(self, name: str) -> Any:
        class Method:
            @staticmethod
            async def remote(*args: Any) -> Any:
                if self.failure is not None:
                    raise self.failure
                return await asyncio.to_thread(getattr(self.local, name), *args)

        return Method


class Nodes:
    """A state folder per node, each with a holder."""

    def __init__(self, tmp_path: Path, count: int) -> None:
        self.folders = [tmp_path / f"node{n}" for n in range(count)]
        self.handles: list[Handle] = []
        self.notices: list[str] = []
        self.sent: list[tuple[int, list[Address]]] = []
        for folder in self.folders:
            folder.mkdir()
            self.handles.append(Handle(CopyHolder(folder)))

    def peers(self, node_of: Sequence[int], *, sends: bool = True) -> PeerCopies:
        nodes = tuple(Node(f"n{i}", "127.0.0.1", 1) for i in range(len(self.folders)))
        ranks = tuple(TrainerPlace(r, n, 0, 1) for r, n in enumerate(node_of))
        made = PeerCopies(
            Placement(nodes, ranks, (), ()), lambda: cast(Any, self.handles), self.notices.append, sends=sends
        )
        made.start()
        return made

    async def send(self, copy: CopyId, targets: Sequence[Address]) -> None:
        self.sent.append((copy.step, list(targets)))

    def lose(self, node: int) -> None:
        """Replace a node by an empty one."""
        self.handles[node].local.close()
        shutil.rmtree(self.folders[node])
        self.folders[node].mkdir()
        self.handles[node] = Handle(CopyHolder(self.folders[node]))

    def close(self) -> None:
        for handle in self.handles:
            handle.local.close()


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    made: list[Nodes] = []

    def make(count: int) -> Nodes:
        made.append(Nodes(tmp_path, count))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


MakeNodes = Callable[[int], Nodes]


def after(peers: PeerCopies, nodes: Nodes, step: int, *statuses: SendStatus) -> dict[str, float]:
    return asyncio.run(peers.after_copy(CopyId(step, "m"), statuses, nodes.send))


def test_each_node_sends_to_the_next_and_a_single_one_with_trainers_to_one_without(
    make_nodes: MakeNodes,
) -> None:
    nodes = make_nodes(3)
    peers = nodes.peers([0, 0, 1, 2])
    asyncio.run(peers.prepare([10, 10, 10, 10]))
    assert after(peers, nodes, 1, FINE, FINE, FINE, FINE) == {"peer_copies_skipped": 0.0}
    addresses = [h.local.listen("127.0.0.1") for h in nodes.handles]
    assert nodes.sent == [(1, [addresses[1], addresses[1], addresses[2], addresses[0]])]
    assert [peers.ranks_on(n) for n in range(3)] == [[0, 1, 3], [0, 1, 2], [2, 3]]
    peers = nodes.peers([0, 0])
    asyncio.run(peers.prepare([10, 10]))
    after(peers, nodes, 1, FINE, FINE)
    assert nodes.sent[-1] == (1, [addresses[1], addresses[1]])
    assert nodes.notices == []


def test_runs_on_one_node_or_without_copies_have_no_peers(make_nodes: MakeNodes) -> None:
    def of(count: int, **checkpoint: Any) -> PeerCopies | None:
        ranks = tuple(TrainerPlace(r, r, 0, 1) for r in range(count))
        placement = Placement(tuple(Node(f"n{i}", "", 1) for i in range(count)), ranks, (), ())
        config = make_config(checkpoint=checkpoint)
        return PeerCopies.of(config, placement, ["id"] * count, print)

    assert of(1) is None
    assert of(2, keep_in_memory=False) is None
    assert of(2) is not None
    assert Config.model_fields["checkpoint"].default.peer_copies


def test_while_one_rank_still_sends_none_sends_the_next_step(make_nodes: MakeNodes) -> None:
    """Ranks that skip different steps would have no step in common."""
    nodes = make_nodes(2)
    peers = nodes.peers([0, 1])
    asyncio.run(peers.prepare([10, 10]))
    found = [after(peers, nodes, step, *s) for step, s in enumerate([(FINE, FINE), (BUSY, FINE)] * 4)]
    assert [f["peer_copies_skipped"] for f in found] == [0.0, 1.0] * 4
    assert [step for step, _ in nodes.sent] == [0, 2, 4, 6]
    assert nodes.notices == []


def test_copies_that_never_arrive_in_time_end_with_one_notice(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    peers = nodes.peers([0, 1])
    asyncio.run(peers.prepare([10, 10]))
    rounds = [(BUSY, FINE), (CANCELLED, FINE)]
    found = [after(peers, nodes, step, *s) for step, s in enumerate([*rounds, (FINE, FINE), *rounds * 3])]
    assert [f.get("peer_copies_skipped") for f in found] == [1, 1, 0, 1, 1, 1, 1, 1, None]
    assert len(nodes.notices) == 1
    assert "takes longer than two steps" in nodes.notices[0]
    assert after(peers, nodes, 99, FINE, FINE) == {}


def test_a_failed_copy_ends_them_with_one_notice_until_the_trainers_start_again(
    make_nodes: MakeNodes,
) -> None:
    nodes = make_nodes(2)
    peers = nodes.peers([0, 1])
    for _ in range(2):
        peers.start()
        asyncio.run(peers.prepare([10, 10]))
        after(peers, nodes, 1, FINE, FINE)
        assert after(peers, nodes, 2, FINE, SendStatus(error="n0 does not answer")) == {}
        assert after(peers, nodes, 3, FINE, FINE) == {}
    assert [step for step, _ in nodes.sent] == [1, 1]
    (line,) = nodes.notices
    assert "checkpoint.peer_copies" in line
    assert "n0 does not answer" in line


@pytest.mark.parametrize("reason", ["memory", "folder", "holder"])
def test_a_node_that_cannot_hold_copies_is_named_once(
    make_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    nodes = make_nodes(2)
    if reason == "memory":
        monkeypatch.setattr("orhpc.train.checkpoint.copy_files.free_bytes", lambda: 10_000)
    elif reason == "folder":
        nodes.handles[1] = Handle(CopyHolder())
    else:
        nodes.handles[1].failure = RayLost("the actor died")
    peers = nodes.peers([0, 1])
    for _ in range(2):  # a restart of the trainers reports it no second time
        peers.start()
        asyncio.run(peers.prepare([3000, 3000]))
        assert after(peers, nodes, 1, FINE, FINE) == {}
    (line,) = nodes.notices
    assert "the loss of a node costs the steps since the last commit" in line
    assert asyncio.run(peers.held([[CopyId(1, "m")], [CopyId(1, "m")]])) == {CopyId(1, "m")}
    assert nodes.sent == []


def test_own_copies_alone_fit_where_those_of_another_node_do_not(
    make_nodes: MakeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four copies of 3,000 bytes: two of the own rank, two of the other node's."""
    nodes = make_nodes(2)
    for free, fits in ((13_400, True), (13_300, False)):
        monkeypatch.setattr("orhpc.train.checkpoint.copy_files.free_bytes", lambda free=free: free)
        peers = nodes.peers([0, 1])
        asyncio.run(peers.prepare([3000, 3000]))
        assert (after(peers, nodes, 1, FINE, FINE) != {}) is fits


def test_without_the_setting_nothing_is_sent(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(2)
    peers = nodes.peers([0, 1], sends=False)
    asyncio.run(peers.prepare([10, 10]))
    assert after(peers, nodes, 1, FINE, FINE) == {}
    assert (nodes.sent, nodes.notices) == ([], [])


def _train(
    rank: int, world: int, port: int, folder: str, states: list[str], targets: list[Address]
) -> dict[int, dict[str, np.ndarray]]:
    """Train four steps; after each of the first three the state is copied to this node and to the next."""
    trainer = _rank(rank, world, port, folder, states)
    found: dict[int, dict[str, np.ndarray]] = {}
    for step in range(1, 5):
        trainer.step(plan(step, ranks=world), step=step)
        found[step] = _state(trainer)
        if step < 4:
            assert trainer.copy_state(CopyId(step, f"m{step}")) == FINE
            trainer.send_copy(CopyId(step, f"m{step}"), targets[rank])
            copies: Any = trainer._copies
            while copies._send_status.busy:
                copies.join()
    trainer.close()
    return found


def _continue(
    rank: int, world: int, port: int, folder: str, states: list[str], copy: CopyId
) -> list[dict[str, np.ndarray]]:
    """The state restored from a copy, and that after the next step."""
    trainer = _rank(rank, world, port, folder, states)
    trainer.restore_copy(copy)
    found = [_state(trainer)]
    trainer.step(plan(copy.step + 1, ranks=world), step=copy.step + 1)
    found.append(_state(trainer))
    trainer.close()
    return found


def _state(trainer: TrainerRank) -> dict[str, np.ndarray]:
    return {s.key: s.tensor.numpy().copy() for s in trainer.backend.shards()}


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(a, other[key]) for key, a in one.items())


def _rank(rank: int, world: int, port: int, folder: str, states: list[str]) -> TrainerRank:
    os.environ[state_folder.VARIABLE] = states[rank]
    trainer = TrainerRank(make_config(ranks=world, train={"lr": 1e-2}), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_trainers_continue_to_the_bit_after_the_loss_of_any_node(
    make_nodes: MakeNodes, folder: str, lost: int
) -> None:
    """Two ranks of one sharded model on two nodes; the lost node is replaced by an empty one."""
    nodes = make_nodes(2)
    states = [str(f) for f in nodes.folders]
    targets = [nodes.handles[1 - rank].local.listen("127.0.0.1") for rank in (0, 1)]
    before = run_ranks(_train, 2, folder, states, targets)
    nodes.lose(lost)
    peers = nodes.peers([0, 1])
    own = [[copy for rank, copy in nodes.handles[r].local.held() if rank == r] for r in (0, 1)]
    assert own[lost] == []
    held = asyncio.run(peers.held(own))
    assert held == {CopyId(2, "m2"), CopyId(3, "m3")}
    with pytest.raises(CheckpointError, match="no node holds a copy of step 1"):
        asyncio.run(peers.deliver(CopyId(1, "m1"), own))
    copy = max(held)
    asyncio.run(peers.deliver(copy, own))
    after_loss = run_ranks(_continue, 2, folder, states, copy)
    for rank in (0, 1):
        assert _same(after_loss[rank][0], before[rank][3])
        assert _same(after_loss[rank][1], before[rank][4])


def test_a_rank_on_the_node_of_its_peer_needs_no_delivery(make_nodes: MakeNodes) -> None:
    """Its files have the same names there."""
    nodes = make_nodes(2)
    source = nodes.folders[0]
    copies = StateCopies(source, 0, torch.device("cpu"))
    send(copies, CopyId(1, "m"), shards_of(1), nodes.handles[1].local.listen("127.0.0.1"))
    assert outcome(copies) == FINE
    nodes.lose(0)
    moved = StateCopies(nodes.folders[1], 0, torch.device("cpu"))
    assert moved.held() == {CopyId(1, "m")}
    assert asyncio.run(nodes.peers([1, 0]).held([moved.held(), {CopyId(1, "m")}])) == {CopyId(1, "m")}
