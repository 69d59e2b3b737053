"""The trainer's ranks: other users cannot join them, or read and change their messages."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Shard
from orhpc.train.checkpoint.copy_files import CopyId
from orhpc.train.checkpoint.copy_holder import CopyHolder
from orhpc.train.checkpoint.memory import SendStatus, StateCopies
from tests.trainer_kit import make_config

from .conftest import Stranger

HOST = "127.0.0.1"


def listening() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def test_ranks_of_one_node_rendezvous_in_a_private_file(stranger: Stranger) -> None:
    before = listening()
    rank = TrainerRank(make_config(), "unused", 0, 1, 1)
    meeting = rank.meeting_file()
    rank.connect(HOST, meeting, 30.0)
    try:
        values = torch.ones(1)
        dist.all_reduce(values)
        assert Path(meeting).exists()
        with pytest.raises(OSError, match="Permission"):
            stranger("opened", meeting)
        # The remaining sockets are gloo's own; none of them is a store.
        assert not any(stranger("store", HOST, port) for port in listening() - before)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(Path(meeting).parent)


def test_a_held_store_listens_on_one_address(stranger: Stranger) -> None:
    """Across nodes the store has no authentication, so it must listen only on the job's address."""
    rank = TrainerRank(make_config(), "unused", 0, 1, 1)
    port = rank.hold_port(HOST)
    assert stranger("take", HOST, port) and stranger("take", "0.0.0.0", port)
    rank.connect(HOST, port, 30.0)
    try:
        held = [c.laddr for c in psutil.Process().net_connections("tcp") if c.laddr.port == port]
        assert {address.ip for address in held} == {HOST}
        assert stranger("store", HOST, port) and not stranger("store", "127.0.0.2", port)
    finally:
        dist.destroy_process_group()


def test_the_holder_of_copies_serves_only_who_knows_its_key(stranger: Stranger, tmp_path: Path) -> None:
    folders = [tmp_path / "own", tmp_path / "other"]
    for folder in folders:
        folder.mkdir(0o700)
    holder = CopyHolder(folders[1])
    address = holder.listen(HOST)
    assert stranger("take", HOST, address.port)
    status, text = stranger("request", "GET", f"http://{HOST}:{address.port}/", None, None, 2)
    assert status == 0
    assert list(folders[1].iterdir()) == []
    copies = StateCopies(folders[0], 0, torch.device("cpu"))
    state = torch.rand(1000)
    copies.begin(CopyId(1, "m"), [Shard("p", state, (1000,), 0)], {})
    copies.send(CopyId(1, "m"), address)
    while (found := copies.send_status()).busy:
        time.sleep(0.01)
    assert found == SendStatus(), text
    assert holder.held() == [(0, CopyId(1, "m"))]
    for file in folders[1].iterdir():
        with pytest.raises(OSError, match="Permission"):
            stranger("opened", str(file))
    holder.close()
