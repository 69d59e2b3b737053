"""``orhpc sweep``: runs of one config with different values of some settings, as one job array or here."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orhpc.commands.run_state import RunState, State, states_of
from orhpc.commands.runs import print_table
from orhpc.config.files import find_config
from orhpc.errors import EXIT_OK, EXIT_REQUEUE, ConfigError, HubUnreachable, OrhpcError, policy_of
from orhpc.launch import model, prepare
from orhpc.launch.checks import checklist
from orhpc.launch.command_line import split_command_line
from orhpc.launch.sweep import sweep as sweeps
from orhpc.launch.sweep.sweep import Element
from orhpc.launch.sweep.values import combine, split_overrides
from orhpc.process.terminal import safe
from orhpc.rundir import RunDir
from orhpc.rundir.events import last_events

_ACTIVE = (State.RUNNING, State.STARTING, State.WAITING)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments", nargs="*", metavar="CONFIG | key=a,b | FOLDER",
        help="a YAML file, then overrides; those with several values vary. With --status, a sweep's folder",
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--zip", action="store_true", help="pair the values in order; default: all combinations")
    how.add_argument("--random", type=int, metavar="N", help="N different combinations, chosen at random")
    parser.add_argument("--seed", type=int, help="of --random; default: 0")
    parser.add_argument("--parallel", type=int, metavar="N", help="how many elements run at the same time")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--local", action="store_true", help="run them here, one after another, without SLURM")
    what.add_argument("--status", action="store_true", help="list the sweep's runs, the best first")
    parser.add_argument("--dry-run", action="store_true", help="list what would run; start nothing")
    parser.add_argument("--json", action="store_true", help="with --status: one JSON object per line")
    parser.set_defaults(run=sweep)


def sweep(options: argparse.Namespace) -> int:
    """Check every element, then submit those that are not finished, run them here, or list them."""
    _check_options(options)
    folder = Path(options.arguments[0]) if options.arguments else Path()
    if len(options.arguments) == 1 and sweeps.is_sweep(folder):
        if not options.status:
            raise ConfigError(f"{folder}: a sweep's folder is for --status; to continue, repeat its command")
        return show_status(folder, as_json=options.json)
    if (
        options.status
        and len(options.arguments) == 1
        and not options.arguments[0].endswith((".yaml", ".yml"))
    ):
        raise _no_sweep(folder)
    path, overrides = split_command_line(options.arguments)
    fixed, varied = split_overrides(overrides)
    if options.status and not varied:
        return show_status(sweeps.folder_of(path, fixed), as_json=options.json)
    rows = combine(varied, zipped=options.zip, number=options.random, seed=options.seed or 0)
    find_config(Path(path))
    try:
        folder = sweeps.folder_of(path, [*fixed, *sweeps.overrides_of(rows[0])])
    except ConfigError as error:
        raise ConfigError(f"with {' '.join(sweeps.overrides_of(rows[0]))}: {error}") from None
    if options.status:
        return show_status(folder, as_json=options.json)
    elements = sweeps.elements_of(folder, path, fixed, rows)
    sweeps.refuse_equal(elements)
    states = _states(folder, elements)
    todo = [e for e in elements if states[e.name] not in (*_ACTIVE, State.FINISHED)]
    _check(todo, local=options.local)
    text = "" if options.local or not todo else sweeps.script(todo)
    done = sum(state is State.FINISHED for state in states.values())
    print(
        f"{folder}: {_count(elements)}, {len(todo)} to run, {done} finished, "
        f"{len(elements) - len(todo) - done} running or waiting"
    )
    if options.dry_run:
        return _dry_run(folder, elements, todo, states, options)
    if not todo:
        return EXIT_OK
    sweeps.write_index(folder, path, elements)
    return _run_here(todo) if options.local else _submit(folder, todo, text, options.parallel)


def _count(elements: Sequence[Element]) -> str:
    return f"{len(elements)} element{'' if len(elements) == 1 else 's'}"


def _check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    if options.seed is not None and options.random is None:
        raise ConfigError("--seed: it is the seed of --random; the runs' own is run.seed=0,1")
    if options.parallel is not None and options.parallel < 1:
        raise ConfigError(f"--parallel: {options.parallel} is not a positive number")
    if options.parallel is not None and options.local:
        raise ConfigError("--parallel: --local runs the elements one after another")
    if options.json and not options.status:
        raise ConfigError("--json: it needs --status")
    if options.dry_run and options.status:
        raise ConfigError("--dry-run: --status starts nothing")


def _states(folder: Path, elements: Sequence[Element]) -> dict[str, State]:
    """The state of each element by name; a finished one whose config now asks for more steps is stopped."""
    begun = [e for e in elements if (folder / e.name / "config.yaml").is_file()]
    found = {s.name: s.state for s in states_of([RunDir(folder / e.name) for e in begun])}
    states: dict[str, State] = {}
    for element in elements:
        state = found.get(element.name, State.NEW)
        if state not in _ACTIVE and element in begun and sweeps.is_finished(element):
            state = State.FINISHED
        elif state is State.FINISHED:
            state = State.STOPPED
        states[element.name] = state
    return states


def _check(elements: Sequence[Element], *, local: bool) -> None:
    """Run the launcher's checks of every element; the first failure names its element."""
    for element in elements:
        with sweeps.naming(element):
            config = element.config
            if local and config.placement.nodes != 1:
                raise ConfigError(f"placement.nodes: --local is one node, not {config.placement.nodes}")
            checklist.require(checklist.of_config(config) if local else checklist.before_the_queue(config))


