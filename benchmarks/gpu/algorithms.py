"""Train the same model on the same tasks with several algorithms on one GPU, and compare what they learn.

    python benchmarks/gpu/algorithms.py --out DIR --algorithms grpo rloo [--steps 50] [--gguf FILE]

Every run is ``python -m orhpc.launch --local configs/gpu-smollm2.yaml`` with the settings of ALGORITHMS, the
same seed and the same tasks.  Runs that are named together share the GPU, so their seconds are not
comparable; their rewards are.  DIR gets ``curves.csv`` (algorithm, step, sampled tokens so far, mean reward,
evaluation), and of the first run ``run.tgz``: its directory without checkpoints.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.rundir import RunDir  # noqa: E402
from orhpc.rundir.events import read_events, steps_of  # noqa: E402
from tests.gpu.sglang_models import smollm2  # noqa: E402

ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": [
        "algorithm.normalise_advantage=false",
        "algorithm.normalise_loss=constant",
        "algorithm.normalise_length=48",
    ],
    "rloo": ["algorithm.advantage=leave_one_out", "algorithm.normalise_advantage=false"],
    "reinforce_pp": ["algorithm.advantage=batch", "algorithm.normalise_loss=token"],
    "reinforce_pp_baseline": ["algorithm.advantage=group_then_batch", "algorithm.normalise_loss=token"],
    "dapo": [
        "algorithm.eps_clip_high=0.28",
        "algorithm.normalise_loss=token",
        "rollout.filter=equal_rewards",
        "algorithm.overlong={max_tokens: 48, buffer_tokens: 16}",
    ],
    "gspo": ["algorithm.loss=gspo", "algorithm.eps_clip=3e-4", "algorithm.eps_clip_high=4e-4"],
    "ppo": ["algorithm.advantage=ppo", "algorithm.normalise_loss=token"],
    "cispo": ["algorithm.loss=cispo", "algorithm.normalise_loss=token"],
}
EVALUATION = [
    "evaluation.interval=10",
    "evaluation.splits={orhpc/arithmetic: [test]}",
    "evaluation.num_samples=128",
    "evaluation.sampling.temperature=0",
]
_END_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct, where nothing can be downloaded")
    parser.add_argument("--work", type=Path, default=Path("/tmp/algorithms"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more settings of all runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    smollm2(options.gguf)
    end = time.monotonic() + options.seconds
    running = {name: _start(name, options) for name in options.algorithms}
    try:
        while any(p.poll() is None for p in running.values()) and time.monotonic() < end:
            time.sleep(2)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in running.values():
            process.wait(_END_S)
        _report(options)
    return max(p.returncode for p in running.values())


def _start(name: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    fraction = 0.4 if len(options.algorithms) == 1 else 0.5 / len(options.algorithms)
    overrides = [f"run.name={name}", f"run.root={options.work}", f"train.steps={options.steps}"]
    overrides += [f"engine.memory_fraction={fraction:.2f}", "wandb.enabled=false"]
    command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/gpu-smollm2.yaml"]
    options.work.mkdir(parents=True, exist_ok=True)
    with (options.out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *overrides, *EVALUATION, *ALGORITHMS[name], *options.set],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )


def _report(options: argparse.Namespace) -> None:
    rows = [row for name in options.algorithms for row in _rows(name, options.work / name)]
    with (options.out / "curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["algorithm", "step", "tokens", "reward_mean", "evaluation"])
        writer.writeheader()
        writer.writerows(rows)
    run = options.work / options.algorithms[0]
    if run.is_dir():
        with tarfile.open(options.out / "run.tgz", "w:gz") as archive:
            archive.add(run, run.name, filter=_without_weights)
    print(f"{'algorithm':24} {'steps':>5} {'tokens':>9} {'reward 1-5':>10} {'last 5':>7} evaluations")
    for name in options.algorithms:
        own = [row for row in rows if row["algorithm"] == name]
        rewards = [row["reward_mean"] for row in own if row["reward_mean"] != ""]
        if not rewards:
            print(f"{name:24} no step")
            continue
        first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
        evaluations = " ".join(f"{row['evaluation']:.2f}" for row in own if row["evaluation"] != "")
        print(f"{name:24} {len(rewards):5} {own[-1]['tokens']:9.0f} {first:10.3f} {last:7.3f} {evaluations}")


def _without_weights(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if {"checkpoints", "buffer", "exchange"} & set(Path(entry.name).parts) else entry


def _rows(name: str, path: Path) -> list[dict[str, Any]]:
    """One row per step, with the evaluation after it."""
    events = read_events(RunDir(path).events)
    evaluations = {
        e["step"]: next((v for k, v in e.items() if k.startswith("reward_mean")), "")
        for e in events
        if e["event"] == "evaluation"
    }
    rows: list[dict[str, Any]] = []
    tokens = 0.0
    steps: dict[int, dict[str, Any]] = {0: {}} | steps_of(events)
    for step, event in sorted(steps.items()):
        tokens += event.get("response_tokens", 0.0)
        reward = event.get("reward_mean", "")
        row = {"algorithm": name, "step": step, "tokens": tokens, "reward_mean": reward}
        rows.append(row | {"evaluation": evaluations.get(step, "")})
    print(json.dumps({"algorithm": name, **{k: v for k, v in steps[max(steps)].items() if "gpu_" in k}}))
    return rows


if __name__ == "__main__":
    sys.exit(main())
