"""``orhpc drill``: a short run of a config in which parts fail on purpose, and a table of what that cost."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from orhpc.commands.attended import (
    QUIET,
    add_arguments,
    attend,
    check_arguments,
    refuse_finished,
    write_table,
)
from orhpc.commands.drill_table import recoveries, table
from orhpc.commands.run_state import existing_run
from orhpc.config import Config
from orhpc.config.faults import KINDS, VARIABLE, Fault, FaultKind, Target, serves, targets
from orhpc.config.files import load_config
from orhpc.errors import EXIT_FAILED, EXIT_OK, ConfigError
from orhpc.launch import prepare
from orhpc.launch.command_line import node_overrides, show_faults, split_command_line
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.prompt_ledger import balance_of, read_lineage

USUAL = (
    FaultKind.TRAINER_KILLED,
    FaultKind.TRAINER_OOM,
    FaultKind.ENGINE_KILLED,
    FaultKind.ENVIRONMENT_KILLED,
    FaultKind.DISK_FULL,
    FaultKind.PREEMPTION,
    FaultKind.DRIVER_KILLED,
    FaultKind.NODE_LOST,
)
"""Faults of a drill that names none; those that do not apply to the config are left out.

Hangs are not among them: the limit of an update is learned from more steps than a drill has.
"""
_FIRST = 3
"""Step of the first fault: some steps are made before."""
_SAVE_INTERVAL = 2
_RANDOM_STEPS = 200


def add_drill(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "drill")
    parser.add_argument(
        "--faults", metavar="A,B", help=f"kinds, or kind:index; of {', '.join(FaultKind)}; default: the usual"
    )
    parser.add_argument(
        "--every", type=int, default=3, metavar="STEPS", help="from fault to fault; default: 3"
    )
    parser.add_argument(
        "--random", type=int, metavar="COUNT",
        help="this many faults of random kinds at random steps, in place of one of each kind",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, metavar="N", help="with --random: steps of the run; default: 200"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="with --random: of the faults; default: 0")
    parser.add_argument(
        "--within", type=float, default=1800.0, metavar="SECONDS",
        help="until the first new step after each fault; more is a failure; default: 1800",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print what would fail when; start nothing")
    parser.set_defaults(run=drill)


def drill(options: argparse.Namespace) -> int:
    """Rehearse faults; returns 0 only if the run came back after every one of them."""
    check_arguments(options)
    if options.table:
        return show(existing_run(Path(options.arguments[0])))
    _check_options(options)
    path, overrides = split_command_line(options.arguments)
    overrides += node_overrides(options)
    if options.random is None:
        words = drill_overrides(path, overrides, options.faults, options.every)
    else:
        seed, steps = options.seed or 0, options.steps or _RANDOM_STEPS
        words = random_overrides(path, overrides, options.faults, options.random, steps, seed)
    config = load_config(path, words)
    show_faults(config, print)
    interval = config.checkpoint.save_interval
    commits = "makes no commits" if interval is None else f"commits every {interval} steps"
    print(f"the run {config.run.name} makes {config.train.steps} steps and {commits}")
    if options.dry_run:
        return EXIT_OK
    run = prepare.run_directory(config)
    if run.config.is_file() and prepare.is_finished(run, config):
        refuse_finished(run, "drill", "drill")
    prepare.create_directory(config)
    write_atomic(run.path / "drill.json", json.dumps({"within_s": options.within}))
    return attend("drill", options, path, words, run, show)


def _check_options(options: argparse.Namespace) -> None:
    if os.environ.get(VARIABLE):
        raise ConfigError(f"{VARIABLE}: a drill injects what --faults names; unset the variable")
    if options.every < 1:
        raise ConfigError(f"--every: {options.every} is not a positive number of steps")
    if options.random is None and (options.steps, options.seed) != (None, None):
        raise ConfigError("--steps and --seed belong to --random COUNT")
    if not options.within > 0:  # nor NaN, with which nothing would be late
        raise ConfigError(f"--within: {options.within:g} is not a positive number of seconds")


def drill_overrides(path: str, overrides: Sequence[str], faults: str | None, every: int) -> list[str]:
    """Return the overrides that turn a run into its drill.

    Args:
        path: the config file.
        overrides: the user's own.
        faults: kinds, separated by commas, each perhaps with ``:index``; None: those of :data:`USUAL`.
        every: steps from one fault to the next.

    Raises:
        ConfigError: the config is wrong, or a fault is unknown or cannot happen in this run.
    """
    config = load_config(path, overrides)
    chosen = _chosen(config, faults)
    schedule = [
        Fault(kind, _FIRST + every * n, _index(config, kind, index)) for n, (kind, index) in enumerate(chosen)
    ]
    interval = min(config.checkpoint.save_interval or _SAVE_INTERVAL, _SAVE_INTERVAL)
    words = _with_faults(config, overrides, schedule, _FIRST + every * len(schedule))
    return [*words, f"checkpoint.save_interval={interval}"]


def random_overrides(
    path: str, overrides: Sequence[str], faults: str | None, count: int, steps: int, seed: int
) -> list[str]:
    """Return the overrides that turn a run into a drill with random faults; it commits as the config says.

    Args:
        path: the config file.
        overrides: the user's own.
        faults: kinds to draw from, separated by commas, each perhaps with ``:index``; None: those of
            :data:`USUAL`.
        count: of faults; no two are in one step.
        steps: of the run.
        seed: the same seed gives the same faults.

    Raises:
        ConfigError: the config is wrong, a fault cannot happen in this run, or the steps are too few.
    """
    config = load_config(path, overrides)
    chosen, generator = _chosen(config, faults), random.Random(seed)
    if not 1 <= count <= steps - _FIRST:
        raise ConfigError(f"--random: {count} faults need a run of at least {count + _FIRST} steps (--steps)")
    schedule: list[Fault] = []
    for step in sorted(generator.sample(range(_FIRST, steps), count)):
        kind, index = generator.choice(chosen)
        number = _index(config, kind, index)
        if number and index is None:
            number = generator.randrange(number + 1)
        schedule.append(Fault(kind, step, number))
    return _with_faults(config, overrides, schedule, steps)


def _chosen(config: Config, faults: str | None) -> list[tuple[FaultKind, int | None]]:
    return _named(faults) if faults else [(kind, None) for kind in USUAL if _applies(config, kind)]


def _with_faults(
    config: Config, overrides: Sequence[str], schedule: Sequence[Fault], steps: int
) -> list[str]:
    words = [
        *overrides, *QUIET, f"run.name={config.run.name}-drill", f"train.steps={steps}",
        f"faults.inject={json.dumps([str(fault) for fault in schedule])}",
    ]  # fmt: skip
    return words + (["algorithm.critic.warmup_steps=0"] if config.algorithm.critic.warmup_steps else [])


def _named(faults: str) -> list[tuple[FaultKind, int | None]]:
    found: list[tuple[FaultKind, int | None]] = []
    for text in filter(None, (word.strip() for word in faults.split(","))):
        kind, _, index = text.partition(":")
        try:
            parsed = Fault.parse(f"{kind}@1:{index}" if index else f"{kind}@1")
        except ValueError as error:
            raise ConfigError(f"--faults: {str(error).replace('@1', '')}") from None
        found.append((parsed.kind, parsed.index if index else None))
    if not found:
        raise ConfigError("--faults: names no fault")
    return found


def _applies(config: Config, kind: FaultKind) -> bool:
    if kind is FaultKind.ENVIRONMENT_KILLED:
        return serves(config)
    return targets(config).get(KINDS[kind].target, 1) > 0


def _index(config: Config, kind: FaultKind, index: int | None) -> int | None:
    """The named index, or the last: the first rank and node have more to do, and fail no more often."""
    target = KINDS[kind].target
    if target is Target.NOTHING:
        return None
    if index is None and kind is FaultKind.ENVIRONMENT_KILLED:
        return 0
    return max(0, targets(config)[target] - 1) if index is None else index


def show(run: RunDir) -> int:
    """Print and write the table of a drill; returns 0 only if the run came back after every fault."""
    config = load_config(run.config)
    if not config.faults.inject:
        raise ConfigError(f"{run.path}: no faults were injected into this run (faults.inject)")
    try:
        within_s = float(json.loads((run.path / "drill.json").read_text())["within_s"])
    except (OSError, ValueError, KeyError, TypeError):
        within_s = float("inf")  # a run with faults, but no drill: it has no limit
    rows = recoveries(run, config, within_s)
    back = sum(row.recovered for row in rows)
    balance = balance_of(read_lineage(run.prompts))
    lost = max((row.steps_lost for row in rows), default=0)
    text = "\n".join(
        [
            table(rows),
            "",
            f"{run.path}: came back after {back} of {len(rows)} faults, at most {lost} steps lost; prompts: "
            + ("; ".join(balance.problems) or "each trained once or dropped for a reason"),
        ]
    )
    print(text)
    write_table(run, "drill.md", text)
    return EXIT_OK if back == len(rows) and not balance.problems else EXIT_FAILED
