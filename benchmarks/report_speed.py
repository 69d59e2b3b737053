"""Time ``orhpc report`` on a run of 10,000 steps and 100,000 recorded rollouts, four attempts, every metric.

python benchmarks/report_speed.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orhpc.rundir import RunDir
from orhpc.rundir.metrics import METRICS
from orhpc.rundir.record import write_rollouts
from tests.unit.rundir.test_record import make_rollout

STEPS, ATTEMPTS, RECORDED, ROLLOUTS = 10_000, 4, 1_000, 100
PHASES = {"rollout": 10.0, "update": 8.0, "record": 0.2, "sync": 1.0, "checkpoint": 0.1}


def make(folder: Path) -> RunDir:
    """Write the run: a line for each step, and ``RECORDED`` steps with rollouts."""
    run, random_ = RunDir(folder / "runs" / "big"), random.Random(0)
    run.create()
    run.config.write_text("train: {steps: 10000}\n")
    clock, attempt, lines = 1.7e9, 0, []
    for step in range(1, STEPS + 1):
        if step % (STEPS // ATTEMPTS) == 1:
            attempt = run.begin_attempt(kind="local")
            for event in ("bring_up", "ready"):
                lines.append({"event": event, "time": clock, "attempt": attempt, "step": step - 1})
                clock += 60
        clock += 20
        numbers = {name: 0.1 + random_.random() for name in METRICS}
        fields = {"step": step, "steps": STEPS, "seconds": 19.3, "phases": PHASES}
        lines.append({"event": "step", "time": clock, "attempt": attempt, **fields, **numbers})
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rollouts = [make_rollout(i // 10, i % 10, 60, reward=(i % 10) / 10) for i in range(ROLLOUTS)]
    for step in range(1, STEPS + 1, STEPS // RECORDED):
        write_rollouts(run.rollouts_of(step) / "a001.worker_000.h5", rollouts)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        run = make(Path(folder))
        command = [sys.executable, "-m", "orhpc.commands.cli", "report", str(run.path)]
        for _ in range(repeats):
            load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
            begun = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            size = (run.path / "report.html").stat().st_size
            print(f"{wall:.2f} s, of the processor {cpu:.2f} s, load {load:.1f}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
