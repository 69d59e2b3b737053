"""The command line of the launcher, the batch script and the checks: ``[CONFIG] [key=value ...] [flags]``.

Flags are those of slime, miles and OpenReward's ``run.sh`` (:mod:`orhpc.config.flags`), ``--sglang-NAME`` and
``--check-weights``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orhpc.config import Config
from orhpc.config.faults import VARIABLE
from orhpc.config.files import is_override, setting_of
from orhpc.config.flags import ENGINE_FLAG, engine_option, settings_of, take
from orhpc.errors import ConfigError
from orhpc.process.terminal import safe

DEFAULT_CONFIG = "configs/default.yaml"
HELP = (
    "Flags of slime, miles and OpenReward's run.sh are read as well, and --sglang-NAME VALUE sets "
    "engine.extra.NAME; the documentation's page on flags has the whole list."
)
"""For the end of a command's ``--help``."""


def own_options(add_arguments: Callable[[argparse.ArgumentParser], None]) -> dict[str, bool]:
    """Return the options that a command defines itself, and whether each has a value."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add the options of a job's size, which :func:`node_overrides` reads."""
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the job (placement.nodes)")
    parser.add_argument(
        "--spares", type=int, metavar="S",
        help="further nodes, which take the places of lost ones without a requeue (slurm.spares)",
    )  # fmt: skip


def node_overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides that the options of :func:`add_nodes` stand for.

    Raises:
        ConfigError: a run on this machine alone is to have spare nodes.
    """
    if options.spares and getattr(options, "local", False):
        raise ConfigError("--spares: --local runs on this machine alone, which no spare node can replace")
    named = (("placement.nodes", options.nodes), ("slurm.spares", options.spares))
    return [f"{setting}={value}" for setting, value in named if value is not None]


def nodes_of_job(path: str, overrides: Sequence[str], nodes: int) -> str:
    """Return the override of ``placement.nodes`` in a job of ``nodes`` nodes, of which some are spares.

    Raises:
        ConfigError: no node is left besides the spares, or a file or an override cannot be read.
    """
    spares = setting_of(path, overrides, "slurm.spares")
    if not isinstance(spares, int) or spares < 0:
        spares = 0  # the config's own check refuses it
    if nodes - spares < 1:
        raise ConfigError(f"slurm.spares: {spares} of the job's {nodes} nodes leave none that takes part")
    return f"placement.nodes={nodes - spares}"


def engine_options(arguments: Sequence[str]) -> list[str]:
    """Replace ``--sglang-NAME [VALUE]`` by ``engine.extra.NAME=VALUE``, and nothing else."""
    left, result = list(arguments), []
    while left:
        argument = left.pop(0)
        result.append(engine_option(argument, left) if argument.startswith(ENGINE_FLAG) else argument)
    return result


def without_flags(arguments: Sequence[str], own: Mapping[str, bool] | None = None) -> list[str]:
    """Replace flags by the equivalent overrides; say on standard error what has no effect.

    Args:
        arguments: of a command.
        own: the command's own options, which stay, and whether each has a value.

    Raises:
        ConfigError: a flag is unknown or refused, or has a wrong value, or flags contradict each other.
    """
    rest, flags = take(arguments, own)
    if not flags:
        return rest
    words = [a for a in rest if not a.startswith("-")]
    path, overrides = _split(words)
    nodes = "--nodes="  # the command's own option for placement.nodes, which it applies later
    written = [f"placement.nodes={a.removeprefix(nodes)}" for a in rest if a.startswith(nodes)]
    named = not all(map(is_override, words))

    def current(setting: str) -> Any:
        # The default config has an environment only so that it is complete.
        return {} if setting == "environments" and not named else setting_of(path, overrides, setting)

    found, notes = settings_of(flags, [*overrides, *written], current)
    for note in notes:
        print(f"orhpc: {safe(note)}", file=sys.stderr)
    return [*rest, *found]


def split_command_line(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split arguments into the config's path and the overrides.

    Raises:
        ConfigError: more than one config file, or a flag as in :func:`without_flags`.
    """
    return _split(without_flags(arguments))


def faults_of_environment() -> list[str]:
    """Return the override that ``ORHPC_FAULT`` stands for; none if the variable is not set."""
    text = os.environ.get(VARIABLE, "").strip()
    return [f"faults.inject={json.dumps(text)}"] if text else []


def show_faults(config: Config, say: Callable[[str], object]) -> None:
    """Say which faults a run will cause itself, so that they are not mistaken for real ones."""
    if config.faults.inject:
        listed = ", ".join(config.faults.inject)
        say(f"FAULTS ARE INJECTED INTO THIS RUN, each once (faults.inject, {VARIABLE}): {listed}")


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    files = [a for a in arguments if not is_override(a)]
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, not {' and '.join(files)}")
    return files[0] if files else DEFAULT_CONFIG, [a for a in arguments if is_override(a)]
