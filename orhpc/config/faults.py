"""The section ``faults``: failures that a run causes itself, to rehearse its recovery.

``orhpc drill`` writes such a section; :mod:`orhpc.driver.fault_injection` acts on it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from orhpc.config.base import Seconds, Section

if TYPE_CHECKING:
    from orhpc.config import Config

VARIABLE = "ORHPC_FAULT"
"""Environment variable whose value replaces ``faults.inject`` when a run is started."""


class Target(Enum):
    """What the number after the colon selects."""

    NOTHING = "nothing"
    RANK = "trainer rank"
    ENGINE = "engine"
    WORKER = "rollout worker"
    NODE = "node"


class Phase(Enum):
    """When in its step a fault is caused."""

    ROLLOUTS = "while the step's rollouts are generated"
    UPDATE = "when the trainers fetch the step's first micro-batch"


class FaultKind(StrEnum):
    """What can be injected."""

    PREEMPTION = "preemption"
    TRAINER_KILLED = "trainer_killed"
    TRAINER_HANG = "trainer_hang"
    TRAINER_OOM = "trainer_oom"
    NAN_GRADIENT = "nan_gradient"
    ENGINE_KILLED = "engine_killed"
    ENGINE_HANG = "engine_hang"
    ENGINE_OOM = "engine_oom"
    WORKER_KILLED = "worker_killed"
    ENVIRONMENT_KILLED = "environment_killed"
    RAYLET_KILLED = "raylet_killed"
    RAY_HEAD_KILLED = "ray_head_killed"
    DRIVER_KILLED = "driver_killed"
    NODE_LOST = "node_lost"
    DISK_FULL = "disk_full"


@dataclass(frozen=True, slots=True)
class Injection:
    """What a kind is aimed at, and when; ``docs/guide/drill.md`` says how each is done."""

    target: Target
    phase: Phase


_ROLLOUTS, _UPDATE = Phase.ROLLOUTS, Phase.UPDATE
KINDS: dict[FaultKind, Injection] = {
    FaultKind.PREEMPTION: Injection(Target.NOTHING, _ROLLOUTS),
    FaultKind.TRAINER_KILLED: Injection(Target.RANK, _UPDATE),
    FaultKind.TRAINER_HANG: Injection(Target.RANK, _UPDATE),
    FaultKind.TRAINER_OOM: Injection(Target.RANK, _UPDATE),
    FaultKind.NAN_GRADIENT: Injection(Target.RANK, _UPDATE),
    FaultKind.ENGINE_KILLED: Injection(Target.ENGINE, _ROLLOUTS),
    FaultKind.ENGINE_HANG: Injection(Target.ENGINE, _ROLLOUTS),
    FaultKind.ENGINE_OOM: Injection(Target.ENGINE, _ROLLOUTS),
    FaultKind.WORKER_KILLED: Injection(Target.WORKER, _ROLLOUTS),
    FaultKind.ENVIRONMENT_KILLED: Injection(Target.NODE, _ROLLOUTS),
    FaultKind.RAYLET_KILLED: Injection(Target.NODE, _ROLLOUTS),
    FaultKind.RAY_HEAD_KILLED: Injection(Target.NOTHING, _ROLLOUTS),
    FaultKind.DRIVER_KILLED: Injection(Target.NOTHING, _ROLLOUTS),
    FaultKind.NODE_LOST: Injection(Target.NODE, _ROLLOUTS),
    FaultKind.DISK_FULL: Injection(Target.NOTHING, _ROLLOUTS),
}
"""Every kind; the driver injects them."""

_TEXT = re.compile(r"([A-Za-z_]+)@([0-9]{1,9})(?::([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that is caused once in the life of a run."""

    kind: FaultKind
    step: int
    """The step, from 1, during which it is caused."""
    index: int | None
    """Which rank, engine, worker or node fails; None if there is nothing to choose from."""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``kind@step`` or ``kind@step:index``; the default index is 0.

        Raises:
            ValueError: it is neither, or there is no such kind.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text[:80]!r} is not KIND@STEP or KIND@STEP:INDEX, such as trainer_killed@3:1")
        name, step, index = match[1], int(match[2]), match[3]
        try:
            kind = FaultKind(name)
        except ValueError:
            near = difflib.get_close_matches(name, list(FaultKind), n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FaultKind)}"
            raise ValueError(f"{name[:40]!r} is no kind of fault; {hint}") from None
        if step == 0:
            raise ValueError(f"{text}: steps are counted from 1")
        target = KINDS[kind].target
        if target is Target.NOTHING and index is not None:
            raise ValueError(f"{text}: {kind} has no number after the step, so write {kind}@{step}")
        return cls(kind, step, None if target is Target.NOTHING else int(index or 0))

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + ("" if self.index is None else f":{self.index}")


def _split(value: Any) -> Any:
    """Faults as one text, separated by commas, become a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _normal(value: list[str]) -> list[str]:
    faults = [str(Fault.parse(text)) for text in value]
    if twice := [text for text in faults if faults.count(text) > 1]:
        raise ValueError(f"{twice[0]}: is named twice, but each fault is caused once")
    return faults


class FaultSettings(Section):
    """Failures that the run causes itself, to rehearse its recovery: see ``orhpc drill``. None by default."""

    inject: Annotated[list[str], BeforeValidator(_split), AfterValidator(_normal)] = Field(
        default_factory=list
    )
    """Faults as ``KIND@STEP`` or ``KIND@STEP:INDEX``, for example ``[engine_killed@3:0, disk_full@6]``. The
    index is that of a trainer rank, an engine, a rollout worker or a node. Each is caused once in the life of
    the run. The environment variable ``ORHPC_FAULT`` replaces it when a run is started."""
    disk_full_s: Seconds = 15.0
    """Seconds for which ``disk_full`` lasts."""

    @property
    def parsed(self) -> list[Fault]:
        """The faults to inject."""
        return [Fault.parse(text) for text in self.inject]


def targets(c: Config) -> dict[Target, int]:
    """How many ranks, engines, workers and nodes a run has, to which faults can happen."""
    replays = c.train.replay_rollouts is not None
    return {
        Target.RANK: c.placement.trainer_ranks,
        Target.ENGINE: 0 if replays else c.placement.rollout_devices // c.engine.tp,
        # A number that depends on the nodes' cores is at least one.
        Target.WORKER: 0 if replays else c.placement.nodes * (c.rollout.workers_per_node or 1),
        Target.NODE: c.placement.nodes,
    }


def fault_problems(c: Config) -> list[str]:
    """List the faults that could not happen in a run of this config."""
    problems: list[str] = []
    counts = targets(c)
    for fault in c.faults.parsed:
        target, named = KINDS[fault.kind].target, f"faults.inject: {fault}"
        if fault.step > c.train.steps:
            problems.append(f"{named}: the run has {c.train.steps} steps (train.steps)")
        elif fault.index is not None and counts[target] == 0:
            problems.append(f"{named}: the run has no {target.value}")
        elif fault.index is not None and fault.index >= counts[target]:
            last = counts[target] - 1
            problems.append(f"{named}: the last {target.value} is {last}, so write :0 to :{last}")
        elif fault.kind is FaultKind.ENVIRONMENT_KILLED and not serves(c):
            problems.append(f"{named}: the job serves no environment (environments.NAME.serve)")
    return problems


def serves(c: Config) -> bool:
    """Whether the job runs environment servers."""
    return any(environment.is_served for environment in c.environments.values())
