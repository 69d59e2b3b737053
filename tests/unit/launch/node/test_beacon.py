"""When a node counts as lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from orhpc.launch.node import beacon
from orhpc.launch.node.beacon import Beacon, Cause, NodeWatch
from orhpc.launch.node.rendezvous import NodeReady
from orhpc.process.ports import free_ports

HOST = "127.0.0.1"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beacon, "_PERIOD_S", 0.1)
    monkeypatch.setattr(beacon, "LEAST_S", 0.3)


def watch_of(*nodes: NodeReady, down: Callable[[], list[str]] = list) -> NodeWatch:
    watch = NodeWatch(down)
    watch.watch(nodes)
    return watch


def here(rank: int, port: int) -> NodeReady:
    return NodeReady(rank, f"n{rank}", HOST, 4, beacon=port)


@pytest.mark.slow
def test_a_launcher_that_has_ended_is_lost_and_one_that_runs_is_not(quick: None) -> None:
    first, second = Beacon(HOST), Beacon(HOST)
    watch = watch_of(here(1, first.port), here(2, second.port))
    try:
        watch.look_now()
        assert watch.lost() == []
        second.close()
        end = time.monotonic() + 10
        while not watch.lost() and time.monotonic() < end:
            watch.look_now()
        (loss,) = watch.lost()
        assert (loss.name, loss.cause) == ("n2", Cause.ENDED)
        assert 0.3 <= loss.since_s < 10
        watch.watch([here(1, first.port)])
        assert watch.lost() == []
    finally:
        first.close()
        second.close()


def test_a_beacon_answers_many_connections_and_sends_nothing() -> None:
    lit = Beacon(HOST)
    try:
        for _ in range(50):
            with socket.create_connection((HOST, lit.port), 5) as probe:
                assert probe.recv(10) == b""
    finally:
        lit.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, lit.port), 5)


@pytest.mark.slow
def test_one_missing_answer_is_no_loss(quick: None) -> None:
    watch = watch_of(here(1, 1))
    for answer in (Cause.SILENT, Cause.SILENT, None, Cause.SILENT, Cause.SILENT):
        time.sleep(0.2)
        watch.note({"n1": answer})
    assert watch.lost() == []
    watch.note({"n1": Cause.SILENT})
    assert [loss.cause for loss in watch.lost()] == [Cause.SILENT]


def test_a_node_that_slurm_has_given_up_is_lost_although_it_answers() -> None:
    lit = Beacon(HOST)
    try:
        watch = watch_of(here(1, lit.port), down=lambda: ["n1", "n9"])
        watch._ask_slurm()
        watch.look_now()
        assert [str(loss) for loss in watch.lost()] == ["n1: SLURM shows it as down"]
    finally:
        lit.close()


def test_ports_of_beacons_are_below_those_of_outgoing_connections() -> None:
    lit = Beacon(HOST)
    assert lit.port not in free_ports(12_000, HOST)
    lit.close()
