"""The command ``orhpc``: work with configs, environments and run directories."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from orhpc.commands import (
    chat,
    clean,
    completion,
    doctor,
    drill,
    export,
    files,
    init,
    jobs,
    logs,
    runs,
    serve,
    simulate,
    status,
    sweep,
    sync,
    tune,
    view,
)
from orhpc.commands.packages import need
from orhpc.commands.plan import add_plan
from orhpc.commands.plan import main as plan
from orhpc.commands.programs import run_program
from orhpc.commands.run_state import existing_run
from orhpc.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConfigError, OrhpcError, policy_of
from orhpc.launch.__main__ import add_launch
from orhpc.launch.__main__ import main as launch
from orhpc.launch.command_line import engine_options, own_options, without_flags
from orhpc.process.terminal import discard_output, guarded_output, safe
from orhpc.rollout.try_options import add_prepare_tasks, add_try_env

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Error numbers of a full or lost filesystem, to which standard output is redirected."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; every failure is one line on standard error.

    When the reader closes the pipe (``orhpc status RUN | head -1``), the command ends without a message, with
    the exit code that a shell reports for a process killed by SIGPIPE.
    """
    _open_closed_streams()
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        discard_output()
        print(f"orhpc: the output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return code


def _open_closed_streams() -> None:
    """Open the standard streams that the caller has closed (``>&-``).

    Otherwise the next file that is opened has the number of standard output, and programs write into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _main(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["launch"]:  # its display draws, so that it guards its own output
        return _reported(lambda: launch(arguments[1:]))
    if arguments[:1] == ["plan"]:
        return _reported(lambda: plan(arguments[1:]))
    with guarded_output():
        return _reported(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["try-env"], ["prepare-tasks"]):
        return _with_environments(arguments[0], arguments[1:])
    options = _options(parser_of_all(), [*arguments[:1], *_converted(arguments[:1], arguments[1:])])
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _reported(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print a failure as one line."""
    try:
        return command()
    except OrhpcError as error:
        print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
        return policy_of(error).exit_code
    except OSError as error:
        if error.filename is None:  # of standard output, or a defect of ours
            raise
        print(f"orhpc: {safe(str(error.filename))}: {error.strerror}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _with_environments(command: str, arguments: Sequence[str]) -> int:
    """Run a command in a separate process: this one must not import the SDK."""
    need("aiohttp", "numpy", "openreward")
    module = {"try-env": "try_environment", "prepare-tasks": "prepare_tasks"}[command]
    return run_program([sys.executable, "-m", f"orhpc.rollout.{module}", *arguments])


def _options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    options, rest = parser.parse_known_args(arguments)
    if rest and hasattr(options, "arguments") and not any(word.startswith("-") for word in rest):
        # argparse gives only the words before the first option to a parameter that takes any number of them.
        options.arguments += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _converted(command: list[str], arguments: list[str]) -> list[str]:
    """The arguments of a command, without flags of other projects where it reads settings."""
    if command == ["serve"]:
        return engine_options(arguments)
    reads = {
        "check": jobs.add_check,
        "sweep": sweep.add_sweep,
        "drill": drill.add_drill,
        "tune": tune.add_tune,
    }
    add_arguments = reads.get("".join(command))
    return arguments if add_arguments is None else without_flags(arguments, own_options(add_arguments))


def parser_of_all() -> argparse.ArgumentParser:
    """The parser of all commands, in the order in which they are met."""
    parser = argparse.ArgumentParser(
        prog="orhpc",
        description="Work with configs, environments and run directories.",
        epilog="orhpc COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"orhpc {version('orhpc')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, add_arguments: Callable[[argparse.ArgumentParser], None], text: str) -> None:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_arguments(command)

    # launch, plan, try-env and prepare-tasks have separate parsers: see _main.
    add("init", init.add_init, "create an example project for your own task")
    add("try-env", add_try_env, "play one session of an environment yourself")
    add("prepare-tasks", add_prepare_tasks, "write the tasks of a config's environments as a task file")
    add("doctor", doctor.add_doctor, "show what is installed here and what is missing")
    add("files", files.add_files, "list the packaged configs, batch scripts and GPU pins")
    add("fetch", jobs.add_fetch, "download a model into the Hugging Face cache")
    add("plan", add_plan, "compute ranks, memory and step times of a config, without a node")
    add("check", jobs.add_check, "check whether a config can run, without using a GPU")
    add("launch", add_launch, "start or resume a run, as a SLURM job or here")
    add("sweep", sweep.add_sweep, "start or resume runs with different values of some settings")
    add("tune", tune.add_tune, "measure layouts and micro-batches on the nodes, and write the best config")
    add("drill", drill.add_drill, "rehearse failures with a short run of a config")
    add("simulate", simulate.add_simulate, "say what failures would cost a run on more nodes")
    add("runs", runs.add_runs, "list the runs of a folder with their state")
    add("status", status.add_status, "show what a run is doing, its progress and its jobs")
    add("logs", logs.add_logs, "print what a run's processes have written")
    add("report", _add_report, "draw one or several runs on an HTML page")
    add("view", view.add_view, "read the rollouts of a run: here, as a page, as a file or as text")
    add("sync", sync.add_sync, "send what W&B, TensorBoard and MLflow do not have of a run")
    add("cancel", jobs.add_cancel, "cancel a run's jobs, without requeue")
    add("export", export.add_export, "write a commit as a Hugging Face folder")
    add("chat", chat.add_chat, "talk with the model of a run")
    add("serve", serve.add_serve, "serve the model of a run to OpenAI clients, on this machine")
    whole = partial(completion.add_completion, whole=parser_of_all)
    add("completion", whole, "print the script with which a shell completes commands")
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
    need("h5py", "numpy", "orjson")
    from orhpc.commands.report import write_report  # loads h5py, which other commands do without

    try:
        print(write_report([existing_run(path) for path in options.run_dirs], options.output))
    except OSError as error:  # also of a run that its owner shares with the group
        folder = (options.output or options.run_dirs[0] / "report.html").parent
        why = f"{folder} cannot be written ({error.strerror}); name another file with -o FILE"
        raise ConfigError(why) from None
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
