"""Failures of one of two GPUs in a run on both; measure what each costs.

    python benchmarks/gpu/recovery_two_gpus.py --out DIR [--gguf FILE] [--seconds 560]

Two runs of SmolLM2-135M (configs/gpu-smollm2.yaml) with an engine and an FSDP rank on each GPU, and no commit
before the last step:

* ``faults``: one trainer is killed during an update; another process takes so much of the first GPU, and then
  of the second, that an update runs out of memory there, while the other rank waits in a collective of NCCL;
  and finally one multiplies matrices on the second GPU, until the run reports the slow rank.
* ``replay``: trains on the recorded rollouts of the first steps, undisturbed: its gradient norms must be
  those of the disturbed steps, up to rounding.

DIR gets ``recovery_two_gpus.json`` and the events.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.recovery import (  # noqa: E402
    KILLED,
    OtherProcess,
    Run,
    gradients,
    killed_in_update,
    memory_taken,
)
from orhpc.rundir import RunDir  # noqa: E402
from tests.gpu.sglang_models import smollm2  # noqa: E402

BUSY = """
import torch
a = torch.full((8192, 8192), 1e-4, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    for _ in range(20):
        torch.mm(a, a)
    torch.cuda.synchronize()
"""
"""Keeps a GPU busy."""
REPLAYED = 12
"""Steps that are repeated without faults."""
PLACES = ("placement.devices_per_node=2", "train.steps=1000")


def faults(run: Run) -> list[dict[str, Any]]:
    """Inject the faults one after the other, each after two undisturbed steps; one row each."""
    first, second = OtherProcess(0), OtherProcess(1)
    rows = []
    for cause in (
        lambda: killed_in_update(run, 4),
        lambda: memory_taken(run, 6, first),
        lambda: memory_taken(run, 9, second),
        lambda: _slowed(run, REPLAYED),
    ):
        rows.append(cause())
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _slowed(run: Run, after: int) -> dict[str, Any]:
    """Another process computes on the second GPU until the run names the rank."""
    step = run.next_step(after)
    began = time.time()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    ) as busy:
        try:
            named = run.after(step, "slow_rank")
        finally:
            busy.kill()
    ratios = [(e["time"], e["slowest_rank_ratio"]) for e in run.events() if "slowest_rank_ratio" in e]
    before = [ratio for at, ratio in ratios if at < began]
    return {
        "fault": "another process computes on a GPU",
        "rank": named["rank"],
        "ratio": named["ratio"],
        "named_after_s": named["time"] - began,
        "ratio_before": statistics.median(before),
        "highest_ratio_before": max(before),
        "ratio_while_busy": statistics.median(ratio for at, ratio in ratios if at > began),
        "steps_while_busy": sum(at > began for at, _ in ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct, where nothing can be downloaded")
    parser.add_argument("--work", type=Path, default=Path("/tmp/recovery_two_gpus"))
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="more settings of all runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    options.end = time.monotonic() + options.seconds
    found: dict[str, Any] = {}
    smollm2(options.gguf)
    try:
        _measure(options, found)
    finally:
        (options.out / "recovery_two_gpus.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found, indent=1))
        for name in ("faults", "replay"):
            rundir = RunDir(options.work / name)
            if rundir.events.exists():
                shutil.copy(rundir.events, options.out / f"two_gpus_{name}.jsonl")
            for log in rundir.path.glob("attempts/*/*.log"):
                tail = log.read_text(errors="replace")[-400_000:]
                (options.out / f"two_gpus_{name}_{log.name}.txt").write_text(tail)
    return 0


def _measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    run = Run("faults", options, *PLACES, KILLED)
    try:
        found["faults"] = faults(run)
    finally:
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(90)
    recorded = f"train.replay_rollouts={run.rundir.rollouts}"
    again = Run("replay", options, *PLACES, f"train.steps={REPLAYED}", recorded)
    again.finish()
    differences = gradients(run.rundir, again.rundir)
    hit = {each["next_step"] for each in found["faults"] if "next_step" in each}
    found["gradients"] = {
        "disturbed": {n: differences.get(n) for n in sorted(hit)},
        "others_max": max(d for n, d in differences.items() if n not in hit),
    }


if __name__ == "__main__":
    sys.exit(main())
