"""Ranks make the engines' requests themselves; whatever fails between two buckets, all ranks stop in time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from orhpc.errors import InfraError, OrhpcError, OutOfMemory, WeightSyncFailed
from orhpc.process.secrets import REDACTED, redact
from orhpc.train.actor import TrainerRank
from orhpc.train.weights import rank_sync, sender
from orhpc.train.weights.sender import BucketStage
from orhpc.train.weights.update_requests import Receiver, SyncPlan
from tests.trainer_kit import free_port, make_config, plan, ranks_of, run_ranks, save_tiny_model
from tests.unit.train.test_actor_weights import engines as receivers
from tests.update_engine import KEY, UpdateEngine, array_of, update_engines

pytestmark = pytest.mark.slow

BUCKET_BYTES = 20_000
GROUP = "weights"


def mapping(url: str, *ranks: int) -> Receiver:
    return Receiver(url, ranks, maps_memory=True, fields={})


def receiving(url: str, rank: int) -> Receiver:
    return Receiver(url, (rank,), maps_memory=False, fields={"selector": "target"})


def sync_plan(*engines: Receiver, timeout_s: float = 60.0, key: str | None = KEY) -> SyncPlan:
    return SyncPlan(engines, GROUP, timeout_s, key)


def exported(rank: TrainerRank) -> dict[str, Any]:
    return {name: array_of(t) for name, t in rank.backend.export(rank.backend.parameter_shapes())}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def engine() -> Iterator[UpdateEngine]:
    with update_engines(1) as (one,):
        yield one


@pytest.fixture
def rank(make: Callable[..., TrainerRank]) -> TrainerRank:
    one = make()
    one.sync._bucket_bytes = BUCKET_BYTES
    assert len(one.sync.buckets()) > 3
    return one


# --- one rank ---------------------------------------------------------------------------------------


def test_an_engine_that_maps_memory_gets_every_bucket(rank: TrainerRank, engine: UpdateEngine) -> None:
    for step in (1, 2):  # the second sync uses the same slots
        rank.step(plan(step), step=step)
        engine.forget()
        report = rank.send_weights(sync_plan(mapping(engine.url, 0)))
        assert report.failures == {}
        assert report.seconds.gather > 0
        assert report.nbytes == sum(spec.nbytes for spec in rank.sync.buckets())
        assert_same(engine.weights(), exported(rank))
        assert rank.sync_progress() == step * (1 + len(rank.sync.buckets()))
    body = json.loads(engine.bodies[0])
    assert {**body, "serialized_named_tensors": len(body["serialized_named_tensors"])} == {
        "serialized_named_tensors": 1, "load_format": "flattened_bucket", "flush_cache": False,
        "abort_all_requests": False, "weight_version": None,
    }  # fmt: skip


@pytest.mark.parametrize("limit", [1_000, 4_000, 16_000])
def test_an_engine_gets_what_it_joins_in_one_request(
    limit: int, engine: UpdateEngine, tmp_path: Path
) -> None:
    """Of a model with latent attention, of which the engine drops what arrives without its other half."""
    with ranks_of(save_tiny_model(tmp_path / "latent", "deepseek_v3")) as make:
        rank = make()
        rank.sync._bucket_bytes = limit
        rank.send_weights(sync_plan(mapping(engine.url, 0)))
        assert len(engine.mapped) > 3
        assert_same(engine.weights(), exported(rank))


@pytest.mark.parametrize(
    ("failure", "message"),
    [("dies", "isconnect"), ("500", "the scheduler has ended"), ("refuses", "no such")],
)
@pytest.mark.parametrize("at", [0, 1, -1])
def test_an_engine_that_fails_at_a_bucket_is_reported(
    rank: TrainerRank, engine: UpdateEngine, failure: str, message: str, at: int
) -> None:
    at %= len(rank.sync.buckets())
    engine.fails_at, engine.failure = at, failure
    report = rank.send_weights(sync_plan(mapping(engine.url, 0)))
    assert list(report.failures) == [engine.url]
    assert message in report.failures[engine.url]
    assert len(engine.bodies) == at + 1, "it got more after it had failed"
    engine.forget()
    assert rank.send_weights(sync_plan(mapping(engine.url, 0))).failures == {}
    assert_same(engine.weights(), exported(rank))


def test_a_wrong_key_is_reported_and_not_shown(rank: TrainerRank, engine: UpdateEngine) -> None:
    wrong = "not-the-key-of-the-engines"
    sent = sync_plan(mapping(engine.url, 0), key=wrong)
    report = rank.send_weights(sent)
    assert report.failures == {engine.url: f"engine {engine.url} refuses the key"}
    assert wrong not in repr((sent, report))
    assert redact(f"Bearer {wrong}") == f"Bearer {REDACTED}", "the rank's log would show it"
    assert engine.bodies == []


def test_an_engine_that_does_not_answer_is_a_failure_after_the_deadline(rank: TrainerRank) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        report = rank.send_weights(sync_plan(mapping(url, 0), timeout_s=1.0))
    assert "did not answer within 1 s" in report.failures[url]
    assert time.monotonic() - began < 20


def test_weights_cannot_be_broadcast_without_a_group(rank: TrainerRank, engine: UpdateEngine) -> None:
    with pytest.raises(WeightSyncFailed, match="before"):
        rank.send_weights(sync_plan(receiving(engine.url, 0)))
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("place", "error"),
    [("_place", MemoryError("Cannot allocate memory")), ("_slot", torch.OutOfMemoryError("no memory")),
     ("_slot", RuntimeError("CUDA error: out of memory"))],
)  # fmt: skip
def test_running_out_of_memory_is_reported_as_such(
    rank: TrainerRank,
    engine: UpdateEngine,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: Exception,
) -> None:
    """To repeat the sync in the same memory would fail again."""

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        if place == "_slot":
            patch.setattr(sender, "shared_bucket", fails)
        else:
            patch.setattr(BucketStage, place, fails)
        with pytest.raises(OutOfMemory):
            rank.send_weights(sync_plan(mapping(engine.url, 0)))
    assert rank.send_weights(sync_plan(mapping(engine.url, 0))).failures == {}
    assert_same(engine.weights(), exported(rank))


# --- two ranks --------------------------------------------------------------------------------------


def _connected(rank: int, world: int, port: int, folder: str) -> TrainerRank:
    trainer = TrainerRank(make_config(ranks=world), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    trainer.sync._bucket_bytes = BUCKET_BYTES
    return trainer


def _sent(rank: int, world: int, port: int, folder: str, plans: list[SyncPlan]) -> Any:
    trainer = _connected(rank, world, port, folder)
    return exported(trainer), [trainer.send_weights(one) for one in plans]


@pytest.mark.slow
def test_an_engine_maps_the_memory_of_all_its_ranks(folder: str) -> None:
    """Its second rank's handle reaches the rank that makes the requests, in the order of the plan."""
    with update_engines(1) as (engine,):
        (expected, [first]), (_, [second]) = run_ranks(
            _sent, 2, folder, [sync_plan(mapping(engine.url, 1, 0))]
        )
        assert (first.failures, second.failures) == ({}, {})
        for place in (0, 1):
            assert_same(engine.weights(place), expected)
        body = json.loads(engine.bodies[0])
        assert len(set(body["serialized_named_tensors"])) == 2


