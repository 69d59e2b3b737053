"""Which log files an attempt has, and on which node each was written."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from orhpc.errors import ConfigError
from orhpc.plan.placement import Placement
from orhpc.rundir import RunDir

DRIVER = "driver.log"
_ENGINE = re.compile(r"engine_(\d+)(?:_(\d+))?\.log")
_RAY = re.compile(r"ray(?:_(\d+))?\.log")
_ENVIRONMENT = re.compile(r"environment_.*?_\d+_(.+)\.log")
_BEGINS = re.compile(r": attempt (\d+), \d+ nodes?(?: and \d+ spares?)?\s*$")
"""The launcher's line in the output of the batch script."""


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log of an attempt."""

    path: Path
    kind: str
    """driver, engine, environment, ray, job (the output of the batch script) or other."""
    engine: int | None = None
    node: str | None = None
    """Name of the node that writes it; None: not known."""

    @property
    def name(self) -> str:
        return self.path.name


def placement_of(run: RunDir, attempt: int) -> Placement | None:
    """The attempt's placement; None if it has not been written, or is damaged."""
    try:
        return Placement.from_yaml((run.attempt(attempt) / "placement.yaml").read_text())
    except (OSError, yaml.YAMLError, TypeError, ValueError, KeyError, AttributeError):
        return None


def _joined(run: RunDir, attempt: int) -> dict[int, tuple[str, str]]:
    """Name and address of each node of the job that has joined, by rank: lost ones and spares among them."""
    found: dict[int, tuple[str, str]] = {}
    for path in (run.attempt(attempt) / "nodes").glob("*.json"):
        try:
            node = json.loads(path.read_text())
            found[int(node["rank"])] = str(node["name"]), str(node["address"])
        except (OSError, ValueError, TypeError, KeyError):
            continue  # damaged
    return found


def files_of(run: RunDir, attempt: int) -> list[LogFile]:
    """The attempt's logs: the driver's first, then by name, the output of its batch script last."""
    placement = placement_of(run, attempt)
    nodes = [node.name for node in placement.nodes] if placement is not None else []
    joined = _joined(run, attempt)
    places = {place.index: place for place in placement.engines} if placement is not None else {}

    def name_of(index: int) -> str | None:
        return nodes[index] if index < len(nodes) else None

    found: list[LogFile] = []
    for path in sorted(run.attempt(attempt).glob("*.log"), key=lambda p: (p.name != DRIVER, p.name)):
        if path.name == DRIVER:
            found.append(LogFile(path, "driver", node=name_of(0)))
        elif match := _ENGINE.fullmatch(path.name):
            index, part = int(match[1]), int(match[2] or 0)
            place = places.get(index)
            found.append(
                LogFile(path, "engine", index, name_of(place.node + part) if place is not None else None)
            )
        elif match := _RAY.fullmatch(path.name):
            rank = int(match[1] or 0)  # of the job, where a spare's differs from its index in the placement
            found.append(LogFile(path, "ray", node=joined[rank][0] if rank in joined else name_of(rank)))
        elif match := _ENVIRONMENT.fullmatch(path.name):
            found.append(LogFile(path, "environment", node=match[1]))
        else:
            found.append(LogFile(path, "other", node=name_of(0)))
    output = run.attempt_metadata(attempt).get("output")
    if isinstance(output, str) and Path(output).is_file():
        found.append(LogFile(Path(output), "job", node=name_of(0)))
    return found


def batch_outputs(run: RunDir) -> list[Path]:
    """Outputs of the run's batch scripts; those of jobs submitted by hand are in sbatch's working folder."""
    outputs = {path.resolve(): None for path in sorted(run.path.glob("slurm-*.out")) if path.is_file()}
    for number in range(1, run.newest_attempt() + 1):
        output = run.attempt_metadata(number).get("output")
        if isinstance(output, str) and Path(output).is_file():
            outputs[Path(output).resolve()] = None
    return list(outputs)


def attempt_begun_by(text: str) -> int | None:
    """The attempt that the launcher names in this line of a batch script's output; None in any other line."""
    found = _BEGINS.search(text)
    return int(found[1]) if found else None


def node_named(run: RunDir, attempt: int, wanted: str) -> tuple[str, str, bool]:
    """Name and address of a node of the attempt, and whether it is the first one.

    ``wanted``: its name, or its index in the job.

    Raises:
        ConfigError: the attempt has no such node, or its nodes are not known yet.
    """
    placement = placement_of(run, attempt)
    if placement is None:
        raise ConfigError(f"--node: {run.attempt(attempt)} does not say yet on which nodes it runs")
    for index, node in enumerate(placement.nodes):
        if wanted in (node.name, str(index)):
            return node.name, node.address, index == 0
    for name, address in _joined(run, attempt).values():
        if wanted == name:
            return name, address, False
    names = ", ".join(f"{i} ({node.name})" for i, node in enumerate(placement.nodes))
    raise ConfigError(f"--node: {wanted} is not a node of attempt {attempt}; they are {names}")


def check_rank(run: RunDir, attempt: int, rank: int) -> None:
    """Raise ConfigError if the attempt has no such trainer rank."""
    placement = placement_of(run, attempt)
    if rank < 0 or (placement is not None and rank >= len(placement.trainers)):
        count = f"; attempt {attempt} has {len(placement.trainers)}, from 0" if placement is not None else ""
        raise ConfigError(f"--rank: {rank} is not a trainer rank{count}")
