"""Engine servers that use the real protocol and fail on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from orhpc.rollout.client import EngineClient, EnginePool
from orhpc.types import Sampling
from orhpc.wire.routes import RouteShape, encode_routes

SAMPLING = Sampling(max_new_tokens=3, seed=(1 << 31) + 5, stop_token_ids=(7,))
SHAPE = RouteShape(2, 2, 8)


class FakeEngine:
    """A server with SGLang's protocol and no model; it repeats the prompt's last id and fails on demand."""

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
    """Run the engines and yield their URLs."""
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


def ask(
    pool: EnginePool, rid: str = "r", affinity: str = "a", ids: tuple[int, ...] = (1, 2, 9), **options: Any
) -> Any:
    return pool.generate(ids, SAMPLING, rid=rid, affinity=affinity, **options)
