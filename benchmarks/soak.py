"""Run the tiny config for many steps with random faults, and check that nothing is lost.

    python -m benchmarks.soak [--seed 7] [--steps 200] [--faults 24] [--kinds A,B] [--out TABLE.md]

``orhpc drill --random`` draws the faults and starts the run again where SLURM would requeue it.  Afterwards
the events, the ledger of prompts, the records and the processes of this machine are checked:

* the run came back after every fault and made every step;
* no commit was lost: each start continued from the newest commit, or from a newer copy in memory;
* every group of prompts was trained once or dropped for a reason, and no failed rollout was trained;
* trainer and engines agreed on every step's log-probabilities, so no engine served old or mixed weights;
* no process, no node-local file and no shared memory of the run is left.

The table, the checks and the share of the time that trained are printed; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from orhpc.commands.goodput import account_of
from orhpc.launch.node import scratch
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import read_step
from orhpc.rundir.trained import read_trained
from orhpc.types import RolloutEnd

CONFIG = "configs/tiny.yaml"
LARGEST_DIFFERENCE = 1e-3
"""Of a token's log-probability between trainer and engine, in nats; in float32 both agree to 1e-5."""
GONE_S = 60.0
"""Seconds after the end within which every process must have ended."""


def lost_commits(events: list[dict[str, Any]]) -> Iterator[str]:
    """Starts that went back before a commit."""
    newest = 0
    for event in events:
        if event["event"] == "commit":
            newest = max(newest, event["step"])
        elif event["event"] == "bring_up" and event["step"] < newest:
            yield f"attempt {event['attempt']} started from step {event['step']}, before commit {newest}"


def differing_steps(events: list[dict[str, Any]]) -> Iterator[str]:
    """Steps in which trainer and engine disagreed, and steps that are missing."""
    steps = steps_of(events)
    for number in range(1, max(steps, default=0) + 1):
        if number not in steps:
            yield f"step {number} was not made"
        elif not steps[number].get("logprob_diff_max", 0.0) < LARGEST_DIFFERENCE:
            yield f"step {number}: trainer and engine differ by {steps[number]['logprob_diff_max']} nats"


def poisoned(run: RunDir) -> Iterator[str]:
    """Trained rollouts that failed or have no finite reward, by the records of the steps."""
    for folder in sorted(run.path.glob("rollouts/step_*")):
        by_id = {rollout.id: rollout for rollout in read_step(folder, trained_only=False)}
        for name in read_trained(folder):
            rollout = by_id.get(name)
            if rollout is None:
                yield f"{folder.name}: {name} was trained and is not recorded"
            elif rollout.end is RolloutEnd.FAILED or rollout.reward is None:
                yield f"{folder.name}: {name} was trained, ended {rollout.end}, reward {rollout.reward}"


def leaked(root: Path, before: set[Path]) -> Iterator[str]:
    """Processes of the run that are left, and new shared memory of runs that have ended."""
    end = time.monotonic() + GONE_S
    while (left := list(processes_of(root))) and time.monotonic() < end:
        time.sleep(1.0)
    yield from left
    yield from map(str, sorted(shared_memory() - before))


def processes_of(root: Path) -> Iterator[str]:
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if str(root) in words and process.pid != os.getpid():
            yield f"process {process.pid}: {words[:100]}"


def shared_memory() -> set[Path]:
    """Folders and files of shared memory whose owner has ended."""
    folder = Path("/dev/shm")
    makers = {file: file.name.split("_")[1] for file in folder.glob("torch_*_*_*")}
    dead = {file for file, maker in makers.items() if not Path(f"/proc/{maker}").exists()}
    return scratch.abandoned(folder, scratch.STATE_PREFIX) | dead


def soak(options: argparse.Namespace, root: Path) -> int:
    before = shared_memory()
    command = [
        sys.executable, "-m", "orhpc.commands.cli", "drill", CONFIG, "--local", f"run.root={root}",
        "--random", str(options.faults), "--steps", str(options.steps), "--seed", str(options.seed),
    ]  # fmt: skip
    command += ["--faults", options.kinds] if options.kinds else []
    began = time.monotonic()
    code = subprocess.run(command).returncode
    seconds = time.monotonic() - began
    (path,) = root.iterdir()
    run = RunDir(path)
    events = read_events(run.events)
    checks = {
        "came back after every fault, and the ledger of prompts balances": [] if code == 0 else ["see above"],
        "no committed step was lost": list(lost_commits(events)),
        "trainer and engines agreed in every step": list(differing_steps(events)),
        "no failed rollout was trained": list(poisoned(run)),
        "no process and no shared memory is left": list(leaked(root, before)),
    }
    lines = [f"- {'**failed**' if found else 'yes'}: {what}" for what, found in checks.items()]
    account = account_of(run, events)
    assert account is not None
    lines.append(f"- {max(steps_of(events))} steps in {seconds / 60:.1f} minutes; {account.line()}")
    table = (path / "drill.md").read_text().partition("\n\n")[0] if (path / "drill.md").exists() else ""
    text = "\n".join([table, "", *lines])
    print("\n".join(lines))
    for what, found in checks.items():
        for problem in found:
            print(f"{what}: {problem}", file=sys.stderr)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return int(any(checks.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=24)
    parser.add_argument("--kinds", help="faults to draw from; default: the usual ones of a drill")
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--keep", type=Path, help="an empty folder for the run; default: a temporary one")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return soak(options, options.keep)
    with tempfile.TemporaryDirectory(prefix="orhpc-soak-") as folder:
        return soak(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
