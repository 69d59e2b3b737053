"""Copies sent to other nodes: complete to the bit or not there, whatever happens meanwhile."""

from __future__ import annotations

import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orhpc.errors import CheckpointError
from orhpc.train.backend import Shard
from orhpc.train.checkpoint import copy_files, copy_transfer
from orhpc.train.checkpoint.copy_files import CopyId
from orhpc.train.checkpoint.copy_holder import CopyHolder
from orhpc.train.checkpoint.copy_transfer import Address
from orhpc.train.checkpoint.memory import SendStatus, StateCopies

TYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
MakeHolder = Callable[[str], CopyHolder]


def shards_of(seed: int, rows: int = 5000) -> list[Shard]:
    """About 100 kB of state."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(rows, 4), (rows // 2,)]
    tensors = [torch.rand(*size, generator=generator).to(t) for size, t in zip(sizes, TYPES, strict=True)]
    return [Shard(f"p{i}", t, tuple(t.shape), 0) for i, t in enumerate(tensors)]


def same(one: list[Shard], other: list[Shard]) -> bool:
    return all(torch.equal(a.tensor, b.tensor) for a, b in zip(one, other, strict=True))


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def make_holder(tmp_path: Path) -> Iterator[MakeHolder]:
    made: list[CopyHolder] = []

    def make(name: str) -> CopyHolder:
        made.append(CopyHolder(folder_of(tmp_path, name)))
        return made[-1]

    yield make
    for holder in made:
        holder.close()


def send(copies: StateCopies, copy: CopyId, shards: list[Shard], target: Address) -> None:
    copies.begin(copy, shards, {"optimizer_steps": copy.step})
    copies.send(copy, target)


def outcome(copies: StateCopies, within_s: float = 20) -> SendStatus:
    end = time.monotonic() + within_s
    while (status := copies.send_status()).busy:
        assert time.monotonic() < end, "the copy is still on its way"
        time.sleep(0.01)
    return status


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_after_the_loss_of_any_node_every_rank_restores_its_last_step(
    make_holder: MakeHolder, tmp_path: Path, seed: int
) -> None:
    """Two ranks on each of two or three nodes; their states have different sizes."""
    draw = random.Random(seed)
    nodes, steps = draw.choice([2, 3]), draw.randint(1, 4)
    holders = [make_holder(f"node{n}") for n in range(nodes)]
    ranks = range(2 * nodes)
    copies = [StateCopies(tmp_path / f"node{r // 2}", r, CPU) for r in ranks]
    states: dict[int, list[list[Shard]]] = {}
    for step in range(1, steps + 1):
        states[step] = [shards_of(100 * step + r, 1000 + 100 * r) for r in ranks]
        for r in ranks:
            target = holders[(r // 2 + 1) % nodes].listen(LOOPBACK)
            send(copies[r], CopyId(step, "m"), states[step][r], target)
        assert [outcome(c) for c in copies] == [SendStatus()] * len(ranks)
    lost = draw.randrange(nodes)
    shutil.rmtree(tmp_path / f"node{lost}")
    spare = make_holder(f"node{lost}")
    for step in range(max(1, steps - 1), steps + 1):
        copy = CopyId(step, "m")
        for r in (2 * lost, 2 * lost + 1):
            holders[(lost + 1) % nodes].deliver(r, copy, spare.listen(LOOPBACK))
        for r in ranks:
            blank = shards_of(0, 1000 + 100 * r)
            progress = StateCopies(tmp_path / f"node{r // 2}", r, CPU).load(copy, blank)
            assert same(blank, states[step][r])
            assert progress == {"optimizer_steps": step}


@pytest.mark.slow
def test_a_holder_keeps_two_copies_per_rank_and_forgets_those_of_steps_made_again(
    make_holder: MakeHolder, tmp_path: Path
) -> None:
    holder = make_holder("peer")
    target = holder.listen(LOOPBACK)
    copies = StateCopies(folder_of(tmp_path, "own"), 3, CPU)
    made = [CopyId(1, "a"), CopyId(2, "a"), CopyId(3, "a"), CopyId(2, "b")]
    held: list[set[CopyId]] = []
    for number, copy in enumerate(made):
        send(copies, copy, shards_of(number), target)
        assert outcome(copies) == SendStatus()
        held.append({c for _, c in holder.held()})
    assert held == [set(made[:1]), set(made[:2]), set(made[1:3]), {made[3]}]
    assert len(list((tmp_path / "peer").glob("*.state"))) == 2
    holder.keep_only([2])
    assert list((tmp_path / "peer").iterdir()) == []
    send(copies, CopyId(4, "b"), shards_of(9), target)  # into new files
    assert outcome(copies) == SendStatus()
    blank = shards_of(0)
    StateCopies(tmp_path / "peer", 3, CPU).load(CopyId(4, "b"), blank)
    assert same(blank, shards_of(9))


class Held:
    """Stops a receiver of copies before or after the data, until :meth:`release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after_data: bool) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        receive: Any = copy_transfer._receive_data

        def held(plain: socket.socket, into: memoryview) -> None:
            if after_data:
                receive(plain, into)
            self.reached.set()
            assert self._go.wait(120)
            if not after_data:
                receive(plain, into)

        monkeypatch.setattr(copy_transfer, "_receive_data", held)

    def release(self) -> None:
        self._go.set()


@pytest.mark.parametrize("after_data", [False, True])
def test_a_copy_whose_file_is_needed_before_it_has_arrived_is_never_used(
    make_holder: MakeHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_data: bool
) -> None:
    """Also when all data has arrived, which the sender may have read while its file changed."""
    holder = make_holder("peer")
    target = holder.listen(LOOPBACK)
    copies = StateCopies(folder_of(tmp_path, "own"), 0, CPU)
    send(copies, CopyId(1, "m"), shards_of(1), target)
    assert outcome(copies) == SendStatus()
    held = Held(monkeypatch, after_data=after_data)
    send(copies, CopyId(2, "m"), shards_of(2), target)
    assert held.reached.wait(120)
    copies.begin(CopyId(3, "m"), shards_of(3), {})
    copies.wait()
    assert copies.send_status() == SendStatus(busy=True)  # step 3 has another file
    began = time.monotonic()
    copies.begin(CopyId(4, "m"), shards_of(4), {})
    copies.wait()
    assert time.monotonic() - began < 5
    held.release()
    assert outcome(copies) == SendStatus(cancelled=True)
    settled(holder)
    assert holder.held() == [(0, CopyId(1, "m"))]
    blank = shards_of(0)
    StateCopies(tmp_path / "peer", 0, CPU).load(CopyId(1, "m"), blank)
    assert same(blank, shards_of(1))


def settled(holder: CopyHolder) -> None:
    """Wait until the holder receives nothing."""
    end = time.monotonic() + 20
    while any(t.name == "copy-received" for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_sender_that_ends_leaves_the_copy_before(
    make_holder: MakeHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = make_holder("peer")
    target = holder.listen(LOOPBACK)
    copies = StateCopies(folder_of(tmp_path, "own"), 0, CPU)
    for step in (1, 2):
        send(copies, CopyId(step, "m"), shards_of(step), target)
        assert outcome(copies) == SendStatus()

    def cut(descriptor: int, source: int, at: int, size: int) -> int:
        if at:
            raise ConnectionResetError("the rank was killed")
        return sendfile(descriptor, source, at, 50_000)

    sendfile = copy_transfer.os.sendfile
    monkeypatch.setattr(copy_transfer.os, "sendfile", cut)
    send(copies, CopyId(3, "m"), shards_of(3), target)
    assert "the rank was killed" in str(outcome(copies).error)
    settled(holder)
    assert holder.held() == [(0, CopyId(2, "m"))]
    blank = shards_of(0)
    StateCopies(tmp_path / "peer", 0, CPU).load(CopyId(2, "m"), blank)
    assert same(blank, shards_of(2))


def test_two_receivers_never_write_to_one_file(
    make_holder: MakeHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder of an earlier start may still be receiving while it is being ended."""
    held = Held(monkeypatch, after_data=False)
    earlier, later = (StateCopies(folder_of(tmp_path, name), 0, CPU) for name in ("earlier", "later"))
    send(earlier, CopyId(1, "a"), shards_of(1), make_holder("peer").listen(LOOPBACK))
    assert held.reached.wait(120)
    new = make_holder("peer")
    send(later, CopyId(1, "b"), shards_of(2), new.listen(LOOPBACK))
    assert "temporarily unavailable" in str(outcome(later).error)
    held.release()
    assert outcome(earlier) == SendStatus()
    assert new.held() == [(0, CopyId(1, "a"))]


@pytest.mark.slow
def test_a_stopped_peer_is_an_error_of_the_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port accepts connections, and nothing answers."""
    monkeypatch.setattr(copy_transfer, "CONNECT_S", 3.0)
    copies = StateCopies(folder_of(tmp_path, "own"), 0, CPU)
    with socket.socket() as stopped:
        stopped.bind((LOOPBACK, 0))
        stopped.listen()
        address = Address(LOOPBACK, stopped.getsockname()[1], b"k")
        send(copies, CopyId(1, "m"), shards_of(1), address)
        copies.begin(CopyId(2, "m"), shards_of(2), {})
        copies.wait()
        assert copies.send_status().busy  # the copy of step 2 did not wait for it
        assert "does not answer in time" in str(outcome(copies).error)
    send(copies, CopyId(3, "m"), shards_of(3), address)
    assert "refused" in str(outcome(copies).error)
    assert copies.send_status() == SendStatus()  # reported once
    assert {c.step for c in copies.held()} == {2, 3}


def test_without_the_key_nothing_is_sent_or_written(make_holder: MakeHolder, tmp_path: Path) -> None:
    holder = make_holder("peer")
    real = holder.listen(LOOPBACK)
    copies = StateCopies(folder_of(tmp_path, "own"), 0, CPU)
    send(copies, CopyId(1, "m"), shards_of(1), Address(real.host, real.port, b"x" * 32))
    assert "digest" in str(outcome(copies).error)
    assert list((tmp_path / "peer").iterdir()) == []
    assert str(real.key) not in repr(real)


def test_a_server_without_the_key_gets_no_data(tmp_path: Path) -> None:
    """It accepts any answer to its challenge, but cannot answer the sender's."""
    copies = StateCopies(folder_of(tmp_path, "own"), 0, CPU)
    got: list[bytes] = []

    def impostor(listener: socket.socket) -> None:
        plain, _ = listener.accept()
        with plain:
            connection = copy_transfer._messages(plain)
            connection.send_bytes(b"#CHALLENGE#" + b"x" * 20)
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            connection.recv_bytes()
            connection.send_bytes(b"y" * 16)
            got.append(connection.recv_bytes())
            got.append(plain.recv(1))

    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        send(copies, CopyId(1, "m"), shards_of(1), Address(LOOPBACK, listener.getsockname()[1], b"k" * 32))
        assert outcome(copies).error is not None
        thread.join(20)
    assert got == [b"#FAILURE#", b""]


def test_memory_that_does_not_suffice_is_named(
    make_holder: MakeHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = make_holder("peer")
    copies = StateCopies(folder_of(tmp_path, "own"), 0, CPU)
    monkeypatch.setattr(copy_files, "free_bytes", lambda: 1_000_000)
    assert holder.problem(900_000, [0]) is None
    assert holder.problem(900_001, [0]) is not None
    send(copies, CopyId(1, "m"), shards_of(1), holder.listen(LOOPBACK))
    assert outcome(copies) == SendStatus()
    assert holder.problem(900_001, [0]) is None  # a part is allocated already
    send(copies, CopyId(2, "m"), shards_of(2), holder.listen(LOOPBACK))
    assert outcome(copies) == SendStatus()
    monkeypatch.setattr(copy_files, "free_bytes", lambda: 1000)
    big = StateCopies(tmp_path / "own", 1, CPU)
    send(big, CopyId(3, "m"), shards_of(3), holder.listen(LOOPBACK))
    assert "are needed, memory has 0.0 GB free" in str(outcome(big).error)


def test_what_a_node_does_not_hold_cannot_be_delivered(make_holder: MakeHolder) -> None:
    one, other = make_holder("one"), make_holder("other")
    with pytest.raises(CheckpointError, match="holds no copy of step 7 of rank 1"):
        one.deliver(1, CopyId(7, "m"), other.listen(LOOPBACK))
    nowhere = CopyHolder()
    assert nowhere.held() == []
    assert nowhere.problem(1, [0]) == "there is no shared memory"
    with pytest.raises(CheckpointError, match="no shared memory"):
        nowhere.listen(LOOPBACK)
