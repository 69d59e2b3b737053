"""Requests through a router: what the router receives, and failures of the router or an engine behind it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
from aiohttp import web

from orhpc.config import Config
from orhpc.errors import ConfigError
from orhpc.process.ports import free_ports
from orhpc.rollout.client import EnginePool
from orhpc.rollout.engines import sglang_router
from orhpc.rollout.engines.sglang_router import RouterProcess, router_wanted
from orhpc.types import Generation, Sampling
from orhpc.wire.routes import RouteShape, encode_routes

KEY = "key-of-the-router-tests"
SAMPLING = Sampling(max_new_tokens=2, seed=5)


class Endpoint:
    """An engine or a router with SGLang's protocol; records its requests."""

    def __init__(self) -> None:
        self.version, self.status = "3", 200
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.requests.append((body, {k.lower(): v for k, v in request.headers.items()}))
        meta = {
            "id": body["rid"], "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3,
            "completion_tokens": 2, "cached_tokens": 0, "weight_version": self.version,
            "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
        }  # fmt: skip
        if body.get("return_routed_experts"):
            meta["routed_experts"] = encode_routes(np.tile(np.array([[0, 1], [2, 3]]), (4, 1, 1)))
        return web.Response(body=orjson.dumps({"text": "", "meta_info": meta}), status=self.status)

    async def other(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/model", "weight_version": self.version})


def run(endpoints: list[Endpoint], work: Callable[[], Awaitable[Any]]) -> Any:
    async def inner() -> Any:
        runners = []
        try:
            for endpoint in endpoints:
                app = web.Application()
                app.router.add_post("/generate", endpoint.generate)
                app.router.add_route("*", "/{path:.*}", endpoint.other)
                runner = web.AppRunner(app, access_log=None)
                await runner.setup()
                runners.append(runner)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return await work()
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(inner())


def with_pool(
    engines: list[Endpoint], router: Endpoint, work: Callable[[EnginePool], Awaitable[Any]]
) -> None:
    async def inner() -> None:
        urls = [e.url for e in engines]
        pool = EnginePool(
            urls, key=KEY, request_timeout_s=30.0, router=router.url, route_shape=RouteShape(2, 2, 8)
        )
        async with pool:
            pool.published_version = 3
            await work(pool)

    run([*engines, router], inner)


async def ask(pool: EnginePool, name: str, **options: Any) -> Generation:
    return await pool.generate([1, 2, 4], SAMPLING, rid=name, affinity=name.split(".")[0], **options)


def test_requests_go_to_the_router_and_name_their_rollout() -> None:
    engine, router = Endpoint(), Endpoint()

    async def work(pool: EnginePool) -> None:
        got = await asyncio.gather(*(ask(pool, f"rollout{i}.{turn}") for i in range(3) for turn in range(2)))
        assert {g.version for g in got} == {3}

    with_pool([engine], router, work)
    assert not engine.requests
    keys = Counter(headers["x-smg-routing-key"] for _, headers in router.requests)
    assert keys == {f"rollout{i}": 2 for i in range(3)}
    assert {headers["authorization"] for _, headers in router.requests} == {f"Bearer {KEY}"}


def test_a_failed_router_is_bypassed_and_engines_receive_the_same_seed() -> None:
    engines, router = [Endpoint(), Endpoint()], Endpoint()
    router.status = 503

    async def work(pool: EnginePool) -> None:
        for i in range(4):
            assert (await ask(pool, f"r{i}")).tokens_N.tolist() == [8, 9]
        assert not pool.down()

    with_pool(engines, router, work)
    assert len(router.requests) == 1
    asked = [body for engine in engines for body, _ in engine.requests]
    assert sorted(body["rid"] for body in asked) == ["r0-direct", "r1", "r2", "r3"]
    assert {body["sampling_params"]["sampling_seed"] for body in asked} == {5}


def test_an_answer_from_old_weights_is_requested_again_from_a_current_engine() -> None:
    engine, router = Endpoint(), Endpoint()
    router.version = "2"

    async def work(pool: EnginePool) -> None:
        for i in range(2):
            assert (await ask(pool, f"r{i}")).version == 3

    with_pool([engine], router, work)
    assert len(router.requests) == len(engine.requests) == 2


def test_requests_for_routes_go_to_engines() -> None:
    engine, router = Endpoint(), Endpoint()

    async def work(pool: EnginePool) -> None:
        assert (await ask(pool, "r", routes_start=0)).routes is not None

    with_pool([engine], router, work)
    assert not router.requests


# --- whether a router is used -----------------------------------------------------------------------


def config(*, routes: bool = False, **engine: Any) -> Config:
    return Config.model_validate(
        {
            "engine": {"tp": 1, **engine},
            "rollout": {"record_routes": routes},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )


@pytest.mark.parametrize("installed", [True, False])
def test_the_router_is_used_if_it_is_installed_and_useful(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    found = object() if installed else None
    monkeypatch.setattr(sglang_router.importlib.util, "find_spec", lambda _name: found)
    assert router_wanted(config(), 2) is installed
    assert not router_wanted(config(), 1)
    assert not router_wanted(config(router=False), 2)
    assert not router_wanted(config(routes=True), 2)
    if installed:
        assert router_wanted(config(router=True), 2)
    else:
        with pytest.raises(ConfigError, match="not installed"):
            router_wanted(config(router=True), 2)


def test_the_router_cannot_be_combined_with_recorded_routes() -> None:
    with pytest.raises(ValueError, match="drops the expert routes"):
        config(routes=True, router=True)


@pytest.mark.slow
def test_the_real_router_spreads_rollouts_and_keeps_each_on_one_engine(tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    engines = [Endpoint() for _ in range(3)]

    async def work() -> None:
        urls, (port,) = [e.url for e in engines], free_ports(1, "127.0.0.1")
        process = RouterProcess(urls, "127.0.0.1", port, KEY, str(tmp_path / "router.log"), 30.0)
        await asyncio.to_thread(process.start)
        try:
            await process.wait_ready(60.0)
            assert process.pid is not None
            assert not any(KEY in word for word in psutil.Process(process.pid).cmdline())
            async with EnginePool(urls, key=KEY, request_timeout_s=30.0, router=process.url) as pool:
                pool.published_version = 3
                end = time.monotonic() + 30.0
                while not all(e.requests for e in engines):  # the router adds engines one by one
                    await asyncio.gather(*(ask(pool, f"first{time.monotonic_ns()}{i}") for i in range(9)))
                    assert time.monotonic() < end
                for engine in engines:
                    engine.requests.clear()
                for turn in range(3):
                    await asyncio.gather(*(ask(pool, f"rollout{i}.{turn}") for i in range(30)))
        finally:
            await asyncio.to_thread(process.stop, 2.0)
        assert not process.alive()
        assert KEY not in (tmp_path / "router.log").read_text()

    run(engines, work)
    homes: dict[str, set[int]] = {}
    for number, engine in enumerate(engines):
        for body, headers in engine.requests:
            assert headers["authorization"] == f"Bearer {KEY}"
            assert body["input_ids"] == [1, 2, 4] and body["sampling_params"]["sampling_seed"] == 5
            homes.setdefault(body["rid"].split(".")[0], set()).add(number)
    assert len(homes) == 30
    assert all(len(home) == 1 for home in homes.values())
    assert {number for home in homes.values() for number in home} == {0, 1, 2}
