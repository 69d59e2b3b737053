"""Heavy-tailed response lengths on one GPU with SGLang: synchronous, partial and asynchronous steps.

    python benchmarks/gpu/heavy_tails.py --out DIR [--variants synchronous "staleness 4"] [--seconds 560]

One run of ``python -m orhpc.launch --local configs/gpu-smollm2.yaml`` with a random model of Qwen3-0.6B's
shape, 32 prompts x 8 rollouts, and an agent that ends each rollout after a given number of tokens:
lognormal, p99 / p50 = 8, the same for a rollout in every run.  The run goes through the variants, each for an
equal share of the time after the first step: an SGLang start for each would take longer than its steps.
DIR gets ``heavy_tails.csv`` with a row per step, ``events.jsonl``, and the logs; the table at the end leaves
out the first SKIPPED steps of each variant, in which kernels compile and rollouts of earlier steps are
missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.rollout.agent import AgentContext, run_rollout  # noqa: E402
from orhpc.rollout.producer import Producer, StepGroups  # noqa: E402
from orhpc.rollout.transcript import RolloutRequest  # noqa: E402
from orhpc.rundir import RunDir  # noqa: E402
from orhpc.rundir.events import read_events, steps_of  # noqa: E402
from orhpc.types import PromptGroup, Rollout  # noqa: E402

MEDIAN, MOST = 128, 1536
SIGMA = math.log(8) / 2.3263
SKIPPED = 2
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "oversample 2, partial": {"oversample": 2.0, "partial": True},
    "staleness 1": {"max_staleness": 1},
    "staleness 4": {"max_staleness": 4},
}
"""What each changes of BASE; all train on every token, however old."""
BASE: dict[str, Any] = {"oversample": 1.0, "partial": False, "max_staleness": 0}
"""Settings of the producer."""
SETTINGS = [
    "rollout.batch_size=32",
    "rollout.n_samples=8",
    f"rollout.max_response_tokens={MOST}",
    "rollout.max_total_tokens=2048",
    "rollout.max_staleness=4",
    "rollout.stale_tokens=train",
    "rollout.custom_agent=benchmarks.gpu.heavy_tails:agent",
    "rollout.custom_reward=tests.gpu.random_model:even_tokens",
    "rollout.filter=benchmarks.gpu.heavy_tails:keep",
    "model.chat_format=chatml",
    "engine.context_length=2200",
    "engine.memory_fraction=0.5",
    "train.lr=1e-6",
    "train.steps=1000",
    "train.max_tokens_per_gpu=32768",
    "train.gradient_checkpointing=true",
    "checkpoint.save_interval=null",
    "wandb.enabled=false",
]
COLUMNS = (
    "seconds", "response_tokens", "total_tokens", "response_length_mean", "staleness_mean",
    "dropped_stale", "gpu_utilization", "gpu_utilization_rollout",
)  # fmt: skip
PHASES = ("rollout", "update", "sync")
PLAN = "ORHPC_HEAVY_TAILS"
"""Environment variable of the run: a JSON file with the variants, and the file that gets their steps."""
_END_S = 45.0


def response_tokens(group: int, sample: int) -> int:
    """Length of a rollout's response: lognormal, the same in every run."""
    value = np.random.default_rng((group, sample)).lognormal(math.log(MEDIAN), SIGMA)
    return int(np.clip(value, 8, MOST))


async def agent(context: AgentContext, request: RolloutRequest) -> Rollout:
    """The built-in loop with the rollout's own limit; a random model hardly ever ends a turn itself."""
    limit = response_tokens(request.group_id, request.sample)
    return await run_rollout(
        replace(context, sampling=replace(context.sampling, max_new_tokens=limit)), request
    )


def keep(group: PromptGroup) -> bool:
    """Keep every group.  The setting ``rollout.filter`` makes the driver import this module."""
    return True


