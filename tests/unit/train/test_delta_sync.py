"""Trainer ranks send a real engine only what has changed, and it then holds their weights bit for bit."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orhpc.errors import WeightSyncFailed
from orhpc.rollout.client import EngineClient
from orhpc.rollout.engines.process import EngineProcess
from orhpc.train.actor import TrainerRank
from orhpc.train.weights.buckets import BucketSpec
from orhpc.train.weights.deltas import WHOLE_SYNCS, SentBuckets, delta_spec, with_header
from orhpc.train.weights.update_requests import Receiver, SyncPlan, SyncReport, UpdateRequests
from orhpc.wire.engine_requests import EngineRequests
from orhpc.wire.weight_deltas import HEADER, HEADER_BYTES, NEEDS_WHOLE
from tests.trainer_kit import free_port, make_config, plan, run_ranks
from tests.update_engine import KEY, array_of, update_engines

GROUP = "weights"
BUCKET_BYTES = 6_000
SMALL = {"lr": 1e-6}
"""Of reinforcement learning: few weights change in bfloat16."""


@pytest.fixture(scope="module")
def engine(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    config = make_config(dtype="bfloat16", engine={"max_running": 4, "threads": 1})
    process = EngineProcess(config, folder, "127.0.0.1", free_port(), KEY, str(log), 0, threads=1)
    process.start()
    try:
        asyncio.run(process.wait_ready(240.0))
        yield process
    finally:
        process.stop()


@pytest.fixture
def sender(make: Callable[..., TrainerRank]) -> TrainerRank:
    rank = make(dtype="bfloat16", train=SMALL)
    rank.sync._bucket_bytes = BUCKET_BYTES
    return rank


def ask(engine: EngineProcess, call: Callable[[EngineClient], Any]) -> Any:
    async def run() -> Any:
        client = EngineClient(engine.url, key=KEY, request_timeout_s=60.0)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def joining(engine: EngineProcess, port: int) -> Callable[[], None]:
    """The engine's part of forming a group."""
    return lambda: ask(
        engine,
        lambda c: c.init_weights_update_group(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=GROUP,
            backend="gloo",
        ),
    )  # fmt: skip


def join(rank: TrainerRank, engine: EngineProcess) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(joining(engine, port))
        rank.join_weight_group("127.0.0.1", port, 2, GROUP, 60)
        answer.result()


def leave(rank: TrainerRank, engine: EngineProcess) -> None:
    rank.leave_weight_group()
    ask(engine, lambda c: c.destroy_weights_update_group(GROUP))


def sync_plan(engine: EngineProcess, rank: int = 0, *, deltas: bool = True) -> SyncPlan:
    receiver = Receiver(engine.url, (rank,), maps_memory=False, fields={})
    return SyncPlan((receiver,), GROUP, 60.0, KEY, deltas=deltas)


def sums(rank: TrainerRank, engine: EngineProcess, tmp_path: Path) -> tuple[Any, Any]:
    """The engine's checksums as it is, and after it has loaded an export."""
    sent, folder = ask(engine, lambda c: c.weight_checksums()), tmp_path / uuid.uuid4().hex
    rank.export_hf(str(folder), for_engines=True)
    ask(engine, lambda c: c.update_weights_from_disk(str(folder), flush_cache=False))
    return sent, ask(engine, lambda c: c.weight_checksums())


def assert_equal(rank: TrainerRank, engine: EngineProcess, tmp_path: Path) -> None:
    sent, exported = sums(rank, engine, tmp_path)
    assert sent == exported


def send(rank: TrainerRank, engine: EngineProcess, version: int, **options: Any) -> SyncReport:
    """One step and the sync after it."""
    rank.step(plan(version), step=version)
    report = rank.send_weights(sync_plan(engine, **options))
    assert report.failures == {}
    ask(engine, lambda c: c.update_weight_version(str(version)))
    return report


@pytest.mark.slow
def test_an_engine_is_sent_what_has_changed(
    sender: TrainerRank, engine: EngineProcess, tmp_path: Path
) -> None:
    join(sender, engine)
    try:
        whole = sum(spec.nbytes for spec in sender.sync.buckets(deltas=True))
        sizes = []
        for version in range(1, WHOLE_SYNCS + 4):
            sizes.append(send(sender, engine, version).nbytes)
            assert_equal(sender, engine, tmp_path)
        assert sizes[:WHOLE_SYNCS] == [whole] * WHOLE_SYNCS
        assert all(0 < size < whole / 4 for size in sizes[WHOLE_SYNCS:]), (sizes, whole)
    finally:
        leave(sender, engine)
    join(sender, engine)  # as after an engine's restart
    try:
        assert send(sender, engine, 10).nbytes == whole
        assert send(sender, engine, 11).nbytes == whole
        assert send(sender, engine, 12).nbytes < whole / 4
        assert_equal(sender, engine, tmp_path)
    finally:
        leave(sender, engine)


