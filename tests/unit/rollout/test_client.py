"""The engine client and pool against servers that use the real protocol and fail on demand."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from orhpc.errors import (
    ConfigError,
    EngineUnavailable,
    PromptTooLong,
    RoutesMissing,
    WeightSyncFailed,
)
from orhpc.rollout.client import EngineClient, EnginePool
from orhpc.types import FinishReason, Generation, Sampling
from orhpc.wire.routes import RouteShape, encode_routes

SAMPLING = Sampling(max_new_tokens=3, seed=(1 << 31) + 5, stop_token_ids=(7,))
SHAPE = RouteShape(2, 2, 8)


class FakeEngine:
    """SGLang's protocol without a model: echoes the prompt's last id; faults can be switched on."""

    def __init__(self) -> None:
        self.version = "0"
        self.healthy = True
        self.generate_status = 200
        self.message = "broken"
        self.delay_s = 0.0
        self.hold: asyncio.Event | None = None
        self.hang_up = False
        self.change: Callable[[dict[str, Any]], None] = lambda answer: None
        self.requests: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.bodies: dict[str, Any] = {}
        self.refuse: set[str] = set()
        self.keys: set[str | None] = set()
        self.running = 0
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.keys.add(request.headers.get("Authorization"))
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.running -= 1
        if self.hang_up:
            assert request.transport is not None
            request.transport.close()
        if self.generate_status != 200:
            error = {"error": {"message": self.message}}
            return web.Response(body=orjson.dumps(error), status=self.generate_status)
        count, ids = body["sampling_params"]["max_new_tokens"], body["input_ids"]
        answer: dict[str, Any] = {
            "text": "",
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": "length", "length": count},
                "prompt_tokens": len(ids),
                "completion_tokens": count,
                "cached_tokens": 2,
                "weight_version": self.version,
                "output_token_logprobs": [(-0.5 * i, ids[-1], None) for i in range(count)],
            },
        }
        if body.get("return_routed_experts"):
            rows = len(ids) + count - 1 - body["routed_experts_start_len"]
            routes = np.tile(np.array([[0, 0], [3, 5]]), (rows, 1, 1))
            answer["meta_info"]["routed_experts"] = encode_routes(routes)
        self.change(answer)
        return web.Response(body=orjson.dumps(answer))

    async def other(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls[path] += 1
        data = await request.read()
        self.bodies[path] = orjson.loads(data) if data else None
        if path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if path in self.refuse:
            return web.json_response({"success": False, "message": "no such parameter"}, status=400)
        if path == "/model_info":
            return web.json_response({"weight_version": self.version})
        return web.json_response({"success": True, "message": "ok"})


@asynccontextmanager
async def serving(*engines: FakeEngine) -> AsyncIterator[list[str]]:
    """Run the engines; yields their URLs."""
    runners: list[web.AppRunner] = []
    try:
        for engine in engines:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_post("/generate", engine.generate)
            app.router.add_route("*", "/{path:.*}", engine.other)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
            await site.start()
            port = runner.addresses[0][1]
            engine.url = f"http://127.0.0.1:{port}"
        yield [engine.url for engine in engines]
    finally:
        for runner in runners:
            await runner.cleanup()


def with_client(engine: FakeEngine, work: Callable[[EngineClient], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with serving(engine) as (url,):
            settings = {"key": "k", "request_timeout_s": 60.0, "route_shape": SHAPE, **options}
            client = EngineClient(url, **settings)
            try:
                return await work(client)
            finally:
                await client.close()

    return asyncio.run(run())


def with_pool(engines: list[FakeEngine], work: Callable[[EnginePool], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with serving(*engines) as urls:
            settings = {
                "key": "k", "request_timeout_s": 60.0, "probe_interval_s": 0.02, "recovery_s": 30.0, **options
            }  # fmt: skip
            async with EnginePool(urls, **settings) as pool:
                return await work(pool)

    return asyncio.run(run())


def ask(pool: EnginePool, rid: str = "r", affinity: str = "a", **options: Any) -> Any:
    return pool.generate([1, 2, 9], SAMPLING, rid=rid, affinity=affinity, **options)


# --- one engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[4, 5, 6], (4, 5, 6), np.array([4, 5, 6], dtype=np.int32)])
def test_a_request_is_sglangs_and_so_is_the_answer(prompt: Any) -> None:
    engine = FakeEngine()
    engine.version = "12"
    got: Generation = with_client(engine, lambda c: c.generate(prompt, SAMPLING, rid="x"))
    (body,) = engine.requests
    assert body == {
        "rid": "x",
        "input_ids": [4, 5, 6],
        "sampling_params": {
            "max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "stop_token_ids": [7], "sampling_seed": 5,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }  # fmt: skip
    assert engine.keys == {"Bearer k"}
    assert got.tokens_N.dtype == np.int32 and got.tokens_N.tolist() == [6, 6, 6]
    assert got.logprobs_N.dtype == np.float32 and got.logprobs_N.tolist() == [0.0, -0.5, -1.0]
    assert got.finish_reason is FinishReason.LENGTH
    assert (got.version, got.prompt_tokens, got.cached_tokens, got.routes) == (12, 3, 2, None)


def test_routes_come_decoded_from_their_start() -> None:
    got: Generation = with_client(
        FakeEngine(), lambda c: c.generate([4, 5, 6], SAMPLING, rid="x", routes_start=2)
    )
    assert got.routes is not None and got.routes.dtype == np.uint8
    assert got.routes.shape == (3, 2, 2) and got.routes_start == 2
    assert got.routes[0].tolist() == [[0, 0], [3, 5]]


def test_large_routes_do_not_hold_up_the_event_loop() -> None:
    shape = RouteShape(48, 8, 128)
    rows = 4000
    wire = encode_routes(np.random.default_rng(0).integers(1, 128, (rows, 48, 8)))

    def change(answer: dict[str, Any]) -> None:
        answer["meta_info"]["routed_experts"] = wire

    engine = FakeEngine()
    engine.change = change

    async def run(client: EngineClient) -> Any:
        return await client.generate([1] * (rows - 2), SAMPLING, rid="x", routes_start=0)

    got = with_client(engine, run, route_shape=shape)
    assert got.routes.shape == (rows, 48, 8)


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        for key in keys:
            answer["meta_info"].pop(key)

    return change


def setting(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["meta_info"].update(values)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without("finish_reason"), EngineUnavailable),
        (without("output_token_logprobs"), EngineUnavailable),
        (setting(finish_reason={"type": "bored"}), EngineUnavailable),
        (setting(output_token_logprobs=[[None, 3, None]] * 3), EngineUnavailable),
        (setting(weight_version="default"), EngineUnavailable),
        (lambda answer: answer.clear(), EngineUnavailable),
        (without("routed_experts"), RoutesMissing),
        (setting(routed_experts="AAAA"), RoutesMissing),
    ],
    ids=["reason", "tokens", "unknown", "logprob", "version", "empty", "routes", "few routes"],
)
def test_answers_that_are_not_whole_are_typed(
    change: Callable[[dict[str, Any]], None], error: type[Exception]
) -> None:
    engine = FakeEngine()
    engine.change = change
    with pytest.raises(error):
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x", routes_start=0))


def test_an_abort_before_the_first_token_is_an_empty_prefix() -> None:
    engine = FakeEngine()
    engine.change = setting(
        finish_reason={"type": "abort", "message": "m"},
        completion_tokens=0,
        output_token_logprobs=[],
        routed_experts=None,
    )
    got = with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x", routes_start=0))
    assert got.finish_reason is FinishReason.ABORT
    assert len(got.tokens_N) == len(got.logprobs_N) == 0 and got.routes is None


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (500, "out of memory", EngineUnavailable),
        (503, "weights are partial", EngineUnavailable),
        (429, "busy", EngineUnavailable),
        (400, "The input (9 tokens) is longer than the model's context length (4 tokens).", PromptTooLong),
        (400, "Requested token count exceeds the model's maximum context length of 4.", PromptTooLong),
        (400, "unknown sampling parameter 'x'", ConfigError),
        (401, "Unauthorized", ConfigError),
        (404, "Not Found", ConfigError),
    ],
)
def test_refusals_are_typed_and_name_the_engine(status: int, message: str, error: type[Exception]) -> None:
    engine = FakeEngine()
    engine.generate_status, engine.message = status, message
    with pytest.raises(error) as failure:
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x"))
    assert engine.url in str(failure.value)
    if status != 401:
        assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_deadline_ends_a_generation_and_aborts_it_there() -> None:
    engine = FakeEngine()
    engine.delay_s = 30.0
    start = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="slow"), request_timeout_s=0.2)
    assert time.monotonic() - start < 20
    assert engine.bodies["/abort_request"] == {"rid": "slow"}


def test_nobody_there_is_unavailable() -> None:
    async def run() -> None:
        client = EngineClient("http://127.0.0.1:9", key=None, request_timeout_s=2)
        try:
            for call in (client.generate([1], SAMPLING, rid="x"), client.health(), client.server_info()):
                with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
                    await call
        finally:
            await client.close()

    asyncio.run(run())


def test_a_hang_up_is_unavailable() -> None:
    engine = FakeEngine()
    engine.hang_up = True
    with pytest.raises(EngineUnavailable):
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x"))


def test_routes_need_the_models_shape() -> None:
    with pytest.raises(ConfigError, match="route_shape"):
        with_client(
            FakeEngine(), lambda c: c.generate([4], SAMPLING, rid="x", routes_start=0), route_shape=None
        )


def test_control_calls_have_sglangs_bodies() -> None:
    engine = FakeEngine()

    async def run(c: EngineClient) -> None:
        await c.pause_generation("retract")
        await c.continue_generation()
        await c.flush_cache()
        await c.abort_request("r1")
        await c.release_memory_occupation(["weights"])
        await c.resume_memory_occupation()
        await c.init_weights_update_group(
            master_address="h", master_port=5, rank_offset=1, world_size=3, group_name="g", backend="gloo"
        )
        await c.update_weights_from_distributed(
            ("a",), ("bfloat16",), ((2, 3),), group_name="g", weight_version="4"
        )
        await c.update_weights_from_tensor(["xyz"], load_format="flattened_bucket")
        await c.update_weights_from_disk("/m", weight_version="5")
        await c.update_weight_version("6")
        await c.destroy_weights_update_group("g")

    with_client(engine, run)
    common = {"flush_cache": True, "abort_all_requests": False}
    assert engine.bodies == {
        "/pause_generation": {"mode": "retract"},
        "/continue_generation": {},
        "/flush_cache": {},
        "/abort_request": {"rid": "r1", "abort_all": False},
        "/release_memory_occupation": {"tags": ["weights"]},
        "/resume_memory_occupation": {},
        "/init_weights_update_group": {
            "master_address": "h", "master_port": 5, "rank_offset": 1, "world_size": 3, "group_name": "g",
            "backend": "gloo",
        },
        "/update_weights_from_distributed": {
            "names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g",
            "load_format": None, "weight_version": "4", **common,
        },
        "/update_weights_from_tensor": {
            "serialized_named_tensors": ["xyz"], "load_format": "flattened_bucket", "weight_version": None,
            **common,
        },
        "/update_weights_from_disk": {
            "model_path": "/m", "load_format": "auto", "weight_version": "5", **common,
        },
        "/update_weight_version": {"new_version": "6", "abort_all_requests": False},
        "/destroy_weights_update_group": {"group_name": "g"},
    }  # fmt: skip


def test_a_refused_update_is_a_failed_sync() -> None:
    engine = FakeEngine()
    engine.refuse = {"/update_weights_from_disk"}
    with pytest.raises(WeightSyncFailed, match="no such parameter"):
        with_client(engine, lambda c: c.update_weights_from_disk("/m"))


# --- many engines ---------------------------------------------------------------------------------


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


def test_a_failed_request_goes_to_a_sibling_with_the_same_seed() -> None:
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


def test_an_engine_comes_back_only_healthy_and_current() -> None:
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


def test_it_comes_back_by_itself() -> None:
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


def test_a_readmitted_engine_is_not_taken_down_by_a_probe_begun_before() -> None:
    """The probe that was waiting when the engine was readmitted would find it in the middle of a sync."""
    engine = FakeEngine()

    async def run(pool: EnginePool) -> None:
        pool.mark_down(engine.url, "it has ended")
        await pool.readmit(engine.url)
        pool.published_version = 5
        engine.version = "syncing"
        await asyncio.sleep(0.3)
        assert not pool.down()

    with_pool([engine], run, probe_interval_s=0.1)


def test_without_probes_an_engine_comes_back_only_by_being_readmitted() -> None:
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


def test_the_version_is_the_oldest_that_a_token_can_have() -> None:
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

    assert with_pool([engine], run) == 4


def test_a_pool_gives_up_in_bounded_time_and_says_why() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.generate_status, engine.healthy, engine.message = 500, False, "out of memory"

    async def run(pool: EnginePool) -> float:
        start = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"no engine came back within 0\.3 s"):
            await ask(pool)
        return time.monotonic() - start

    assert with_pool(engines, run, recovery_s=0.3) < 20


def test_attempts_are_bounded() -> None:
    """Engines that report that they are healthy but never answer correctly."""
    engines = [FakeEngine()]
    engines[0].generate_status = 500
    with pytest.raises(EngineUnavailable, match="failed 3 times"):
        with_pool(engines, ask, retries=2)
    assert len(engines[0].requests) == 3


def test_what_another_engine_would_refuse_too_is_not_repeated() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.generate_status, engine.message = 400, "exceeds the model's maximum context length"

    async def run(pool: EnginePool) -> None:
        with pytest.raises(PromptTooLong):
            await ask(pool)
        assert not pool.down()

    with_pool(engines, run)
    assert sum(len(e.requests) for e in engines) == 1


def test_calls_reach_every_engine_and_its_own_rank() -> None:
    engines = [FakeEngine() for _ in range(3)]

    async def run(pool: EnginePool) -> None:
        await pool.pause_generation()
        offsets = dict(zip(pool.urls, (1, 3, 5), strict=True))
        await pool.init_weights_update_group(
            master_address="h", master_port=5, rank_offsets=offsets, world_size=7, group_name="g",
            backend="gloo",
        )  # fmt: skip
        await pool.update_weights_from_distributed(
            ["a"], ["float32"], [[2]], group_name="g", weight_version="1"
        )
        await pool.continue_generation()

    with_pool(engines, run)
    assert [e.bodies["/init_weights_update_group"]["rank_offset"] for e in engines] == [1, 3, 5]
    assert all(e.calls["/pause_generation"] == 1 for e in engines)
    assert all(e.bodies["/update_weights_from_distributed"]["weight_version"] == "1" for e in engines)


def test_a_failed_call_takes_its_engine_down_and_is_raised() -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[1].refuse = {"/update_weights_from_disk"}
    engines[1].healthy = False

    async def run(pool: EnginePool) -> None:
        with pytest.raises(WeightSyncFailed):
            await pool.update_weights_from_disk("/m", weight_version="1")
        assert list(pool.down()) == [engines[1].url]
        with pytest.raises(EngineUnavailable, match="needs all engines"):
            await pool.update_weights_from_distributed(["a"], ["float32"], [[2]], group_name="g")
        await pool.pause_generation()

    with_pool(engines, run)
    assert engines[0].calls["/update_weights_from_distributed"] == 0
    assert engines[1].calls["/pause_generation"] == 0


def test_a_pool_needs_engines() -> None:
    with pytest.raises(ConfigError):
        EnginePool([], key=None, request_timeout_s=1)


def test_many_concurrent_requests_are_all_in_flight() -> None:
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
