"""Times that an earlier run of a config, or ``orhpc tune`` on it, has measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orhpc.commands.tune import own_update_s
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.launch.prepare import run_directory
from orhpc.plan.activations import EXPERT_EXCESS
from orhpc.plan.workload import Workload
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of

Event = Mapping[str, Any]
_WARM = 2
"""Steps at a run's start in which kernels compile and memory is first touched."""
_MEMORY = ("device_memory_gib", "host_memory_gib")
"""Settings of a placement that change no time."""
_ROLLOUT = (
    "batch_size", "n_samples", "max_response_tokens", "max_total_tokens", "max_staleness", "oversample",
    "partial", "record_routes", "custom_agent",
)  # fmt: skip
_TRAIN = (
    "backend", "global_batch_size", "max_tokens_per_gpu", "micro_batch_size", "dynamic_batch",
    "gradient_checkpointing", "recompute_layers", "gather_once", "compile", "routing_replay",
    "logprob_chunk_tokens", "freeze_vision", "deterministic",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Medians of an earlier run."""

    where: str
    """Which run and steps."""
    phases: Mapping[str, float]
    step: float | None
    """Null: only some phases were measured."""
    work: Workload | None
    """Sizes of its steps."""


def measured_times(config: Config) -> MeasuredTimes | None:
    """Return what the config's own run has measured, else its update by ``orhpc tune``; None: neither.

    Runs whose settings differ in what times depend on do not count.

    Raises:
        ConfigError: the recorded config of such a run cannot be read.
    """
    if config.run.name is None:
        return None
    return _of_run(run_directory(config), config) or _of_tuning(config)


def _of_run(run: RunDir, config: Config) -> MeasuredTimes | None:
    return times_of(run) if run.config.is_file() and _alike(load_config(run.config), config) else None


def times_of(run: RunDir) -> MeasuredTimes | None:
    """Return the medians of a run's steps, without its first ones; None: it has no others."""
    steps = [step for _, step in sorted(steps_of(read_events(run.events)).items())][_WARM:]
    steps = [step for step in steps if {"rollout", "update"} <= step.get("phases", {}).keys()]
    if not steps:
        return None
    names = ("rollout", "update", "record", "sync")
    phases = {name: _median(step["phases"].get(name) for step in steps) for name in names}
    return MeasuredTimes(
        where=f"{run.path}, median of steps {steps[0]['step']} to {steps[-1]['step']}",
        phases={name: value for name, value in phases.items() if value is not None},
        step=_median(step.get("seconds") for step in steps),
        work=_work(steps),
    )


def _of_tuning(config: Config) -> MeasuredTimes | None:
    name = f"{config.run.name}-tune"
    run = run_directory(config.model_copy(update={"run": config.run.model_copy(update={"name": name})}))
    if not run.config.is_file() or not _alike(load_config(run.config), config):
        return None
    seconds = own_update_s(run)
    if seconds is None:
        return None
    return MeasuredTimes(f"{run.path}, by orhpc tune", {"update": seconds}, None, None)


def _work(steps: Sequence[Event]) -> Workload | None:
    needed = ("response_tokens", "total_tokens", "response_length_mean", "response_length_max")
    numbers = {name: _median(step.get(name) for step in steps) for name in needed}
    if any(not value for value in numbers.values()):
        return None
    response, total, mean, longest = (numbers[name] or 0.0 for name in needed)
    rollouts = round(response / mean)
    uneven = _median(step.get("expert_rank_max_vio") for step in steps)
    return Workload(
        rollouts, prompt=total / rollouts - mean, response=mean, longest=longest, assumed=False,
        excess=EXPERT_EXCESS if uneven is None else 1 + uneven,
    )  # fmt: skip


def _median(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _alike(one: Config, other: Config) -> bool:
    return json.dumps(_timed(one), sort_keys=True) == json.dumps(_timed(other), sort_keys=True)


def _timed(config: Config) -> dict[str, Any]:
    """The settings on which times depend."""
    tree = config.model_dump(mode="json")
    placement = {name: value for name, value in tree["placement"].items() if name not in _MEMORY}
    return {
        **{name: tree[name] for name in ("model", "engine", "megatron", "precision")},
        "placement": placement,
        "rollout": {name: tree["rollout"][name] for name in _ROLLOUT},
        "train": {name: tree["train"][name] for name in _TRAIN},
        "reference": config.algorithm.needs_reference,
        "critic": config.algorithm.has_critic,
        "old_logprobs": config.algorithm.old_logprobs,
    }
