"""External interfaces of a trainer rank: weight sync to engines, sockets, fetching of arrays."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch.distributed as dist

from orhpc.errors import InfraError, RayLost, WeightSyncFailed
from orhpc.process.ports import is_free
from orhpc.train.actor import TrainerRank
from orhpc.train.fetch import fetch_arrays, load_batch, prefetched
from orhpc.train.weights.buckets import BucketSpec
from orhpc.train.weights.update_requests import Receiver, SyncPlan
from orhpc.types import Location, MicroBatch, Sample
from orhpc.wire.routes import RouteShare
from tests import preloaded
from tests.trainer_kit import free_port, make_config, plan
from tests.update_engine import KEY, UpdateEngine, update_engines
from tests.weight_receiver import receive

# --- weight sync ----------------------------------------------------------------------------------


@contextlib.contextmanager
def engines(n: int, port: int, specs: Sequence[BucketSpec]) -> Iterator[list[Any]]:
    """Start ``n`` receiving processes; yield the pipes through which they report."""
    buckets = [list(zip(spec.names, spec.dtypes, spec.shapes, strict=True)) for spec in specs]
    pipes, processes = [], []
    for rank in range(1, n + 1):
        pipe, sender = multiprocessing.Pipe(duplex=False)
        process = preloaded.start(receive, (port, rank, n + 1, buckets, sender))
        pipes.append(pipe)
        processes.append(process)
    try:
        yield pipes
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join()


def broadcast_to(notified: Sequence[UpdateEngine]) -> SyncPlan:
    """A sync to engines that receive broadcasts; ``notified``: those that get the requests."""
    receivers = tuple(Receiver(engine.url, (0,), maps_memory=False, fields={}) for engine in notified)
    return SyncPlan(receivers, "weights", 60.0, KEY)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "n"), [("float32", 2), ("bfloat16", 1)])
def test_weights_reach_every_engine(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch, dtype: str, n: int
) -> None:
    rank = make(dtype=dtype)
    monkeypatch.setattr(rank.sync, "_bucket_bytes", 20_000)
    rank.step(plan(0), step=1)
    specs = rank.sync.buckets()
    assert len(specs) > 1
    port = free_port()
    with update_engines(n) as notified, engines(n, port, specs) as pipes:
        sent = broadcast_to(notified)
        rank.join_weight_group("127.0.0.1", port, n + 1, "weights", 60)
        report = rank.send_weights(sent)
        assert report.seconds.gather > 0
        assert report.failures == {}
        exported = rank.backend.export(rank.backend.parameter_shapes())
        expected = {name: tensor.float().numpy() for name, tensor in exported}
        for pipe in pipes:
            assert pipe.poll(60)
            error, weights = pipe.recv()
            assert error is None
            assert weights.keys() == expected.keys()
            assert all(np.array_equal(weights[name], expected[name]) for name in expected)
    rank.leave_weight_group()
    rank.leave_weight_group()
    with pytest.raises(WeightSyncFailed, match="before"):
        rank.send_weights(sent)


@pytest.mark.slow
def test_a_bucket_is_announced_before_its_broadcast_connects(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's first broadcast blocks until the engines join, once they have got the request for the bucket."""
    rank = make()
    specs, port = rank.sync.buckets(), free_port()
    broadcast = dist.broadcast

    def connecting(*arguments: Any, **options: Any) -> Any:
        end = time.monotonic() + 30
        while not notified[0].bodies:
            if time.monotonic() > end:
                raise RuntimeError("the engine got no request")
            time.sleep(0.01)
        return broadcast(*arguments, **options)

    with update_engines(1) as notified, engines(1, port, specs) as (pipe,):
        rank.join_weight_group("127.0.0.1", port, 2, "weights", 60)
        monkeypatch.setattr("orhpc.train.weights.sender.dist.broadcast", connecting)
        assert rank.send_weights(broadcast_to(notified)).failures == {}
        assert pipe.poll(60)
        assert pipe.recv()[0] is None
    rank.leave_weight_group()


@pytest.mark.slow
def test_an_engine_that_never_joins_is_a_failed_sync_within_the_deadline(
    make: Callable[..., TrainerRank],
) -> None:
    rank = make()
    started = time.monotonic()
    with pytest.raises(WeightSyncFailed, match="did not come up"):
        rank.join_weight_group("127.0.0.1", free_port(), 2, "weights", 1.0)
    assert time.monotonic() - started < 20
    rank.step(plan(0), step=1)


@pytest.mark.slow
def test_an_engine_that_dies_is_a_failed_sync(make: Callable[..., TrainerRank]) -> None:
    rank = make()
    port = free_port()
    with engines(1, port, []) as (pipe,):  # it expects no tensor, so it exits after joining
        rank.join_weight_group("127.0.0.1", port, 2, "weights", 10.0)
        assert pipe.poll(60)
    with update_engines(1) as notified, pytest.raises(WeightSyncFailed, match="did not reach"):
        rank.send_weights(broadcast_to(notified))
    rank.leave_weight_group()
    rank.step(plan(0), step=1)


def test_the_store_listens_on_the_given_address_only(make: Callable[..., TrainerRank]) -> None:
    rank = TrainerRank(make_config(), "unused", 0, 1, 1)
    port = rank.hold_port("127.0.0.1")
    assert not is_free("127.0.0.1", port)
    rank.connect("127.0.0.1", port, 30)
    listening = [
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == "LISTEN" and c.laddr.port == port
    ]
    dist.destroy_process_group()
    assert listening == ["127.0.0.1"]


@pytest.mark.slow
def test_a_missing_rank_is_an_infrastructure_failure(folder: str) -> None:
    rank = TrainerRank(make_config(ranks=2), folder, 0, 2, 1)
    with pytest.raises(InfraError, match="did not come up"):
        rank.connect("127.0.0.1", free_port(), 1.0)


# --- fetching -------------------------------------------------------------------------------------


def test_arrays_come_from_the_record_when_they_are_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read_arrays(file: str, row: int, *, routes: RouteShare | None) -> dict[str, Any]:
        asked.append((file, row))
        return {"tokens_T": np.zeros(2)}

    monkeypatch.setattr("orhpc.rundir.record.read_arrays", read_arrays)
    assert fetch_arrays(Location(file="step.h5", row=4))["tokens_T"].shape == (2,)
    assert asked == [("step.h5", 4)]


def test_arrays_that_are_nowhere_are_an_infrastructure_failure() -> None:
    with pytest.raises(RayLost, match="neither"):
        fetch_arrays(Location())


def test_the_next_micro_batch_is_loaded_while_this_one_is_worked_on() -> None:
    loaded = [threading.Event() for _ in range(3)]

    def load(i: int) -> int:
        loaded[i].set()
        return i

    seen = []
    for i in prefetched(load, range(3)):
        if i < 2:
            assert loaded[i + 1].wait(120)
        seen.append(i)
    assert seen == [0, 1, 2]


def test_a_rank_with_nothing_to_do_loads_an_empty_batch() -> None:
    def never(location: Location, *, routes: RouteShare | None) -> dict[str, Any]:
        raise AssertionError("nothing to fetch")

    assert load_batch(MicroBatch(()), never).tokens == 0
    sample = Sample("x", 2, 1, 0.0, Location())
    with pytest.raises(AssertionError):
        load_batch(MicroBatch((sample,)), never)
