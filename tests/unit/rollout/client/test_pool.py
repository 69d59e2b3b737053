"""A pool of engines: load, failures, and engines that come back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from orhpc.errors import ConfigError, EngineUnavailable, PromptTooLong, WeightSyncFailed
from orhpc.rollout.client import EnginePool
from tests.unit.rollout.client.kit import SHAPE, FakeEngine, ask, with_pool


def test_load_is_spread_and_affinity_kept() -> None:
    engines = [FakeEngine() for _ in range(4)]
    for engine in engines:
        engine.delay_s = 0.05

    async def run(pool: EnginePool) -> None:
        for turn in range(3):
            await asyncio.gather(*(ask(pool, f"{i}.{turn}", f"rollout{i}") for i in range(40)))

    with_pool(engines, run)
    for engine in engines:
        assert len(engine.requests) == 30
        rollouts = Counter(r["rid"].split(".")[0] for r in engine.requests)
        assert set(rollouts.values()) == {3}, "all turns of a rollout stay on one engine"


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "groups"), [(16, 16), (16, 4), (2, 16), (3, 5)])
def test_workers_spread_their_rollouts_over_all_engines(workers: int, groups: int) -> None:
    """Groups of 16 on 32 engines; each worker knows its own requests only, and routes are asked for."""
    engines = [FakeEngine() for _ in range(32)]
    for engine in engines:
        engine.hold = asyncio.Event()

    def pool_at(place: int) -> EnginePool:
        urls = [engine.url for engine in engines]
        return EnginePool(urls, key="k", request_timeout_s=60.0, route_shape=SHAPE, place=place)

    async def run(first: EnginePool) -> None:
        others = [pool_at(place) for place in range(1, workers)]
        pools = [first, *others]
        asked = [
            asyncio.create_task(ask(pools[group % workers], f"{group}.{i}", f"{group}.{i}", routes_start=0))
            for group in range(groups)
            for i in range(16)
        ]
        while sum(engine.running for engine in engines) < len(asked):
            await asyncio.sleep(0.01)
        for engine in engines:
            assert engine.hold is not None
            engine.hold.set()
        await asyncio.gather(*asked)
        await asyncio.gather(*(pool.close() for pool in others))

    with_pool(engines, run, route_shape=SHAPE)
    assert max(len(engine.requests) for engine in engines) <= groups * 16 // len(engines) + 1


def test_tokens_in_flight_decide_and_not_requests() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.hold = asyncio.Event()

    async def run(pool: EnginePool) -> None:
        long = asyncio.create_task(ask(pool, "long", "long", ids=(1,) * 1000))
        while not engines[0].running:
            await asyncio.sleep(0.01)
        short = [asyncio.create_task(ask(pool, f"short{i}", f"short{i}")) for i in range(6)]
        while engines[1].running < len(short):
            await asyncio.sleep(0.01)
        for engine in engines:
            assert engine.hold is not None
            engine.hold.set()
        await asyncio.gather(long, *short)

    with_pool(engines, run)
    assert [len(engine.requests) for engine in engines] == [1, 6]


def test_a_failed_request_goes_to_another_engine_with_the_same_seed() -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[0].generate_status = 500
    engines[0].healthy = False

    async def run(pool: EnginePool) -> None:
        for i in range(6):
            got = await ask(pool, f"r{i}", f"a{i}")
            assert got.tokens_N.tolist() == [9, 9, 9]
        assert list(pool.down()) == [engines[0].url]

    with_pool(engines, run)
    assert len(engines[0].requests) == 1
    assert len(engines[1].requests) == 6
    first, again = engines[0].requests[0], next(r for r in engines[1].requests if "retry" in r["rid"])
    assert again["rid"] == f"{first['rid']}-retry1"
    assert {k: v for k, v in again.items() if k != "rid"} == {k: v for k, v in first.items() if k != "rid"}


def test_an_engine_is_readmitted_only_if_healthy_and_current() -> None:
    engines = [FakeEngine(), FakeEngine()]
    sick, well = engines
    sick.generate_status, sick.healthy = 503, False

    async def served_by_sick(pool: EnginePool) -> bool:
        before = len(sick.requests)
        await asyncio.gather(*(ask(pool, f"r{i}", f"fresh{time.monotonic_ns()}{i}") for i in range(8)))
        return len(sick.requests) > before

    async def run(pool: EnginePool) -> None:
        pool.published_version = 3
        sick.version = well.version = "3"
        await served_by_sick(pool)
        assert list(pool.down()) == [sick.url]
        sick.generate_status = 200
        sick.version = "2"
        well.delay_s = 0.01
        await asyncio.sleep(0.1)
        assert not await served_by_sick(pool), "not healthy"
        sick.healthy = True
        await asyncio.sleep(0.1)
        assert not await served_by_sick(pool), "healthy, but with old weights"
        while "holds version 2, not 3" not in pool.down()[sick.url]:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="holds version 2"):
            await pool.readmit(sick.url)
        sick.version = "3"
        await pool.readmit(sick.url)
        assert not pool.down()
        assert await served_by_sick(pool)

    with_pool(engines, run)


def test_a_healthy_engine_is_readmitted_automatically() -> None:
    engine = FakeEngine()

    async def run(pool: EnginePool) -> None:
        pool.mark_down(engine.url, "maintenance")
        engine.healthy = False
        job = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.1)
        assert not job.done()
        engine.healthy = True
        await asyncio.wait_for(job, 30)

    with_pool([engine], run)


@pytest.mark.slow
def test_an_earlier_probe_does_not_take_a_readmitted_engine_down() -> None:
    """A probe that waits while the engine is readmitted would find it in the middle of a sync."""
    engine = FakeEngine()

    async def run(pool: EnginePool) -> None:
        pool.mark_down(engine.url, "it has ended")
        await pool.readmit(engine.url)
        pool.published_version = 5
        engine.version = "syncing"
        await asyncio.sleep(0.3)
        assert not pool.down()

    with_pool([engine], run, probe_interval_s=0.1)


def test_without_probes_an_engine_stays_down_until_it_is_readmitted() -> None:
    engine = FakeEngine()

    async def run(pool: EnginePool) -> None:
        pool.mark_down(engine.url, "it has missed a call")
        await asyncio.sleep(0.2)
        assert pool.down() == {engine.url: "it has missed a call"}
        await pool.readmit(engine.url)
        assert not pool.down()

    with_pool([engine], run, probes=False)


def test_an_answer_from_old_weights_is_never_used() -> None:
    """An engine is restarted with its initial weights between two requests of a run at version 5."""
    engines = [FakeEngine(), FakeEngine()]
    old, current = engines
    old.version, current.version = "0", "5"

    async def run(pool: EnginePool) -> None:
        pool.published_version = 5
        got = await asyncio.gather(*(ask(pool, f"r{i}", f"a{i}") for i in range(10)))
        assert {g.version for g in got} == {5}
        assert len(current.requests) == 10
        assert "serves version 0, not 5" in pool.down()[old.url] or "holds version 0" in pool.down()[old.url]

    with_pool(engines, run)


def test_a_request_that_waits_for_a_sync_has_the_version_that_sampled_it() -> None:
    engine = FakeEngine()
    engine.delay_s = 0.1
    engine.version = "4"

    async def run(pool: EnginePool) -> int:
        pool.published_version = 4
        job = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.05)
        engine.version = "5"
        pool.published_version = 5
        return (await job).version

    assert with_pool([engine], run) == 5


@pytest.mark.slow
def test_a_pool_fails_in_bounded_time_with_the_reason() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.generate_status, engine.healthy, engine.message = 500, False, "out of memory"

    async def run(pool: EnginePool) -> float:
        start = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"no engine came back within 0\.3 s"):
            await ask(pool)
        return time.monotonic() - start

    assert with_pool(engines, run, recovery_s=0.3) < 20


def test_the_number_of_attempts_is_limited() -> None:
    """The engine reports that it is healthy but never answers correctly."""
    engines = [FakeEngine()]
    engines[0].generate_status = 500
    with pytest.raises(EngineUnavailable, match="failed 3 times"):
        with_pool(engines, ask, retries=2)
    assert len(engines[0].requests) == 3


def test_a_request_that_every_engine_refuses_is_not_repeated() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.generate_status, engine.message = 400, "exceeds the model's maximum context length"

    async def run(pool: EnginePool) -> None:
        with pytest.raises(PromptTooLong):
            await ask(pool)
        assert not pool.down()

    with_pool(engines, run)
    assert sum(len(e.requests) for e in engines) == 1


def test_calls_reach_every_engine_with_its_own_rank() -> None:
    engines = [FakeEngine() for _ in range(3)]

    async def run(pool: EnginePool) -> None:
        await pool.pause_generation()
        offsets = dict(zip(pool.urls, (1, 3, 5), strict=True))
        await pool.init_weights_update_group(
            master_address="h", master_port=5, rank_offsets=offsets, world_size=7, group_name="g",
            backend="gloo",
        )  # fmt: skip
        await pool.continue_generation()

    with_pool(engines, run)
    assert [e.bodies["/init_weights_update_group"]["rank_offset"] for e in engines] == [1, 3, 5]
    assert all(e.calls["/pause_generation"] == 1 for e in engines)


def test_a_failed_call_is_raised_and_takes_its_engine_down() -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[1].refuse = {"/update_weights_from_disk"}
    engines[1].healthy = False

    async def run(pool: EnginePool) -> None:
        with pytest.raises(WeightSyncFailed):
            await pool.update_weights_from_disk("/m", weight_version="1")
        assert list(pool.down()) == [engines[1].url]
        with pytest.raises(EngineUnavailable, match="needs all engines"):
            await pool.init_weights_update_group(
                master_address="h", master_port=5, rank_offsets=dict.fromkeys(pool.urls, 1), world_size=3,
                group_name="g", backend="gloo",
            )  # fmt: skip
        await pool.pause_generation()

    with_pool(engines, run)
    assert engines[0].calls["/init_weights_update_group"] == 0
    assert engines[1].calls["/pause_generation"] == 0


def test_a_pool_needs_engines() -> None:
    with pytest.raises(ConfigError):
        EnginePool([], key=None, request_timeout_s=1)


@pytest.mark.slow
def test_many_concurrent_requests_are_in_flight_at_once() -> None:
    engines = [FakeEngine(), FakeEngine()]

    async def run(pool: EnginePool) -> None:
        hold = asyncio.Event()
        for engine in engines:
            engine.hold = hold
        jobs = [asyncio.create_task(ask(pool, f"r{i}", f"a{i}")) for i in range(512)]
        while sum(e.running for e in engines) < 512:
            assert not any(job.done() for job in jobs)
            await asyncio.sleep(0.01)
        assert {e.running for e in engines} == {256}
        hold.set()
        await asyncio.gather(*jobs)

    with_pool(engines, run)
