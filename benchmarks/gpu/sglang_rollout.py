"""Rollout tokens per second on one Hopper GPU: agent loop against SGLang's benchmark, FP8 against bfloat16.

    python benchmarks/gpu/sglang_rollout.py --model DIR [--concurrent 256] [--rollouts 512] [--repeats 2]

Two SGLang servers on one GPU, bfloat16 and block-wise FP8, with random weights of ``--model``'s shapes (speed
does not depend on them).  Three clients sample 256 tokens after prompts of the same length, with
log-probabilities, at the same concurrency: the agent loop; ``python -m sglang.benchmark.serving``; and a raw
client that posts bodies encoded in advance and does not parse the answers. One server is measured at a time;
the other is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402

from orhpc.config import EnvironmentSettings, ModelSettings, RolloutSettings  # noqa: E402
from orhpc.errors import EngineUnavailable  # noqa: E402
from orhpc.rollout.environment.tools import ToolResult  # noqa: E402
from orhpc.types import Sampling, Task  # noqa: E402
from tests.gpu import sglang_check as kit  # noqa: E402

TOKENS = 256
KEY = "key-of-a-benchmark"


class Question:
    """The environment, and its one session, which all rollouts share; every answer ends the episode."""

    tools = ()
    terminal = True

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    @contextlib.asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[Question]:
        yield Question(prompt_of(task.index))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        raise AssertionError("there is no tool")

    async def answer(self, text: str) -> ToolResult:
        return ToolResult("ok", reward=0.0, finished=True)


def prompt_of(number: int) -> str:
    return f"{number:06d} " + "Tell me what follows from this, and why. " * 6


async def agent_side(url: str, chat: Any, rollouts: int, concurrent: int, label: str) -> float:
    """Tokens per second sampled by the agent loop."""
    from orhpc.rollout.agent import AgentContext, run_rollout
    from orhpc.rollout.client import EnginePool
    from orhpc.rollout.transcript import RolloutRequest

    gate = asyncio.Semaphore(concurrent)
    async with EnginePool([url], key=KEY, request_timeout_s=600.0) as pool:
        context = AgentContext(
            environment=Question(""),
            settings=EnvironmentSettings(),
            rollout=RolloutSettings(),
            chat=chat,
            generate=pool.generate,
            sampling=Sampling(max_new_tokens=TOKENS),
        )

        async def one(n: int) -> int:
            request = RolloutRequest(f"{label}{n}.0", n, 0, Task("question", "train", n), seed=n)
            async with gate:
                return (await run_rollout(context, request)).response_tokens

        began = time.perf_counter()
        tokens = await asyncio.gather(*(one(n) for n in range(rollouts)))
        return sum(tokens) / (time.perf_counter() - began)


async def raw_side(url: str, chat: Any, rollouts: int, concurrent: int, label: str) -> float:
    """Tokens per second sampled by a client that only posts and reads bytes."""
    from orhpc.rollout.client.wire import generate_body

    sampling = Sampling(max_new_tokens=TOKENS, stop_token_ids=chat.stop_token_ids, seed=1)
    bodies = [
        generate_body(chat.prompt_ids(prompt_of(n), tools=()), sampling, rid=f"{label}{n}", routes_start=None)
        for n in range(rollouts)
    ]
    gate = asyncio.Semaphore(concurrent)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def one(body: bytes) -> bytes:
            async with gate, session.post(url + "/generate", data=body) as response:
                return await response.read()

        began = time.perf_counter()
        answers = await asyncio.gather(*(one(body) for body in bodies))
        spent = time.perf_counter() - began
    return sum(json.loads(a)["meta_info"]["completion_tokens"] for a in answers) / spent


async def sglang_side(url: str, model: Path, prompt_tokens: int, rollouts: int, concurrent: int) -> float:
    """Tokens per second reported by SGLang's own serving benchmark."""
    report = kit.WORK / "serving.jsonl"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url,
        "--model", str(model), "--dataset-name", "random-ids", "--tokenize-prompt",
        "--random-input-len", str(prompt_tokens), "--random-output-len", str(TOKENS),
        "--random-range-ratio", "1", "--num-prompts", str(rollouts), "--max-concurrency", str(concurrent),
        "--temperature", "1", "--ready-check-timeout-sec", "0", "--disable-stream", "--return-logprob",
        "--disable-tqdm", "--output-file", str(report),
    ]  # fmt: skip
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    run = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=120
    )
    if run.returncode or not report.exists():
        raise RuntimeError(f"sglang.benchmark.serving: {(run.stderr or run.stdout)[-1500:]}")
    output = json.loads(report.read_text().splitlines()[-1])
    assert output["completed"] == rollouts, output["completed"]
    return output["output_throughput"]