@pytest.mark.slow
def test_a_bucket_of_which_an_engine_refuses_the_delta_is_sent_whole(
    sender: TrainerRank, engine: EngineProcess, tmp_path: Path
) -> None:
    specs = sender.sync.buckets(deltas=True)
    assert len(specs) > 4
    join(sender, engine)
    try:
        for version in (1, 2):
            send(sender, engine, version)
        deltas = sender.sync._deltas
        assert deltas is not None
        for bucket in (0, 2, len(specs) - 1):  # two of them have their turn in the same slot
            deltas._versions[bucket] = 5  # contents that the engine does not have
        refused = sum(specs[bucket].nbytes for bucket in (0, 2, len(specs) - 1))
        report = send(sender, engine, 3)
        assert refused < report.nbytes < refused + sum(spec.nbytes for spec in specs) / 4
        assert_equal(sender, engine, tmp_path)
        assert refused < send(sender, engine, 4).nbytes < report.nbytes, "they were not sent as deltas first"
        assert_equal(sender, engine, tmp_path)
    finally:
        leave(sender, engine)


def test_a_bucket_of_which_most_has_changed_is_sent_whole() -> None:
    spec = with_header(BucketSpec(("a",), ("int16",), ((1000,),), ()))
    buckets = SentBuckets([spec], torch.device("cpu"), 0)
    bucket = torch.zeros(spec.nbytes, dtype=torch.uint8)
    for _ in range(WHOLE_SYNCS):
        buckets.begin()
        assert buckets.keep(0, bucket) is None
        buckets.sent(0)
        buckets.end()
    unchanged = buckets.keep(0, bucket)
    assert unchanged is not None and unchanged.values.numel() == 0
    bucket[HEADER_BYTES:-1000] = 1
    half = buckets.keep(0, bucket)
    assert half is not None and (half.values.numel(), half.distances.element_size()) == (500, 1)
    bucket[:] = 2
    assert buckets.keep(0, bucket) is None


@pytest.mark.slow
def test_after_a_sync_that_failed_everything_is_sent_whole(
    sender: TrainerRank, engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(sender, engine)
    try:
        whole = sum(spec.nbytes for spec in sender.sync.buckets(deltas=True))
        for version in (1, 2, 3):
            report = send(sender, engine, version)
        assert report.nbytes < whole

        def fails(self: SentBuckets, bucket: int, delta: Any) -> Any:
            if bucket == 2:
                raise WeightSyncFailed("no memory")
            return real(self, bucket, delta)

        real = SentBuckets.message
        with monkeypatch.context() as patch:
            patch.setattr(SentBuckets, "message", fails)
            with pytest.raises(WeightSyncFailed, match="no memory"):
                sender.send_weights(sync_plan(engine))
        assert send(sender, engine, 4).nbytes == whole
        assert_equal(sender, engine, tmp_path)
    finally:
        leave(sender, engine)


def test_a_refusal_is_a_failure_unless_it_is_the_answer_to_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: Any) -> None:
        raise WeightSyncFailed(f"engine: {NEEDS_WHOLE}: other contents")

    monkeypatch.setattr(EngineRequests, "transfer", refuses)
    whole = with_header(BucketSpec(("a",), ("bfloat16",), ((9,),), ("a",)))
    for spec, maps, refused in (
        (delta_spec(3, 1), False, True),
        (whole, False, False),
        (delta_spec(3, 1), True, False),
    ):
        receiver = Receiver("http://127.0.0.1:9", (0,), maps_memory=maps, fields={})
        requests = UpdateRequests(SyncPlan((receiver,), GROUP, 60.0, KEY, deltas=True), 0)
        try:
            requests.start(3, spec, {receiver.url: ["handle"]})
            assert bool(requests.wait()) is not refused
            assert list(requests.refused) == ([3] if refused else [])
        finally:
            requests.close()


