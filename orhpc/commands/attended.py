"""Runs of commands that print a table at the end: started here, or as a job whose events are printed."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from orhpc.commands.jobs import Standing
from orhpc.config.files import load_config
from orhpc.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, ConfigError
from orhpc.launch.__main__ import submit
from orhpc.launch.command_line import HELP, add_nodes
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import Tail, read_events, steps_of

QUIET = (
    "evaluation.interval=0", "wandb.enabled=false", "tensorboard.enabled=false", "mlflow.enabled=false",
    "notify.events=[]", "rollout.openreward_upload=false",
)  # fmt: skip
"""Overrides of a run that is no experiment: it evaluates nothing and sends no reports."""
_POLL_S = 5.0
_NO_PROGRESS = 3
"""Starts in a row without progress, after which a local run ends."""


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the arguments that these commands share; ``what``: a run of the command, in words."""
    parser.epilog = HELP
    parser.add_argument(
        "arguments", nargs="*", metavar="CONFIG | key=value | RUN",
        help=f"a YAML file, then overrides; with --table, the run directory of a {what}",
    )  # fmt: skip
    add_nodes(parser)
    parser.add_argument("--local", action="store_true", help="run here, in the foreground, without SLURM")
    parser.add_argument(
        "--no-wait", action="store_true", help="submit the job, and leave the table for later"
    )
    parser.add_argument("--table", action="store_true", help=f"print the table of a {what} again")


def check_arguments(options: argparse.Namespace) -> None:
    """Raise ConfigError for arguments of :func:`add_arguments` that contradict each other."""
    if options.table and len(options.arguments) != 1:
        raise ConfigError("--table: name one run directory")
    if options.local and options.no_wait:
        raise ConfigError("--no-wait: --local runs in the foreground")


def refuse_finished(run: RunDir, what: str, command: str) -> NoReturn:
    """Raise ConfigError: the run is finished, so that its command has nothing to do."""
    raise ConfigError(
        f"run.name: {run.path} holds a finished {what} (orhpc {command} --table prints it); remove the "
        "folder to repeat it"
    )


def attend(
    command: str, options: argparse.Namespace, path: str, words: Sequence[str], run: RunDir,
    show: Callable[[RunDir], int],
) -> int:  # fmt: skip
    """Start a run, wait for its end unless ``--no-wait`` is given, and return what ``show`` returns.

    ``command``: its name; ``path`` and ``words``: the config and its overrides.
    """
    if options.local:
        code = run_here(command, path, words, run)
        has_begun = run.events.is_file()  # otherwise its own message says why not
        return show(run) if has_begun and code != EXIT_REQUEUE else code
    submit(load_config(path, words), path, list(words))
    if options.no_wait:
        print(f"  orhpc {command} --table {shlex.quote(str(run.path))}")
        return EXIT_OK
    wait(run)
    return show(run)


def write_table(run: RunDir, name: str, text: str) -> None:
    """Write a table to the run directory, if it can be written: another user's or an archive's cannot."""
    try:
        write_atomic(run.path / name, text + "\n")
    except OSError as error:
        print(f"orhpc: {run.path} cannot be written ({error.strerror}): no new {name}", file=sys.stderr)


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
    events = Tail(run.events)
    while True:
        ended = Standing.of(run).ended
        for event in events.new():
            line = event.get("reason") if event["event"] == "notice" else line_of(event)
            if line is not None:
                print(line, flush=True)
        if ended:
            return
        time.sleep(_POLL_S)
