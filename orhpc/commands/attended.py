"""Start a run for a command that reports its result: here, or as a job whose events it prints."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from orhpc.commands.jobs import Standing
from orhpc.errors import EXIT_FAILED, EXIT_REQUEUE
from orhpc.rundir import RunDir
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import read_events, steps_of

QUIET = (
    "evaluation.interval=0", "wandb.enabled=false", "tensorboard.enabled=false", "mlflow.enabled=false",
    "notify.events=[]", "rollout.openreward_upload=false",
)  # fmt: skip
"""Overrides of a run that is no experiment: it evaluates nothing and sends no reports."""
_POLL_S = 5.0
_NO_PROGRESS = 3
"""Starts in a row without progress, after which a local run ends."""


def run_here(what: str, path: str, words: Sequence[str], run: RunDir) -> int:
    """Start a run again whenever it ends as SLURM would requeue it; returns the last exit code.

    ``what``: the command's name, for messages; ``path`` and ``words``: the config and its overrides.
    """
    command = [sys.executable, "-m", "orhpc.launch", "--local", path, *words]
    idle = 0
    while True:
        before = _progress(run)
        code, stopped = _run_once(command)
        idle = 0 if _progress(run) > before else idle + 1
        if stopped:
            return EXIT_REQUEUE
        if code not in (EXIT_FAILED, EXIT_REQUEUE) and code >= 0:
            return code
        if idle >= _NO_PROGRESS:
            return EXIT_FAILED
        ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        print(f"{what}: the run ended {ended}; starting it again, as SLURM would", flush=True)
        time.sleep(1.0)  # its processes end with it, and the kernel needs a moment for that


def _run_once(command: Sequence[str]) -> tuple[int, bool]:
    """Run a command; returns its exit status, and whether a person has ended it.

    A terminal's Ctrl-C reaches the command as well, and SIGTERM is forwarded: it commits and exits.
    """
    received: list[int] = []
    with subprocess.Popen(command) as child:

        def forward(number: int, frame: object) -> None:
            received.append(number)
            if number == signal.SIGTERM:
                child.send_signal(number)

        handlers = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            return child.wait(), bool(received)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _progress(run: RunDir) -> int:
    """The newest step, and the number of measured candidates."""
    events = read_events(run.events)
    return max(steps_of(events), default=0) + sum(e["event"] == "candidate" for e in events)


def wait(run: RunDir) -> None:
    """Print what happens until no job of the run is left."""
    shown = 0
    while True:
        ended = Standing.of(run).ended
        events = read_events(run.events)
        for event in events[shown:]:
            line = event.get("reason") if event["event"] == "notice" else line_of(event)
            if line is not None:
                print(line, flush=True)
        shown = len(events)
        if ended:
            return
        time.sleep(_POLL_S)
