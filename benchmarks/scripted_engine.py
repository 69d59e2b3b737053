"""A scripted engine: answers ``/generate`` in SGLang's protocol with the same tokens every time.

It runs in a separate process, started by :class:`Engine`; see ``benchmarks/agent_loop.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from orhpc.process.ports import free_ports


async def answer_forever(
    port: int, generate: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
) -> None:
    """Answer every request on this port of loopback until killed."""
    runner = web.ServerRunner(web.Server(generate))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=2048).start()
    await asyncio.Event().wait()


def serve(port: int, low: float, high: float, turns: int, call: list[int], answer: list[int]) -> None:
    """Answer requests until killed; the turn is read from the request id, the last one gets ``answer``."""

    def body(ids: list[int]) -> bytes:
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            "completion_tokens": len(ids),
            "prompt_tokens": 1,
            "cached_tokens": 0,
            "weight_version": "0",
        }
        return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()

    call_body, answer_body = body(call), body(answer)

    async def generate(request: web.BaseRequest) -> web.Response:
        data = await request.read()
        rid = data[data.index(b'"rid":"') + 7 :].split(b'"', 1)[0].decode()
        if high:
            await asyncio.sleep(random.Random(rid).uniform(low, high))
        last = int(rid.split(".")[3]) == turns - 1
        return web.Response(body=answer_body if last else call_body, content_type="application/json")

    asyncio.run(answer_forever(port, generate))


class Engine:
    """The engine's process."""

    def __init__(self, low: float, high: float, turns: int, call: list[int], answer: list[int]) -> None:
        (port,) = free_ports(1, "127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        options = {"port": port, "low": low, "high": high, "turns": turns, "call": call, "answer": answer}
        self._process = subprocess.Popen([sys.executable, __file__, json.dumps(options)])

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                if (code := self._process.poll()) is not None:
                    raise RuntimeError(f"the engine ended with code {code}")
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(self.url + "/generate", data=b'{"rid":"x.0.0.0"}') as response:
                        await response.read()
                        return
                await asyncio.sleep(0.1)
        raise RuntimeError("the engine did not come up")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
