"""Time of a short rollout phase by stage, and CPU time by kind of process.

    python -m benchmarks.rollout_phase [--groups 8 --samples 16] [--phases 4] [--workers 4 --replicas 4]
    python -m benchmarks.rollout_phase --groups 1 --samples 1 --phases 10 --workers 1 --replicas 1

Everything except the engine is as in a run: the producer, rollout workers under Ray, and OpenReward servers
of the bundled arithmetic environment. The engine is a separate process that speaks SGLang's protocol and
answers every request after ``--latency`` with the tokens of a turn, their log-probabilities and expert routes
(two layers, eight experts per token).

Phases follow each other like the steps of a run, ``--pause`` seconds apart, with the step's record written in
between. The first phase opens the connections and is printed separately. CPU seconds show the work that more
cores would divide; the second command, one rollout at a time, shows the latency that they would not reduce.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil
from aiohttp import web

from benchmarks.scripted_engine import answer_forever
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.process.ports import free_ports
from orhpc.rollout.worker import RolloutWorker

LAYERS, TOPK, EXPERTS = 2, 8, 128
PROMPTS = range(8, 200)
"""Prompt lengths, in tokens, for which the engine has an answer."""


# --- the engine -------------------------------------------------------------------------------------


def serve(port: int, latency: float, ids: list[int]) -> None:
    """Answer requests until killed."""
    from orhpc.wire.routes import encode_routes

    def body(prompt_tokens: int) -> bytes:
        rows = prompt_tokens + len(ids) - 1
        routes = np.random.default_rng(0).integers(1, EXPERTS, (rows, LAYERS, TOPK))
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "output_token_logprobs": [[-0.0123456789 * (n + 1), i, None] for n, i in enumerate(ids)],
            "completion_tokens": len(ids),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": 0,
            "weight_version": "0",
            "routed_experts": encode_routes(routes),
        }
        return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})

    bodies = {n: body(n) for n in PROMPTS}

    async def generate(request: web.BaseRequest) -> web.Response:
        data = await request.read()
        await asyncio.sleep(latency)
        answer = bodies[len(orjson.loads(data)["input_ids"])]
        return web.Response(body=answer, content_type="application/json")

    asyncio.run(answer_forever(port, generate))


def answer_ids(tokenizer: Any, tokens: int, end: int) -> list[int]:
    """A turn of exactly ``tokens`` ids: some text, then the stop token."""
    ids = tokenizer.encode("The sum of these two numbers is 42. " * tokens, add_special_tokens=False)
    return [*ids[: tokens - 1], end]


def model_folder(folder: Path, bundled: str) -> Path:
    """A bundled model's tokenizer with the config of a mixture of experts."""
    from orhpc.models.bundled import ensure

    for source in ensure(bundled).iterdir():
        if source.suffix in (".json", ".txt", ".jinja"):
            shutil.copy(source, folder)
    path = folder / "config.json"
    experts = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOPK}
    path.write_text(json.dumps(json.loads(path.read_text()) | experts))
    return folder


# --- one run ----------------------------------------------------------------------------------------