def test_a_refused_bucket_is_tried_once_more_after_whole_syncs() -> None:
    spec = with_header(BucketSpec(("a",), ("bfloat16",), ((9,),), ("a",)))
    buckets = SentBuckets([spec] * 2, torch.device("cpu"), 0)
    contents = torch.zeros(spec.nbytes, dtype=torch.uint8)
    deltas = []
    for _ in range(12):
        buckets.begin()
        sent = [buckets.keep(bucket, contents) is not None for bucket in (0, 1)]
        for bucket in (0, 1):
            buckets.sent(bucket)
        if sent[1]:
            buckets.refused([1])
            assert buckets.keep(1, contents) is None
        buckets.end()
        deltas.append(sent)
    assert [one for one, _ in deltas] == [False] * WHOLE_SYNCS + [True] * (12 - WHOLE_SYNCS)
    tries = [sync for sync, (_, other) in enumerate(deltas) if other]
    assert tries == [WHOLE_SYNCS, 2 * WHOLE_SYNCS + 1]


def test_buckets_of_an_odd_number_of_bytes_are_kept() -> None:
    specs = [with_header(BucketSpec(("a",), ("uint8",), ((9,),), ())) for _ in range(3)]
    buckets = SentBuckets(specs, torch.device("cpu"), 0)
    for value in range(4):
        buckets.begin()
        for bucket, spec in enumerate(specs):
            contents = torch.full((spec.nbytes,), 7, dtype=torch.uint8)
            contents[HEADER_BYTES + bucket] = value
            delta = buckets.keep(bucket, contents)
            buckets.sent(bucket)
            assert (delta is not None) == (value >= WHOLE_SYNCS)
            if delta is not None:
                assert delta.values.numel() == 1
        buckets.end()


@pytest.mark.slow
def test_engines_that_map_memory_get_whole_buckets_in_the_same_sync(
    sender: TrainerRank, engine: EngineProcess, tmp_path: Path
) -> None:
    join(sender, engine)
    try:
        with update_engines(1) as (mapping,):
            (receiving,) = sync_plan(engine).receivers
            mapped = Receiver(mapping.url, (0,), maps_memory=True, fields={})
            sent = SyncPlan((receiving, mapped), GROUP, 60.0, KEY, deltas=True)
            for version in range(1, WHOLE_SYNCS + 3):
                sender.step(plan(version), step=version)
                mapping.forget()
                report = sender.send_weights(sent)
                assert report.failures == {}
                ask(engine, lambda c, version=version: c.update_weight_version(str(version)))
            assert report.nbytes < sum(spec.nbytes for spec in sender.sync.buckets(deltas=True)) / 4
            weights = mapping.weights()
        assert weights.pop(HEADER) is not None
        exported = sender.backend.export(sender.backend.parameter_shapes())
        assert all(np.array_equal(weights.pop(name), array_of(tensor)) for name, tensor in exported)
        assert weights == {}
        assert_equal(sender, engine, tmp_path)
    finally:
        leave(sender, engine)


def _two_ranks(rank: int, world: int, port: int, folder: str, url: str, group_port: int, out: str) -> Any:
    """Rank 0 broadcasts, and rank 1 makes the engine's requests, of which it knows only by rank 0."""
    trainer = TrainerRank(make_config(ranks=world, dtype="bfloat16", train=SMALL), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    trainer.sync._bucket_bytes = BUCKET_BYTES
    trainer.join_weight_group("127.0.0.1", group_port, 2, GROUP, 60)
    receiver = Receiver(url, (1,), maps_memory=False, fields={})
    sent = SyncPlan((receiver,), GROUP, 60.0, KEY, deltas=True)
    sizes = []
    for step in range(1, WHOLE_SYNCS + 3):
        trainer.step(plan(step, ranks=world), step=step)
        report = trainer.send_weights(sent)
        assert report.failures == {}
        sizes.append(report.nbytes)
    trainer.export_hf(f"{out}/export", for_engines=True)
    trainer.leave_weight_group()
    return sizes


@pytest.mark.slow
def test_all_ranks_announce_what_rank_0_sends(folder: str, engine: EngineProcess, tmp_path: Path) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(joining(engine, port))
        first, second = run_ranks(_two_ranks, 2, folder, engine.url, port, str(tmp_path))
        answer.result()
    ask(engine, lambda c: c.destroy_weights_update_group(GROUP))
    assert first == second
    assert np.diff(first)[: WHOLE_SYNCS - 1].tolist() == [0] * (WHOLE_SYNCS - 1)
    assert max(first[WHOLE_SYNCS:]) < first[0] / 4
    sent = ask(engine, lambda c: c.weight_checksums())
    ask(engine, lambda c: c.update_weights_from_disk(str(tmp_path / "export"), flush_cache=False))
    assert sent == ask(engine, lambda c: c.weight_checksums())
