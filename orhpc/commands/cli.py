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
from orhpc.commands.run_state import RUN_HELP, existing_run
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
    parser = _parser()
    options = parser.parse_args(without_flags(arguments) if arguments[:1] == ["check"] else arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    with guarded_output():
        try:
            return run(options)
        except OrhpcError as error:
            print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
            return policy_of(error).exit_code


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands, in the order in which they are met."""
    parser = argparse.ArgumentParser(
        prog="orhpc",
        description="Work with configs, environments and run directories.",
        epilog="orhpc COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"orhpc {version('orhpc')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, add_arguments: Callable[[argparse.ArgumentParser], None] | None, text: str) -> None:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if add_arguments is not None:
            add_arguments(command)

    # Those without arguments here parse their own: see _main.
    add("init", init.add_init, "create an example project for your own task")
    add("try-env", None, "play one session of an environment yourself")
    add("doctor", doctor.add_doctor, "show what is installed here and what is missing")
    add("files", files.add_files, "list the packaged configs, batch scripts and GPU pins")
    add("fetch", jobs.add_fetch, "download a model into the Hugging Face cache")
    add("plan", None, "compute ranks and memory of a config, without a node")
    add("check", jobs.add_check, "check whether a config can run, without using a GPU")
    add("launch", None, "start or resume a run, as a SLURM job or here")
    add("runs", runs.add_runs, "list the runs of a folder with their state")
    add("status", status.add_status, "show what a run is doing, its progress and its jobs")
    add("logs", jobs.add_logs, "print the end of a run's logs")
    add("report", _add_report, "draw one or several runs on an HTML page")
    add("view", _add_view, "print the rollouts of a step")
    add("cancel", jobs.add_cancel, "cancel a run's jobs, without requeue")
    add("export", export.add_export, "write a commit as a Hugging Face folder")
    add("chat", chat.add_chat, "talk with the model of a run")
    add("clean", clean.add_clean, "show what fills a run directory, and remove parts of it")
    return parser


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
    from orhpc.commands.report import write_report  # loads h5py, which other commands do without

    print(write_report([existing_run(path) for path in options.run_dirs], options.output))
    return EXIT_OK


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
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
