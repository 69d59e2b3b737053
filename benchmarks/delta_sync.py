"""Weight syncs over a slow link: of all weights, and of those that a step has changed.

    python -m benchmarks.delta_sync [--rates 1,10] [--lrs 1e-6,3e-5] [--steps 6]   # as root, with iproute2

For each learning rate, runs of SmolLM2-135M in bfloat16 (the bundled model on CPU cores, a trainer and an
engine with a device each) sync over the loopback interface of a network namespace, limited to a number of
Gbit/s.  ``engine.check_weights`` compares the engine with an export after every sync, outside of the seconds.
Medians from the first sync on that sends changes.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.train.weights.deltas import WHOLE_SYNCS

CONFIG = "configs/local.yaml"
SETTINGS = (
    "model.dtype=bfloat16", "placement.mode=split", "placement.devices_per_node=2",
    "placement.trainer_devices=1", "rollout.batch_size=2", "rollout.n_samples=2", "train.global_batch_size=4",
    "train.lr_schedule=constant", "evaluation.interval=0", "checkpoint.save_interval=null",
    "engine.check_weights=true", "wandb.enabled=false",
    # Answers to sums are mostly wrong at first, and equal rewards would change no weight.
    "rollout.custom_reward=tests.gpu.random_model:even_tokens",
)  # fmt: skip
FIRST_DELTA = WHOLE_SYNCS + 1
"""Step from which all syncs are of changes."""


class Sync(NamedTuple):
    """Medians of a run's syncs."""

    nbytes: float
    seconds: float


def measured(folder: Path, rate: float, lr: str, steps: int, *, delta: bool) -> Sync:
    """Run once; raises CalledProcessError if the run fails."""
    launch = [
        sys.executable, "-m", "orhpc.launch", "--local", CONFIG, *SETTINGS, f"run.root={folder}",
        "run.name=run", f"train.lr={lr}", f"train.steps={steps}", f"engine.delta_sync={str(delta).lower()}",
    ]  # fmt: skip
    limit = f"tc qdisc replace dev lo root tbf rate {rate}gbit burst 4mb latency 400ms"
    within = f"ip link set lo up && {limit} && exec {shlex.join(launch)}"
    command = ["unshare", "--net", "sh", "-c", within]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        done.check_returncode()
    found = steps_of(read_events(RunDir(folder / "run").events))
    counted = [step for number, step in found.items() if number >= FIRST_DELTA and "sync_bytes" in step]
    return Sync(
        statistics.median(step["sync_bytes"] for step in counted),
        statistics.median(step["sync_seconds_total"] - step["sync_seconds_check"] for step in counted),
    )


def rows(rates: list[float], lrs: list[str], steps: int) -> Iterator[str]:
    """Yield the table as the runs end."""
    yield "| Gbit/s | learning rate | all weights | what has changed | bytes | seconds |"
    yield "|---|---|---|---|---|---|"
    for rate in rates:
        for lr in lrs:
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
                whole = measured(Path(one), rate, lr, steps, delta=False)
                delta = measured(Path(other), rate, lr, steps, delta=True)
            yield (
                f"| {rate:g} | {lr} | {whole.nbytes / 1e6:.1f} MB in {whole.seconds:.2f} s "
                f"| {delta.nbytes / 1e6:.1f} MB in {delta.seconds:.2f} s "
                f"| {whole.nbytes / delta.nbytes:.1f}x fewer | {whole.seconds / delta.seconds:.1f}x shorter |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1,10", help="Gbit/s, comma-separated")
    parser.add_argument("--lrs", default="1e-6,3e-5", help="learning rates, comma-separated")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    rates = [float(rate) for rate in options.rates.split(",")]
    for row in rows(rates, options.lrs.split(","), options.steps):
        print(row, flush=True)


if __name__ == "__main__":
    main()
