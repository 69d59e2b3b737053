"""Release an engine's memory while its GPUs may still work: with orhpc's preparation, and without.

    python tests/gpu/sleep_race.py [--gpus 2] [--seconds 100] [--load 32]

Two SGLang servers of a small mixture of experts use the same GPUs, each with tensor and expert parallelism
over all of them, while another process multiplies matrices on each. Both do the same rounds: requests are
aborted at a random moment, as at the end of a rollout; the cache is flushed; all memory is released and
allocated again; the weights are loaded from the disk. One server has been prepared by
:mod:`orhpc.rollout.engines.sglang_sleep`. Prints how many rounds each has survived; exit 1 if the prepared
one has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.recovery_two_gpus import BUSY  # noqa: E402
from orhpc.errors import OrhpcError  # noqa: E402
from orhpc.rollout.client import EngineClient  # noqa: E402
from orhpc.rollout.engines.sglang_command import SLEEPER  # noqa: E402
from orhpc.types import Sampling  # noqa: E402
from orhpc.wire.weights import NO_TENSORS  # noqa: E402
from tests.gpu.sglang_engines import engine_config, start_engine  # noqa: E402
from tests.gpu.sglang_models import moe_30b_layers  # noqa: E402

KEY = "sleep-race"
TAGS = ("kv_cache", "weights", "cuda_graph")


async def rounds(url: str, folder: Path, options: argparse.Namespace, *, prepared: bool) -> tuple[int, str]:
    """Sleep and wake until the time is over or the engine fails; returns the rounds, and the failure."""
    client = EngineClient(url, key=KEY, request_timeout_s=60.0, control_timeout_s=30.0)
    chance, done, end = random.Random(0), 0, time.monotonic() + options.seconds
    try:
        await client.begin_update()
        if prepared:
            nothing = [NO_TENSORS] * options.gpus
            await client.update_weights_from_tensor(nothing, load_format=SLEEPER, flush_cache=False)
        await client.end_update()
        await client.update_weight_version("1")
        while time.monotonic() < end:
            asked = [asyncio.ensure_future(ask(client, chance, n)) for n in range(options.load)]
            await asyncio.sleep(chance.uniform(0.1, 0.6))
            await client.pause_generation("abort")
            await client.flush_cache()
            await client.release_memory_occupation(TAGS)
            await asyncio.gather(*asked)
            await client.resume_memory_occupation(TAGS)
            await client.begin_update()
            await client.update_weights_from_disk(str(folder), weight_version="1")
            await client.end_update()
            await client.continue_generation()
            done += 1
    except OrhpcError as error:
        return done, str(error)
    finally:
        await client.close()
    return done, ""


async def ask(client: EngineClient, chance: random.Random, number: int) -> Any:
    prompt = [chance.randrange(3, 4000) for _ in range(60)]
    sampling = Sampling(max_new_tokens=chance.randrange(100, 800))
    return await client.generate(prompt, sampling, rid=f"{number}-{chance.random()}")


async def race(urls: list[str], folder: Path, options: argparse.Namespace) -> int:
    both = [rounds(url, folder, options, prepared=bool(n)) for n, url in enumerate(urls)]
    (alone, why), (waiting, problem) = await asyncio.gather(*both)
    print(f"ok   without the preparation: {alone} rounds; {why or 'it has not failed'}")
    print(
        f"{'FAIL' if problem else 'ok  '} with the preparation: {waiting} rounds; {problem or 'no failure'}"
    )
    return int(bool(problem))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0, help="of the rounds, after the start (100)")
    parser.add_argument("--load", type=int, default=32, help="requests at once (32)")
    options = parser.parse_args()
    folder = moe_30b_layers(4, "small")
    sizes = {"memory_fraction": 0.4, "max_running": 64, "extra": {"max_total_tokens": 65536}}
    config = engine_config(tp=options.gpus, ep=options.gpus, **sizes)
    servers: list[Any] = []
    busy: list[subprocess.Popen[bytes]] = []
    try:
        for name in ("unprepared", "prepared"):  # one after the other: each measures the free memory
            servers.append(start_engine(name, config, folder, KEY, shares=True))
            asyncio.run(servers[-1].wait_ready(240.0))
        for gpu in range(options.gpus):
            there = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
            busy.append(subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.DEVNULL, env=there))
        return asyncio.run(race([server.url for server in servers], folder, options))
    finally:
        for process in busy:
            process.kill()
        for server in servers:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