def _follow(plan: Path) -> None:
    """Let this process's producer go through the variants of a plan, and write down which step had which."""
    variants, share = json.loads(plan.read_text())
    collect, began = Producer.collect, 0.0

    async def in_variant(self: Producer, version: int, *stop: Callable[[], bool]) -> StepGroups:
        nonlocal began
        if version == 1:  # the first step compiles kernels
            began = time.monotonic()
        past = (time.monotonic() - began) / share if began else 0.0
        name = variants[min(int(past), len(variants) - 1)]
        self._settings = self._settings.model_copy(update=BASE | VARIANTS[name])
        with plan.with_suffix(".steps").open("a") as file:
            file.write(json.dumps([version + 1, name]) + "\n")
        return await collect(self, version, *stop)

    Producer.collect = in_variant  # type: ignore[method-assign]


if PLAN in os.environ:
    _follow(Path(os.environ[PLAN]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=560, help="of everything")
    parser.add_argument("--share", type=float, default=70, help="seconds of a variant")
    parser.add_argument("--work", type=Path, default=Path("/tmp/heavy_tails"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more settings")
    options = parser.parse_args()
    options.end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    from tests.gpu.random_model import write_model

    rows = _run(write_model(options.work / "model", 28, "0.6b"), options)
    with (options.out / "heavy_tails.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "step", *COLUMNS, *PHASES], restval="")
        writer.writeheader()
        writer.writerows(rows)
    return _report(rows, options.variants)


def _run(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train until each variant has had its share of the time; returns one row per step."""
    plan, rundir = options.work / "plan.json", RunDir(options.work / "heavy-tails")
    plan.write_text(json.dumps([options.variants, options.share]))
    command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/gpu-smollm2.yaml", *SETTINGS]
    command += [f"model.path={model}", f"run.name={rundir.path.name}", f"run.root={options.work}"]
    folders = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with (options.out / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options.set],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": folders, PLAN: str(plan)},
        )
        while process.poll() is None and time.monotonic() < options.end - _END_S:
            time.sleep(1)
            steps = _steps(rundir)
            if steps and time.time() - steps[min(steps)]["time"] > options.share * len(options.variants):
                break
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
    if rundir.events.exists():
        (options.out / rundir.events.name).write_bytes(rundir.events.read_bytes())
    for each in rundir.path.glob("attempts/*/*.log"):
        (options.out / f"{each.name}.txt").write_text(each.read_text(errors="replace")[-4_000_000:])
    had = dict(json.loads(line) for line in plan.with_suffix(".steps").read_text().splitlines())
    return [
        {"variant": had[step], "step": step}
        | {column: event.get(column, "") for column in COLUMNS}
        | {phase: event.get("phases", {}).get(phase, "") for phase in PHASES}
        for step, event in sorted(_steps(rundir).items())
    ]


def _steps(rundir: RunDir) -> dict[int, dict[str, Any]]:
    return steps_of(read_events(rundir.events)) if rundir.events.exists() else {}


def _report(rows: list[dict[str, Any]], variants: list[str]) -> int:
    print(
        f"{'variant':26} {'steps':>5} {'s/step':>7} {'rollout':>8} {'update':>7} {'trained tok/s':>13} "
        f"{'age':>5} {'length':>7} {'gpu':>5} {'in rollout':>10}"
    )
    missing = 0
    for name in variants:
        own = [row for row in rows if row["variant"] == name][SKIPPED:]
        if not own:
            print(f"{name:26} too few steps")
            missing = 1
            continue

        def mean(column: str, own: list[dict[str, Any]] = own) -> float:
            values = [float(row[column]) for row in own if row[column] != ""]
            return sum(values) / len(values) if values else float("nan")

        seconds = sum(row["seconds"] for row in own)
        trained = sum(row["response_tokens"] for row in own)
        print(
            f"{name:26} {len(own):5} {seconds / len(own):7.2f} {mean('rollout'):8.2f} {mean('update'):7.2f} "
            f"{trained / seconds:13,.0f} {mean('staleness_mean'):5.2f} "
            f"{mean('response_length_mean'):7.1f} {mean('gpu_utilization'):5.2f} "
            f"{mean('gpu_utilization_rollout'):10.2f}"
        )
    return missing


if __name__ == "__main__":
    sys.exit(main())
