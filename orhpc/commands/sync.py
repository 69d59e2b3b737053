"""``orhpc sync``: send what W&B, TensorBoard and MLflow do not have of runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from orhpc.commands import jobs
from orhpc.commands.run_state import State, existing_run, judge
from orhpc.errors import EXIT_FAILED, EXIT_OK, RunDirBusy
from orhpc.rundir import RunDir
from orhpc.rundir.events import last_events


def add_sync(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument(
        "--tensorboard", action="store_true", help="fill RUN/tensorboard, also if the run did not enable it"
    )
    parser.add_argument("--mlflow", metavar="URI", help="send to this MLflow server")
    parser.set_defaults(run=sync)


def sync(options: argparse.Namespace) -> int:
    """Send the missing rows of every run; returns the highest exit code."""
    runs = [existing_run(path) for path in options.run_dirs]
    for run in runs:
        _require_ended(run)
    code = EXIT_OK
    for run in runs:
        command = [sys.executable, "-m", "orhpc.tracking", str(run.path)]
        command += ["--tensorboard"] if options.tensorboard else []
        command += ["--mlflow", options.mlflow] if options.mlflow is not None else []
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        if status < 0:
            print(f"orhpc: {run.path}: its trackers were ended by signal {-status}", file=sys.stderr)
        code = max(code, status if status >= 0 else EXIT_FAILED)
    return code


def _require_ended(run: RunDir) -> None:
    """Raise RunDirBusy for a run whose own trackers are at work."""
    standing = jobs.Standing.of(run)
    state = judge(run, last_events(run.events), standing.active, answered=standing.answered)
    if state in (State.RUNNING, State.STARTING):
        raise RunDirBusy(f"{run.path} is running, and its own trackers send its rows; sync it afterwards")