def _dry_run(
    folder: Path,
    elements: Sequence[Element],
    todo: Sequence[Element],
    states: Mapping[str, State],
    options: argparse.Namespace,
) -> int:
    for element in elements:
        what = "would run" if element in todo else f"left alone: {states[element.name]}"
        print(f"  {element.index}  {element.name}  {sweeps.described(element)}  {what}")
    if todo and not options.local:
        print("sbatch " + shlex.join([*sweeps.array_options(folder, todo, options.parallel, _say), "SCRIPT"]))
    return EXIT_OK


def _say(line: str) -> None:
    print(f"orhpc: {line}", file=sys.stderr)


def _submit(folder: Path, elements: Sequence[Element], text: str, parallel: int | None) -> int:
    """Write the elements' run directories and submit the array; print the commands to watch it."""
    for element in elements:
        with sweeps.naming(element):
            rundir = prepare.run_directory(element.config)
            rundir.create()
            prepare.write_config(rundir, element.config)
            try:
                model.fetch_snapshots(element.config, rundir)
            except HubUnreachable as error:
                print(f"orhpc: {error}; the jobs' first nodes try to fetch it", file=sys.stderr)
    array = sweeps.submit(folder, elements, text, parallel, _say)
    where = shlex.quote(
        os.path.relpath(folder) if folder.absolute().is_relative_to(Path.cwd()) else str(folder)
    )
    print(f"job array {array} of {_count(elements)}")
    print(f"  orhpc sweep {where} --status\n  orhpc logs {where}/{elements[0].name}\n  orhpc cancel {where}")
    return EXIT_OK


def _run_here(elements: Sequence[Element]) -> int:
    """Run elements one after another; return the first failure's exit code, or 75 after Ctrl-C.

    An element that fails does not keep the others from running.
    """
    from orhpc.launch.local import run_local  # imports the display, which is slow to load

    worst = EXIT_OK
    for number, element in enumerate(elements, 1):
        print(f"element {number} of {len(elements)}: {element.name}", flush=True)
        try:
            code = run_local(element.config)
        except OrhpcError as error:
            print(f"orhpc: element {element.name}: {' '.join(str(error).split())}", file=sys.stderr)
            code = policy_of(error).exit_code
        events = last_events(prepare.run_directory(element.config).events)
        if code == EXIT_REQUEUE and events and events[-1]["event"] == "stopped":
            return code
        worst = worst or code
    return worst


def show_status(folder: Path, *, as_json: bool) -> int:
    """Print the sweep's runs, the best first: by their newest evaluation, else by their newest reward."""
    elements = sweeps.elements_in(folder)
    if not elements:
        raise _no_sweep(folder)
    begun = [RunDir(folder / e.name) for e in elements if (folder / e.name / "config.yaml").is_file()]
    found = {state.name: state for state in states_of(begun)}
    rows = [found.get(e.name) or RunState(e.name, folder / e.name, State.NEW) for e in elements]
    ranked = sorted(rows, key=_rank, reverse=True)
    if as_json:
        values = {e.name: e.values for e in elements}
        for state in ranked:
            print(json.dumps(state.as_json() | {"values": values[state.name]}))
        return EXIT_OK
    finished = sum(state.state is State.FINISHED for state in ranked)
    by = "evaluation" if any(s.evaluation is not None for s in ranked) else "reward of the newest step"
    print(f"{safe(str(folder))}: {finished} of {len(ranked)} finished, best first by {by}")
    print_table(ranked)
    return EXIT_OK


def _no_sweep(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: no sweep is there; orhpc sweep CONFIG key=a,b begins one")


def _rank(state: RunState) -> tuple[bool, float, bool, float]:
    evaluation, reward = state.evaluation, state.reward_mean
    return evaluation is not None, evaluation or 0.0, reward is not None, reward or 0.0