def cpu_seconds(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


def start_engine(serving: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.rollout_phase", "--serve", json.dumps(serving)]
    )


async def engine_ready(url: str) -> None:
    body = orjson.dumps({"input_ids": [0] * PROMPTS.start})
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            try:
                async with session.post(url + "/generate", data=body) as response:
                    await response.read()
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise RuntimeError("the engine did not come up")


def config_of(options: argparse.Namespace) -> Config:
    """The config of a small run with these numbers of rollouts and tokens per rollout."""
    return load_config(
        Path(__file__).parent.parent / "configs/tiny.yaml",
        [
            f"rollout.batch_size={options.groups}",
            f"rollout.n_samples={options.samples}",
            f"rollout.workers_per_node={options.workers}",
            f"rollout.max_response_tokens={options.tokens}",
            f"train.global_batch_size={options.groups * options.samples}",
            "rollout.record_routes=true",
            "rollout.max_refills=0",
            "environments.orhpc/letters=null",
            "environments.orhpc/arithmetic.serve=arithmetic",
            f"environments.orhpc/arithmetic.replicas={options.replicas}",
            "environments.orhpc/arithmetic.serve_options={max_number: 99}",
        ],
    )


async def measure(options: argparse.Namespace, folder: Path) -> None:
    import ray
    from transformers import AutoTokenizer

    from orhpc.driver.fleet import Workers, WorkerSetup
    from orhpc.launch.node.environment_servers import ServedEnvironments
    from orhpc.launch.node.first_node import write_secret
    from orhpc.plan.placement import local_node, plan
    from orhpc.rollout.producer import Producer
    from orhpc.rollout.tasks import TaskSequence, TaskStream
    from orhpc.rundir import RunDir

    model = model_folder(folder, options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = answer_ids(tokenizer, options.tokens, tokenizer.eos_token_id)
    config = config_of(options)
    run = RunDir(folder / "run")
    run.create()
    attempt = run.begin_attempt(kind="local")
    write_secret(run.attempt(attempt) / "environment.key")
    key = (run.attempt(attempt) / "environment.key").read_text()
    node = local_node()
    served = ServedEnvironments(config, node, run, attempt)
    placement = replace(plan(config, (node,)), environments=served.reserve())
    (port,) = free_ports(1, node.address)
    url = f"http://{node.address}:{port}"
    engine = start_engine({"port": port, "latency": options.latency, "ids": ids})
    served.start()
    try:
        await engine_ready(url)
        os.environ |= {"RAY_worker_niceness": "0"}  # as in a run
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        node_id = ray.nodes()[0]["NodeID"]
        setup = WorkerSetup(config, placement, str(model), run, attempt, key, lambda *_, **__: None, print)
        workers = await Workers.start(setup, [node_id])
        await workers.connect([url], "")
        pids = {
            "engine": [engine.pid],
            "servers": [p.pid for p in served._running.values()],
            "workers": [p.pid for p in psutil.process_iter(["cmdline"]) if _is_ours(p)],
            "driver": [os.getpid()],
        }
        assert len(pids["workers"]) == options.workers
        await workers.published(0)
        tasks = TaskSequence([TaskStream("orhpc/arithmetic", "train", 1000, 1.0)], seed=0)
        producer = Producer(config.rollout, tasks, workers, seed=0)
        rows = [await one_phase(options, producer, workers, pids, folder, n) for n in range(options.phases)]
        show(options, rows)
    finally:
        ray.shutdown()
        engine.terminate()
        engine.wait()
        served.stop()


def _is_ours(process: psutil.Process) -> bool:
    return any("ray::RolloutWorker" in word for word in process.info["cmdline"] or ()) and any(
        parent.pid == os.getpid() for parent in process.parents()
    )


async def one_phase(
    options: argparse.Namespace,
    producer: Any,
    workers: Any,
    pids: dict[str, list[int]],
    folder: Path,
    number: int,
) -> dict[str, float]:
    """Seconds of a phase and of its rollouts' stages (means), and CPU milliseconds per rollout."""
    await asyncio.sleep(options.pause)
    before = {kind: cpu_seconds(of_kind) for kind, of_kind in pids.items()}
    began = time.monotonic()
    step_groups = await producer.collect(0)
    phase = time.monotonic() - began
    after = {kind: cpu_seconds(of_kind) for kind, of_kind in pids.items()}
    rollouts = [r for g in step_groups.groups for r in g.rollouts]
    assert len(rollouts) == options.groups * options.samples
    assert all(r.end == "terminal" and r.response_tokens == options.tokens for r in rollouts), rollouts[0]
    record = folder / f"record_{number}"
    record.mkdir()
    for worker in workers:
        own = [(g.id, None, True) for g in step_groups.groups if g.rollouts[0].worker == worker.index]
        if own:
            await worker.call(RolloutWorker.record, str(record), own)

    def mean(values: Any) -> float:
        return statistics.fmean(values)

    stages = {
        "opening": mean(r.waits.opening for r in rollouts),
        "engine": mean(r.waits.engine for r in rollouts),
        "tools": mean(r.waits.tools for r in rollouts),
    }
    whole = mean(r.seconds for r in rollouts)
    return {
        "phase": phase,
        "rollout max": max(r.seconds for r in rollouts),
        "rollout mean": whole,
        **stages,
        "own and closing": whole - sum(stages.values()),
        **{f"cpu {kind}": 1e3 * (after[kind] - before[kind]) / len(rollouts) for kind in pids},
    }


def show(options: argparse.Namespace, rows: list[dict[str, float]]) -> None:
    print(
        f"{options.groups} x {options.samples} rollouts of {options.tokens} tokens, "
        f"{options.workers} workers, {options.replicas} servers, engine {options.latency:g} s, "
        f"{os.cpu_count()} cores"
    )
    print(f"{'':18}{'first':>9}{'median':>9}{'least':>9}{'most':>9}   of {len(rows) - 1} later phases")
    for name, first in rows[0].items():
        later = [row[name] for row in rows[1:]] or [first]
        unit = "ms a rollout" if name.startswith("cpu") else "s"
        digits = 2 if name.startswith("cpu") else 3
        values = (first, statistics.median(later), min(later), max(later))
        print(f"{name:18}{''.join(f'{v:9.{digits}f}' for v in values)}   {unit}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.5, help="seconds until the engine answers")
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between phases")
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct", help="whose tokenizer")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(**json.loads(options.serve))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
