"""The command ``orhpc``: work with configs, environments and run directories."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from orhpc.commands import chat, clean, doctor, export, files, init, jobs, runs, status
from orhpc.commands.plan import main as plan
from orhpc.commands.report import write_report
from orhpc.commands.run_state import existing_run
from orhpc.errors import EXIT_OK, OrhpcError, policy_of
from orhpc.launch.__main__ import main as launch
from orhpc.launch.command_line import without_flags
from orhpc.process.terminal import guarded_output


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; every failure is one line on standard error.

    When the reader closes the pipe (``orhpc status RUN | head -1``), the command ends without a message, with
    the exit code that a shell reports for a process killed by SIGPIPE.
    """
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output again at exit (docs.python.org, "Note on SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _main(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["launch"]:
        return launch(arguments[1:])
    if arguments[:1] == ["plan"]:
        return plan(arguments[1:])
    if arguments[:1] == ["try-env"]:  # in a separate process: this one must not import the SDK
        return subprocess.run(
            [sys.executable, "-m", "orhpc.rollout.try_environment", *arguments[1:]]
        ).returncode
    parser = argparse.ArgumentParser(prog="orhpc", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("launch", help="start or resume a run (orhpc launch --help)")
    commands.add_parser("plan", help="plan ranks and memory without a node (orhpc plan --help)")
    commands.add_parser("try-env", help="run one session of an environment (orhpc try-env --help)")
    runs.add_runs(commands.add_parser("runs", help="list the runs of a folder with their state"))
    status.add_status(commands.add_parser("status", help="show the progress and the jobs of a run"))
    _add_report(commands.add_parser("report", help="write an HTML report of a run"))
    jobs.add_check(commands.add_parser("check", help="check whether a config can run, without using a GPU"))
    jobs.add_fetch(commands.add_parser("fetch", help="download a model into the Hugging Face cache"))
    doctor.add_doctor(commands.add_parser("doctor", help="show what is installed here and what is missing"))
    files.add_files(
        commands.add_parser("files", help="list the packaged configs, batch scripts and GPU pins")
    )
    init.add_init(commands.add_parser("init", help="create an example project for your own task"))
    jobs.add_logs(commands.add_parser("logs", help="print the end of a run's logs"))
    clean.add_clean(commands.add_parser("clean", help="show what fills a run directory, and remove parts"))
    jobs.add_cancel(commands.add_parser("cancel", help="cancel a run's jobs, without requeue"))
    _add_view(commands.add_parser("view", help="print the rollouts of a step"))
    export.add_export(commands.add_parser("export", help="write a commit as a Hugging Face folder"))
    chat.add_chat(commands.add_parser("chat", help="talk with the model of a run"))
    parser.add_argument("--version", action="version", version=f"orhpc {version('orhpc')}")
    options = parser.parse_args(without_flags(arguments) if arguments[:1] == ["check"] else arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    with guarded_output():
        try:
            return run(options)
        except OrhpcError as error:
            print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
            return policy_of(error).exit_code


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="several are compared")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in the first run's directory",
    )
    parser.set_defaults(run=report)


def report(options: argparse.Namespace) -> int:
    """Write a page about one or several runs."""
    print(write_report([existing_run(path) for path in options.run_dirs], options.output))
    return EXIT_OK


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--step", type=int, help="default: the newest recorded step, or the one with --rollout"
    )
    parser.add_argument(
        "--evaluation", type=int, metavar="STEP", help="the evaluation after this step (0: before training)"
    )
    parser.add_argument("--rollout", metavar="ID", help="GROUP.SAMPLE; default: one line per rollout")
    parser.set_defaults(run=view)


def view(options: argparse.Namespace) -> int:
    """Print the rollouts of a step or an evaluation, or the full transcript of one rollout."""
    from orhpc.commands.view import show

    return show(existing_run(options.run_dir), options.step, options.evaluation, options.rollout)


if __name__ == "__main__":
    sys.exit(main())