def engine(
    name: str, model: Path, concurrent: int, more: Mapping[str, Any] | None = None, **settings: Any
) -> Any:
    extra = {**(more or {})}
    extra |= {"weight_version": "0", "load_format": "dummy", "disable_radix_cache": True}
    extra |= {"cuda_graph_bs_decode": sorted({*range(32, concurrent + 1, 32), 1, 8, concurrent})}
    # Two servers that start together would count each other's memory as used; a token limit bounds each.
    extra |= {"max_total_tokens": 1024 * concurrent}
    config = kit.engine_config(
        memory_fraction=0.95, max_running=concurrent, context=1024, extra=extra, **settings
    )
    return kit.start_engine(f"bench-{name}", config, model, KEY)


async def compare(options: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from orhpc.rollout.chat import chat_format

    kit.WORK.mkdir(parents=True, exist_ok=True)
    chat = chat_format(ModelSettings(), AutoTokenizer.from_pretrained(options.model))
    prompt_tokens = len(chat.prompt_ids(prompt_of(0), tools=()))
    count = (options.rollouts, options.concurrent)
    engines: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"agent loop": [], "SGLang's": [], "raw bf16": [], "raw fp8": []}

    def note(name: str, rate: float) -> None:
        rates[name].append(rate)
        print(f"  {name}: {rate:.0f} tokens/s", flush=True)

    try:
        # Triton's FP8 products: DeepGEMM compiles for minutes on a new machine.
        fp8 = {"precision": "fp8-rollout", "more": {"fp8_gemm_backend": "triton"}}
        for name, settings in (("bf16", {}), ("fp8", fp8)):
            engines[name] = engine(name, options.model, options.concurrent, **settings)
        for name, process in list(engines.items()):
            try:
                await process.wait_ready(240.0)
            except EngineUnavailable as error:
                print(f"  {name}: {error}", flush=True)
                process.stop()
                del engines[name]
        print(f"servers are up: {', '.join(engines)}; prompts of {prompt_tokens} tokens", flush=True)
        if options.after:
            await asyncio.to_thread(kit.wait_for, options.after)
        for name in engines:
            await raw_side(engines[name].url, chat, *count, f"warm-{name}")
        bf16 = engines["bf16"].url
        for repeat in range(options.repeats):
            note("SGLang's", await sglang_side(bf16, options.model, prompt_tokens, *count))
            note("agent loop", await agent_side(bf16, chat, *count, f"a{repeat}-"))
            for name in engines:
                note(f"raw {name}", await raw_side(engines[name].url, chat, *count, f"{name}{repeat}-"))
    finally:
        for process in engines.values():
            process.stop()
    print(
        f"{options.rollouts} rollouts of {TOKENS} tokens, {options.concurrent} at once, tokens/s by repeat:"
    )
    for name, values in rates.items():
        print(f"  {name:10s} {', '.join(f'{v:.0f}' for v in values)}")
    ratio = median_ratio(rates["agent loop"], rates["SGLang's"])
    print(f"  agent loop / SGLang's own benchmark {ratio:.3f} (target >= {options.target})")
    print(f"  agent loop / raw client {median_ratio(rates['agent loop'], rates['raw bf16']):.3f}")
    if rates["raw fp8"]:
        print(f"  FP8 / bf16, raw client {median_ratio(rates['raw fp8'], rates['raw bf16']):.3f}")
    return 0 if ratio >= options.target else 1


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder; null: Qwen3-30B-A3B's layer shapes, 4 layers")
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--after", help="NAME:STEP or NAME:stopped, as of tests/gpu/sglang_check.py")
    parser.add_argument("--target", type=float, default=0.95, help="exit 1 below this ratio")
    options = parser.parse_args()
    options.model = options.model or kit.moe_30b_layers()
    return asyncio.run(compare(options))


if __name__ == "__main__":
    sys.exit(main())
