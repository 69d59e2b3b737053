"""``python -m orhpc.launch [CONFIG] [key=value ...] [--nodes N [--spares S] | --local] [--dry-run]``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from orhpc.config import Config
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_OK, HubUnreachable, OrhpcError, PreflightError, policy_of
from orhpc.launch import model, prepare, task_files
from orhpc.launch.checks import checklist
from orhpc.launch.command_line import (
    HELP,
    add_nodes,
    faults_of_environment,
    node_overrides,
    own_options,
    show_faults,
    split_command_line,
    without_flags,
)
from orhpc.launch.slurm import holder, submission
from orhpc.plan.placement import Node, local_node, plan
from orhpc.process.terminal import safe


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.epilog = HELP
    parser.add_argument(
        "arguments", nargs="*", metavar="CONFIG | key=value", help="a YAML file, then overrides"
    )
    add_nodes(parser)
    parser.add_argument("--local", action="store_true", help="run here, in the foreground, without SLURM")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the batch script, config and placement; start nothing"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="orhpc launch",
        description="Start or resume a run: as a SLURM job, or with --local on this machine.",
    )
    add_launch(parser)
    words = sys.argv[1:] if arguments is None else arguments
    return parser.parse_intermixed_args(without_flags(words, own_options(add_launch)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; every failure is one line on standard error."""
    try:
        options = parse(arguments)
        path, overrides = split_command_line(options.arguments)
        overrides += node_overrides(options)
        overrides += faults_of_environment()
        config = load_config(path, overrides)
        show_faults(config, _say)
        if options.local:
            return show_local(config) if options.dry_run else _run_local(config)
        if options.dry_run:
            return dry_run(config, path, overrides)
        return submit(config, path, overrides)
    except OrhpcError as error:
        print(f"orhpc: {safe(' '.join(str(error).split()))}", file=sys.stderr)
        return policy_of(error).exit_code


def _say(line: str) -> None:
    print(f"orhpc: {line}", file=sys.stderr)


def dry_run(config: Config, path: str, overrides: list[str]) -> int:
    """Print the batch script, the resolved config and the placement; fail where a submission would."""
    checklist.require(checklist.of_config(config))
    rundir = prepare.run_directory(config)
    lead = submission.signal_lead(config, rundir)
    options, script_arguments = submission.sbatch_arguments(config, rundir, path, overrides, _say)
    print("# submitted as\nsbatch " + shlex.join([*options, "SCRIPT", *script_arguments]))
    print("\n# batch script\n" + submission.render(config, lead, submission.own_python()))
    print("# resolved config\n" + dump_config(config))
    cpus = config.slurm.cpus_per_task or local_node().cpus
    nodes = tuple(Node(f"node{i}", f"address-of-node{i}", cpus) for i in range(config.placement.nodes))
    print("# placement\n" + plan(config, nodes).to_yaml())
    print(f"# stops {lead} s before its time limit to commit")
    return EXIT_OK


def _run_local(config: Config) -> int:
    from orhpc.launch.local import run_local  # imports the display, which is slow to load

    return run_local(config)


def show_local(config: Config) -> int:
    """Print the resolved config and the placement on this machine; fail where a start would."""
    checklist.require(checklist.of_config(config))
    placement = plan(config, (local_node(),))
    print("# resolved config\n" + dump_config(config))
    print("# placement\n" + placement.to_yaml())
    return EXIT_OK


def submit(config: Config, path: str, overrides: list[str]) -> int:
    """Run the login node's checks, submit the job, and print the commands to watch it."""
    checklist.require(checklist.before_the_queue(config))
    rundir = prepare.create_directory(config)
    changes = prepare.write_config(rundir, config)
    try:
        model.fetch_snapshots(config, rundir)
    except HubUnreachable as error:
        print(f"orhpc: {error}; the job's first node tries to fetch it", file=sys.stderr)
    try:
        task_files.ensure(config, rundir)
    except PreflightError as error:
        print(f"orhpc: {error}; the job's first node tries it", file=sys.stderr)
    job = submission.submit(config, rundir, path, overrides, _say)
    holder.note_submission(rundir, job)
    below_cwd = rundir.path.is_relative_to(Path.cwd())
    where = shlex.quote(str(rundir.path.relative_to(Path.cwd()) if below_cwd else rundir.path))
    print(f"job {job}, run directory {rundir.path}")
    for change in changes:
        print(f"  changed since the last start: {change}")
    print(f"  orhpc status {where}\n  orhpc logs {where}\n  orhpc cancel {where}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
