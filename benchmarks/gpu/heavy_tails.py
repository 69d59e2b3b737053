"""Heavy-tailed response lengths on one GPU with SGLang: synchronous steps against partial rollouts.

    python benchmarks/gpu/heavy_tails.py --out DIR [--variants synchronous "staleness 4"] [--seconds 560]

Every variant is ``python -m orhpc.launch --local configs/gpu-smollm2.yaml`` with a random model of
Qwen3-0.6B's shape, 32 prompts x 8 rollouts, and an agent that ends each rollout after a number of tokens of
its own: lognormal, median 256, p99 / p50 = 8, at most 3,072, the same for a rollout in all variants.  The
variants run one after the other, each for an equal share of the time.  DIR gets ``heavy_tails.csv`` with a
row per step, and the logs; the table at the end leaves out the first SKIPPED steps, in which kernels compile
and rollouts of earlier steps are missing.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.rollout.agent import AgentContext, run_rollout  # noqa: E402
from orhpc.rollout.transcript import RolloutRequest  # noqa: E402
from orhpc.rundir import RunDir  # noqa: E402
from orhpc.rundir.events import read_events, steps_of  # noqa: E402
from orhpc.types import Rollout  # noqa: E402

MEDIAN, MOST = 256, 3072
SIGMA = math.log(8) / 2.3263
SKIPPED = 4
VARIANTS: dict[str, list[str]] = {
    "synchronous": [],
    "staleness 1": ["rollout.max_staleness=1"],
    "staleness 4": ["rollout.max_staleness=4"],
    "staleness 4, regenerated": ["rollout.max_staleness=4", "rollout.stale_tokens=regenerate"],
    "staleness 4, all trained": ["rollout.max_staleness=4", "rollout.stale_tokens=train"],
}
SETTINGS = [
    "rollout.batch_size=32",
    "rollout.n_samples=8",
    f"rollout.max_response_tokens={MOST}",
    "rollout.max_total_tokens=4096",
    "rollout.custom_agent=benchmarks.gpu.heavy_tails:agent",
    "rollout.custom_reward=tests.gpu.random_model:even_tokens",
    "model.chat_format=chatml",
    "engine.context_length=4200",
    "engine.memory_fraction=0.5",
    "train.lr=1e-6",
    "train.steps=200",
    "train.max_tokens_per_gpu=32768",
    "train.gradient_checkpointing=true",
    "checkpoint.save_interval=null",
    "wandb.enabled=false",
]
COLUMNS = (
    "seconds", "response_tokens", "total_tokens", "response_length_mean", "stale_tokens", "staleness_mean",
    "dropped_stale", "gpu_utilization", "gpu_utilization_rollout",
)  # fmt: skip
PHASES = ("rollout", "update", "sync")
_END_S = 60.0


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--work", type=Path, default=Path("/tmp/heavy_tails"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more settings of all runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    from tests.gpu.random_model import write_model

    model = write_model(options.work / "model", 28, "0.6b")
    end, rows = time.monotonic() + options.seconds, []
    for number, name in enumerate(options.variants):
        share = (end - time.monotonic()) / (len(options.variants) - number)
        rows += _run(name, model, share, options)
        with (options.out / "heavy_tails.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["variant", "step", *COLUMNS, *PHASES], restval="")
            writer.writeheader()
            writer.writerows(rows)
    return _report(rows, options.variants)


def _run(name: str, model: Path, seconds: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train for a number of seconds; returns one row per step."""
    run = name.replace(" ", "-").replace(",", "")
    command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/gpu-smollm2.yaml", *SETTINGS]
    command += [f"model.path={model}", f"run.name={run}", f"run.root={options.work}"]
    folders = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with (options.out / f"{run}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *VARIANTS[name], *options.set],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": folders},
        )
        try:
            process.wait(max(30.0, seconds - 25))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
    path = RunDir(options.work / run)
    for each in path.path.glob("attempts/*/*.log"):
        (options.out / f"{run}_{each.name}.txt").write_text(each.read_text(errors="replace")[-4_000_000:])
    steps = steps_of(read_events(path.events)) if path.events.exists() else {}
    return [
        {"variant": name, "step": step}
        | {column: event.get(column, "") for column in COLUMNS}
        | {phase: event.get("phases", {}).get(phase, "") for phase in PHASES}
        for step, event in sorted(steps.items())
    ]


def _report(rows: list[dict[str, Any]], variants: list[str]) -> int:
    print(
        f"{'variant':26} {'steps':>5} {'s/step':>7} {'rollout':>8} {'update':>7} {'trained tok/s':>13} "
        f"{'stale':>6} {'age':>5} {'length':>7} {'gpu':>5} {'in rollout':>10}"
    )
    missing = 0
    for name in variants:
        own = [row for row in rows if row["variant"] == name and row["step"] > SKIPPED]
        if not own:
            print(f"{name:26} too few steps")
            missing = 1
            continue

        def mean(column: str, own: list[dict[str, Any]] = own) -> float:
            values = [float(row[column]) for row in own if row[column] != ""]
            return sum(values) / len(values) if values else float("nan")

        seconds = sum(row["seconds"] for row in own)
        masks = "all trained" not in name
        trained = sum(
            row["response_tokens"] * (1 - (float(row["stale_tokens"] or 0) if masks else 0)) for row in own
        )
        print(
            f"{name:26} {len(own):5} {seconds / len(own):7.2f} {mean('rollout'):8.2f} {mean('update'):7.2f} "
            f"{trained / seconds:13,.0f} {mean('stale_tokens'):6.3f} {mean('staleness_mean'):5.2f} "
            f"{mean('response_length_mean'):7.1f} {mean('gpu_utilization'):5.2f} "
            f"{mean('gpu_utilization_rollout'):10.2f}"
        )
    return missing


if __name__ == "__main__":
    sys.exit(main())
