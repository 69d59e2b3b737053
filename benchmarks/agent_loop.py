"""The agent loop against a raw HTTP client on the same scripted engine, and its CPU time per turn.

    python -m benchmarks.agent_loop [--concurrent 512] [--latency 1.0 3.0] [--processes 1]

The engine is a separate process that answers ``/generate`` in SGLang's protocol, after a latency drawn by
request id (the same for both sides) or at once.  The environment runs in this process, so that only the loop
is measured.  The raw client posts the same requests, encoded in advance, and discards the answers: nothing in
Python can be much faster.

Event loops are those that Ray gives a rollout worker: uvloop's where it is installed.

Two comparisons that report medians of alternating repeats, and one that looks at the event loop:

* requests per second at ``--concurrent`` rollouts on the engine with a latency, spread over ``--processes``
  processes on either side (target >= 0.95);
* CPU seconds per turn on the engine without latency, against parsing and tokenization alone, and against
  the raw client;
* the longest processor time for which ``--crowd`` rollouts keep another task waiting (target <= 50 ms),
  and their CPU per turn, on the engine with three times the latency.  Processor time of the thread, so that
  other load does not count.  Parsing and tokenization alone are measured in a loop, with warm caches, and
  once every ``--pause`` seconds, as they come in a crowd.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from benchmarks.scripted_engine import Engine
from orhpc.config import EnvironmentSettings, ModelSettings, RolloutSettings
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


async def calm_text(chat: Any, call: list[int], answer: list[int], pause_s: float) -> float:
    """The same with a pause after each rollout, in which the processor's caches are used otherwise."""
    spent: list[float] = []
    for _ in range(500):
        await asyncio.sleep(pause_s)
        spent.append(text_alone(chat, call, answer, 1))
    return statistics.fmean(spent)


class Side:
    """A process, set up as a rollout worker is, that runs either side on request."""

    def __init__(self, url: str, model: str) -> None:
        options = json.dumps({"url": url, "model": model})
        command = [sys.executable, "-m", "benchmarks.agent_loop", "--side", options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def begin(self, side: str, rollouts: int, label: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([side, rollouts, label]) + "\n")
        self._process.stdin.flush()

    def result(self) -> list[float]:
        """Return seconds of wall clock and of CPU."""
        return self._read()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


async def run_side(url: str, model: str) -> None:
    """Run what standard input names, line by line, and write what it took."""
    from orhpc.process.garbage import collect_steadily, freeze_garbage

    chat, call, _ = texts(model)
    bodies = raw_bodies(chat, call)
    freeze_garbage()
    collecting = asyncio.create_task(collect_steadily(lambda: True))
    print("[]", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        side, rollouts, label = json.loads(line)
        run = (
            agent_side(url, chat, rollouts, label)
            if side == "agent"
            else raw_side(url, bodies, rollouts, label)
        )
        print(json.dumps(await run), flush=True)
    collecting.cancel()


def requests_a_second(sides: list[Side], side: str, concurrent: int, label: str) -> float:
    """Requests per second of all processes together, until the last has ended."""
    began = time.perf_counter()
    for number, process in enumerate(sides):
        process.begin(side, concurrent // len(sides), f"{label}{number}-")
    for process in sides:
        process.result()
    return concurrent // len(sides) * len(sides) * TURNS / (time.perf_counter() - began)


def throughput(options: argparse.Namespace, call: list[int], answer: list[int]) -> float:
    """Print requests per second of both sides; return the ratio."""
    low, high = options.latency
    engine = Engine(low, high, TURNS, call, answer)
    sides: list[Side] = []
    agent, raw = [], []
    try:
        asyncio.run(engine.ready())
        sides += [Side(engine.url, options.model) for _ in range(options.processes)]
        for repeat in range(options.repeats):
            raw.append(requests_a_second(sides, "raw", options.concurrent, f"r{repeat}-"))
            agent.append(requests_a_second(sides, "agent", options.concurrent, f"r{repeat}-"))
    finally:
        engine.stop()
        for process in sides:
            process.stop()
    pairs = list(zip(agent, raw, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(
        f"\n{options.concurrent} concurrent rollouts, processes on either side: {options.processes}, "
        f"{low:g}-{high:g} s a turn, medians of {options.repeats}"
    )
    print(f"  agent loop  {statistics.median(agent):8.1f} requests/s")
    print(f"  raw client  {statistics.median(raw):8.1f} requests/s")
    print(f"  ratio       {ratio:8.3f}   (target >= 0.95; {', '.join(f'{a / b:.2f}' for a, b in pairs)})")
    return ratio


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
    engine = Engine(3 * low, 3 * high, TURNS, call, answer)
    try:
        await engine.ready()
        watching = asyncio.create_task(watch())
        _, cpu = await agent_side(engine.url, chat, options.crowd, "c")
        watching.cancel()
    finally:
        collecting.cancel()
        engine.stop()
    alone = text_alone(chat, call, answer, options.cpu_rollouts)
    calm = await calm_text(chat, call, answer, options.pause)
    turn, late = cpu / options.crowd / TURNS, sum(wait > 0.05 for wait in waits)
    print(f"\n{options.crowd} rollouts in one process")
    print(f"  longest wait of another task  {1e3 * max(waits):6.0f} ms of processor time; {late} over 50 ms")
    print(f"  CPU of a turn                 {1e3 * turn:6.3f} ms, {turn / alone:.2f} of parse and tokenize")
    print(f"  the same with pauses          {1e3 * calm:6.3f} ms, turn / this = {turn / calm:.2f}")


def texts(model: str) -> tuple[Any, list[int], list[int]]:
    """The chat format, and the ids of a turn that calls a tool and of one that answers."""
    from transformers import AutoTokenizer

    from orhpc.models.bundled import ensure
    from orhpc.rollout.chat import chat_format

    chat = chat_format(ModelSettings(), AutoTokenizer.from_pretrained(ensure(model)))
    end = [chat.stop_token_ids[0]]
    call, answer = (chat.codec.encode([text]) + end for text in (CALL, ANSWER))
    return chat, call, answer


async def compare(options: argparse.Namespace, chat: Any, call: list[int], answer: list[int]) -> None:
    """Print the CPU time per turn, then that of a crowd."""
    bodies = raw_bodies(chat, call)
    engine = Engine(0.0, 0.0, TURNS, call, answer)
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrent", type=int, default=512)
    parser.add_argument("--latency", type=float, nargs=2, default=(1.0, 3.0), metavar=("LOW", "HIGH"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="on either side, for the requests a second")
    parser.add_argument("--cpu-rollouts", type=int, default=128, help="0: requests a second alone")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between texts of a crowd")
    parser.add_argument("--crowd", type=int, default=2048, help="0: leave this part out")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct", help="whose tokenizer")
    parser.add_argument("--target", type=float, default=0.95, help="exit 1 below this ratio")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from ray._private.async_compat import get_new_event_loop

    with asyncio.Runner(loop_factory=get_new_event_loop) as runner:
        if options.side:
            runner.run(run_side(**json.loads(options.side)))
            return 0
        chat, call, answer = texts(options.model)
        last = sum(map(len, raw_bodies(chat, call)[-1]))
        print(f"{TURNS} turns a rollout, {len(call)} sampled tokens a turn, {last} bytes in the last request")
        print(f"event loop: {type(runner.get_loop()).__module__}")
        ratio = throughput(options, call, answer)
        if options.cpu_rollouts:
            runner.run(compare(options, chat, call, answer))
    return 0 if ratio >= options.target else 1


if __name__ == "__main__":
    sys.exit(main())
