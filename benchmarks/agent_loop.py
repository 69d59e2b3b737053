"""The agent loop against a raw HTTP client on the same scripted engine, and its CPU time per turn.

    python benchmarks/agent_loop.py [--concurrent 512] [--latency 1.0 3.0] [--repeats 3]

The engine is a separate process that answers ``/generate`` in SGLang's protocol, after a latency drawn by
request id (the same for both sides) or at once.  The environment runs in this process, so that only the loop
is measured.  The raw client posts the same requests, encoded in advance, and discards the answers: nothing in
Python can be much faster.

Two comparisons that report medians of alternating repeats, and one that looks at the event loop:

* requests per second at ``--concurrent`` rollouts on the engine with a latency (target >= 0.95);
* CPU seconds per turn on the engine without latency, against parsing and tokenization alone, and against
  the raw client;
* the longest processor time for which ``--crowd`` rollouts keep another task waiting (target <= 50 ms),
  and their CPU per turn, on the engine with three times the latency.  Processor time of the thread, so that
  other load does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from orhpc.config import EnvironmentSettings, ModelSettings, RolloutSettings
from orhpc.process.ports import free_ports
from orhpc.rollout.environment.tools import ToolResult, ToolSpec
from orhpc.types import FinishReason, Sampling, Task

TURNS = 4
GROUP = 16
CALL = (
    "I should look this up before I answer, since the result depends on what is in stock today.\n"
    "<tool_call>\n"
    '{"name": "search", "arguments": {"query": "price of the blue one", "limit": 3}}\n'
    "</tool_call>"
)
ANSWER = "The blue one costs seven, so three of them are twenty-one."
RESULT = "\n".join(f"{n}. item {n * 37 % 101}, in stock: {n % 5}, price {n * 13 % 29}.99" for n in range(12))
TOOL = ToolSpec(
    "search",
    "Search the catalogue.",
    {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    },
)


# --- the engine -------------------------------------------------------------------------------------


def serve(port: int, low: float, high: float, call: list[int], answer: list[int]) -> None:
    """Answer requests until killed; the turn is read from the request id."""

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
        last = int(rid.split(".")[3]) == TURNS - 1
        return web.Response(body=answer_body if last else call_body, content_type="application/json")

    async def run() -> None:
        runner = web.ServerRunner(web.Server(generate))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=2048).start()
        await asyncio.Event().wait()

    asyncio.run(run())


class Engine:
    """The engine's process."""

    def __init__(self, low: float, high: float, call: list[int], answer: list[int]) -> None:
        (port,) = free_ports(1, "127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        options = {"port": port, "low": low, "high": high, "call": call, "answer": answer}
        self._process = subprocess.Popen([sys.executable, __file__, "--serve", json.dumps(options)])

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(self.url + "/generate", data=b'{"rid":"x.0.0.0"}') as response:
                        await response.read()
                        return
                await asyncio.sleep(0.1)
        raise RuntimeError("the engine did not come up")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


# --- both sides -------------------------------------------------------------------------------------


class Catalogue:
    """The environment, and its one session, which all rollouts share."""

    prompt = "What do three of the blue ones cost? " + "Be careful with the numbers. " * 8
    tools = (TOOL,)
    terminal = True

    @contextlib.asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[Catalogue]:
        yield self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(RESULT, reward=0.0)

    async def answer(self, text: str) -> ToolResult:
        return ToolResult("ok", reward=float("twenty-one" in text), finished=True)


async def agent_side(url: str, chat: Any, rollouts: int, label: str) -> tuple[float, float]:
    """Seconds of wall clock and of this process's CPU for all rollouts at once."""
    from orhpc.rollout.agent import AgentContext, run_rollout
    from orhpc.rollout.client import EnginePool
    from orhpc.rollout.transcript import RolloutRequest

    async with EnginePool([url], key=None, request_timeout_s=600.0) as pool:
        context = AgentContext(
            environment=Catalogue(),
            settings=EnvironmentSettings(),
            rollout=RolloutSettings(),
            chat=chat,
            generate=pool.generate,
            sampling=Sampling(max_new_tokens=16384),
        )
        requests = [
            RolloutRequest(f"{label}{n}.0", n, 0, Task("catalogue", "train", n), seed=n)
            for n in range(rollouts)
        ]
        began, cpu = time.perf_counter(), time.process_time()
        tasks = []
        for start in range(0, rollouts, GROUP):  # a worker gets its groups one after the other
            tasks += [asyncio.create_task(run_rollout(context, r)) for r in requests[start : start + GROUP]]
            await asyncio.sleep(0)
        made = [await task for task in tasks]
        spent = time.perf_counter() - began, time.process_time() - cpu
    assert all(r.reward == 1.0 and len(r.turns) == TURNS for r in made)
    return spent


def raw_bodies(chat: Any, call: list[int]) -> list[tuple[bytes, bytes]]:
    """The request body of each turn, before and after the rollout's number."""
    from orhpc.rollout.client.wire import generate_body

    bodies = []
    ids = chat.prompt_ids(Catalogue.prompt, tools=Catalogue.tools)
    for turn in range(TURNS):
        sampling = Sampling(max_new_tokens=1024, stop_token_ids=chat.stop_token_ids, seed=123456789)
        whole = generate_body(ids, sampling, rid=f"NUMBER.0.0.{turn}.0", routes_start=None)
        before, _, after = whole.partition(b"NUMBER")
        bodies.append((before, after))
        ids = [*ids, *call, *chat.tool_results_ids([RESULT], FinishReason.STOP, last_id=call[-1])]
    return bodies


async def raw_side(
    url: str, bodies: list[tuple[bytes, bytes]], rollouts: int, label: str
) -> tuple[float, float]:
    """The same requests without the agent loop."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers={"Content-Type": "application/json"}
    ) as session:

        async def one(number: int) -> None:
            name = f"{label}{number}".encode()
            for before, after in bodies:
                async with session.post(url + "/generate", data=before + name + after) as response:
                    await response.read()

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(n) for n in range(rollouts)))
        return time.perf_counter() - began, time.process_time() - cpu


def text_alone(chat: Any, call: list[int], answer: list[int], rollouts: int) -> float:
    """CPU seconds per turn of parsing and tokenization alone."""
    began = time.process_time()
    for _ in range(rollouts):
        chat.prompt_ids(Catalogue.prompt, tools=Catalogue.tools)
        for _ in range(TURNS - 1):
            chat.parse(call)
            chat.tool_results_ids([RESULT], FinishReason.STOP, last_id=call[-1])
        chat.parse(answer)
    return (time.process_time() - began) / (rollouts * TURNS)


async def crowd(options: argparse.Namespace, chat: Any, call: list[int], answer: list[int]) -> None:
    """Print how long other tasks wait while many rollouts run in one process."""
    from orhpc.process.garbage import collect_steadily, freeze_garbage

    waits: list[float] = []

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.002)
            waits.append(time.thread_time() - before)

    freeze_garbage()
    collecting = asyncio.create_task(collect_steadily(lambda: True))
    low, high = options.latency
    engine = Engine(3 * low, 3 * high, call, answer)
    try:
        await engine.ready()
        watching = asyncio.create_task(watch())
        _, cpu = await agent_side(engine.url, chat, options.crowd, "c")
        watching.cancel()
    finally:
        collecting.cancel()
        engine.stop()
    alone = text_alone(chat, call, answer, options.cpu_rollouts)
    turn, late = cpu / options.crowd / TURNS, sum(wait > 0.05 for wait in waits)
    print(f"\n{options.crowd} rollouts in one process")
    print(f"  longest wait of another task  {1e3 * max(waits):6.0f} ms of processor time; {late} over 50 ms")
    print(f"  CPU of a turn                 {1e3 * turn:6.3f} ms, {turn / alone:.2f} of parse and tokenize")


async def compare(options: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from orhpc.models.bundled import ensure
    from orhpc.rollout.chat import chat_format

    tokenizer = AutoTokenizer.from_pretrained(ensure(options.model))
    chat = chat_format(ModelSettings(), tokenizer)
    end = [chat.stop_token_ids[0]]
    call, answer = (chat.codec.encode([text]) + end for text in (CALL, ANSWER))
    bodies = raw_bodies(chat, call)
    last = sum(map(len, bodies[-1]))
    print(f"{TURNS} turns a rollout, {len(call)} sampled tokens a turn, {last} bytes in the last request")

    low, high = options.latency
    engine = Engine(low, high, call, answer)
    agent, raw = [], []
    try:
        await engine.ready()
        for repeat in range(options.repeats):
            label = f"r{repeat}-"
            requests = options.concurrent * TURNS
            raw.append(requests / (await raw_side(engine.url, bodies, options.concurrent, label))[0])
            agent.append(requests / (await agent_side(engine.url, chat, options.concurrent, label))[0])
    finally:
        engine.stop()
    ratio = statistics.median(a / b for a, b in zip(agent, raw, strict=True))
    print(
        f"\n{options.concurrent} concurrent rollouts, {low:g}-{high:g} s a turn, medians of {options.repeats}"
    )
    print(f"  agent loop  {statistics.median(agent):8.1f} requests/s")
    print(f"  raw client  {statistics.median(raw):8.1f} requests/s")
    print(f"  ratio       {ratio:8.3f}   (target >= 0.95)")

    engine = Engine(0.0, 0.0, call, answer)
    turns = options.cpu_rollouts * TURNS
    agent, raw, text = [], [], []
    try:
        await engine.ready()
        for repeat in range(options.repeats):
            label = f"z{repeat}-"
            agent.append((await agent_side(engine.url, chat, options.cpu_rollouts, label))[1] / turns)
            raw.append((await raw_side(engine.url, bodies, options.cpu_rollouts, label))[1] / turns)
            text.append(text_alone(chat, call, answer, options.cpu_rollouts))
    finally:
        engine.stop()
    loop, client, alone = (1e3 * statistics.median(values) for values in (agent, raw, text))
    print(f"\nCPU of a turn, no latency, {options.cpu_rollouts} rollouts, medians of {options.repeats}")
    print(f"  agent loop, all of it     {loop:6.3f} ms")
    print(f"  parse and tokenize alone  {alone:6.3f} ms   agent / this = {loop / alone:.2f}")
    print(f"  raw client                {client:6.3f} ms   agent / this = {loop / client:.2f}")
    print(f"  the loop's own            {loop - alone - client:6.3f} ms")
    if options.crowd:
        await crowd(options, chat, call, answer)
    return 0 if ratio >= options.target else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrent", type=int, default=512)
    parser.add_argument("--latency", type=float, nargs=2, default=(1.0, 3.0), metavar=("LOW", "HIGH"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-rollouts", type=int, default=128)
    parser.add_argument("--crowd", type=int, default=2048, help="0: leave this part out")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct", help="whose tokenizer")
    parser.add_argument("--target", type=float, default=0.95, help="exit 1 below this ratio")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(**json.loads(options.serve))
        return 0
    return asyncio.run(compare(options))


if __name__ == "__main__":
    sys.exit(main())