@pytest.mark.slow
def test_an_engine_that_dies_between_two_buckets_ends_the_sync_of_all_ranks(folder: str) -> None:
    with update_engines(2) as (good, bad):
        bad.fails_at, bad.failure = 1, "dies"
        sent = sync_plan(mapping(good.url, 0), mapping(bad.url, 1))
        (expected, first), (_, second) = run_ranks(_sent, 2, folder, [sent, sent])
        assert [list(report.failures) for report in (*first, *second)] == [[], [], [bad.url], []]
        buckets = len(good.bodies) - 2
        assert buckets > 2
        assert_same(good.weights(), expected)
        assert_same({k: v for parts in bad.mapped[1:] for k, v in parts[0].items()}, expected)


def _sent_by_broadcast(
    rank: int, world: int, port: int, folder: str, group_port: int, count: int, one: SyncPlan
) -> Any:
    trainer = _connected(rank, world, port, folder)
    trainer.join_weight_group("127.0.0.1", group_port, 1 + count, GROUP, 60)
    report = trainer.send_weights(one)
    trainer.leave_weight_group()
    return exported(trainer), report, trainer.sync.buckets()


@pytest.mark.slow
def test_ranks_share_the_requests_of_engines_that_receive_broadcasts(
    folder: str, make: Callable[..., TrainerRank]
) -> None:
    rank, group_port = make(), free_port()
    rank.sync._bucket_bytes = BUCKET_BYTES
    with update_engines(4) as engines, receivers(4, group_port, rank.sync.buckets()) as pipes:
        sent = sync_plan(*(receiving(engine.url, n // 2) for n, engine in enumerate(engines)))
        results = run_ranks(_sent_by_broadcast, 2, folder, group_port, 4, sent)
        expected, _, buckets = results[0]
        for pipe in pipes:
            assert pipe.poll(60)
            error, weights = pipe.recv()
            assert error is None
            assert_same(weights, expected)
    assert all(report.failures == {} for _, report, _ in results)
    assert all(engine.bodies == engines[0].bodies for engine in engines)
    bodies = [json.loads(body) for body in engines[0].bodies]
    assert [tuple(body["names"]) for body in bodies] == [spec.names for spec in buckets]
    assert {key: bodies[0][key] for key in bodies[0].keys() - {"names", "dtypes", "shapes"}} == {
        "group_name": GROUP, "load_format": "flattened_bucket", "flush_cache": False,
        "abort_all_requests": False, "weight_version": None, "selector": "target",
    }  # fmt: skip


def _fails_at_a_bucket(
    rank: int, world: int, port: int, folder: str, out: str, how: str, engines: SyncPlan
) -> Any:
    """Rank 1 fails after it has gathered its third bucket; returns the error of each rank and its seconds."""
    trainer = _connected(rank, world, port, folder)
    handle = BucketStage.handle

    def failing(self: BucketStage, index: int) -> str:
        if index == 2:
            if how == "dies":
                # torch's child has inherited the pipe of the results.
                for child in psutil.Process().children():
                    child.kill()
                os._exit(1)
            if how == "hangs":
                time.sleep(6.0)
            if how == "raises":
                raise WeightSyncFailed("no memory for a bucket")
        return handle(self, index)

    rank_sync._MARGIN_S = 0.5  # type: ignore[misc]
    if rank == 1:
        BucketStage.handle = failing  # type: ignore[method-assign]
    began, error = time.monotonic(), None
    try:
        trainer.send_weights(engines)
    except OrhpcError as raised:
        error = f"{type(raised).__name__}: {raised}"
    took = time.monotonic() - began
    Path(out, str(rank)).write_text(json.dumps([error, took]))
    if how == "raises":
        BucketStage.handle = handle  # type: ignore[method-assign]
        assert trainer.send_weights(engines).failures == {}
    return error, took


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs", "raises"])
def test_a_rank_that_fails_between_two_buckets_does_not_keep_the_others(
    folder: str, tmp_path: Path, how: str
) -> None:
    with update_engines(1) as (engine,):
        sent = sync_plan(mapping(engine.url, 0, 1), timeout_s=2.0)
        with pytest.raises(AssertionError) if how == "dies" else contextlib.nullcontext():
            run_ranks(_fails_at_a_bucket, 2, folder, str(tmp_path), how, sent)
        error, took = json.loads((tmp_path / "0").read_text())
        assert took < 6
        if how == "raises":
            assert error is None
            assert json.loads((tmp_path / "1").read_text())[0] == "WeightSyncFailed: no memory for a bucket"
        else:
            assert error.startswith(InfraError.__name__), error
            assert len(engine.bodies) == 2
