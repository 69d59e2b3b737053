"""Layouts, micro-batch sizes and recomputation that may make a config's updates faster.

:func:`candidates` lists those whose memory fits by :mod:`orhpc.plan.memory`, in the order in which they are
worth a measurement: by the update that :mod:`orhpc.plan.update_time` predicts, which ``orhpc tune`` then
measures.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from orhpc.config import Config
from orhpc.errors import ConfigError
from orhpc.models import ModelShape
from orhpc.plan.layout import Layout, check_layout, trainer_layout
from orhpc.plan.memory import reserved_bytes, trainer_demand, trainer_memory
from orhpc.plan.recompute import SPARE, automatic, settled
from orhpc.plan.run_plan import candidate_layouts
from orhpc.plan.speeds import CARDS, Card
from orhpc.plan.update_time import predict_update
from orhpc.plan.workload import Workload, assumed_workload

BUDGETS = (0.5, 0.7, 1, 1.4, 2, 2.8, 4)
"""Factors between a candidate's micro-batches and the config's; smaller ones may need less recomputation."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to measure."""

    settings: tuple[tuple[str, Any], ...]
    """Names and values that differ from the config; empty: the config as it is."""
    bytes: int
    """Planned memory of the fullest device at the step's peak."""
    seconds: float
    """Predicted time of an update."""

    @property
    def overrides(self) -> list[str]:
        """The settings as overrides of a command line."""
        return [f"{name}={_text(value)}" for name, value in self.settings]


def candidates(
    config: Config,
    shape: ModelShape,
    device_bytes: int | None,
    most: int,
    allowed: Callable[[Config], bool] = lambda _: True,
    card: Card | None = None,
    work: Workload | None = None,
) -> list[Candidate]:
    """Return the config itself and then up to ``most - 1`` others that fit, the most promising first.

    Args:
        config: of the run.
        shape: of its model.
        device_bytes: memory of a device; None: devices are processes, whose memory is not limited here.
        most: candidates to return.
        allowed: whether a run could start with a config; asked for the most promising ones only.
        card: of the devices; None: an H100, whose speeds order others too.
        work: sizes of a step; None: an assumed length.
    """
    room = math.inf if device_bytes is None else (1 - SPARE) * device_bytes - reserved_bytes(config)
    card, work = card or CARDS["h100"], work or assumed_workload(config)

    def candidate(changed: Config) -> Candidate:
        memory = trainer_memory(shape, trainer_layout(changed), trainer_demand(changed)).total
        seconds = predict_update(changed, shape, card, work).seconds
        return Candidate(_differences(config, changed), memory, seconds)

    found: dict[tuple[tuple[str, Any], ...], tuple[Candidate, Config]] = {}
    own = settled(config, shape, device_bytes)
    for changed in _variants(config, shape, device_bytes):
        other = candidate(changed)
        if _differences(own, changed) and other.settings and other.bytes <= room:
            found.setdefault(other.settings, (other, changed))
    first = replace(candidate(own), settings=())
    ordered = sorted(found.values(), key=lambda each: _order(each[0]))
    others = (other for other, changed in ordered if allowed(changed))
    return [first, *itertools.islice(others, most - 1)]


def _order(candidate: Candidate) -> tuple[float, int, tuple[tuple[str, Any], ...]]:
    """The fastest first; of equals the one that changes least."""
    return candidate.seconds, len(candidate.settings), candidate.settings


def _variants(config: Config, shape: ModelShape, device_bytes: int | None) -> Iterator[Config]:
    for budgeted in _budgets(config):
        if config.train.backend == "fsdp":
            if (device_bytes is None or shape.vision) and not automatic(config):
                yield budgeted  # no plan chooses for these: see settled()
            changes = {"gradient_checkpointing": "auto", "recompute_layers": None, "gather_once": "auto"}
            train = budgeted.train.model_copy(update=changes)
            yield settled(budgeted.model_copy(update={"train": train}), shape, device_bytes)
            continue
        for layout in _layouts(config, shape):
            divided = _with_megatron(
                budgeted, tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.etp, recompute="auto",
                recompute_layers=None,
            )  # fmt: skip
            train = divided.train.model_copy(update={"gradient_checkpointing": True})
            chosen = settled(divided.model_copy(update={"train": train}), shape, device_bytes)
            if not chosen.train.gradient_checkpointing:  # what would be recomputed does not matter then
                own = {n: getattr(config.megatron, n) for n in ("recompute", "recompute_layers")}
                chosen = _with_megatron(chosen, **own)
            recomputes = chosen.train.gradient_checkpointing is not False
            if not chosen.megatron.overlap_problems(config.model.dtype, recomputes=recomputes):
                yield chosen


def _budgets(config: Config) -> Iterator[Config]:
    """The config with micro-batches of several sizes, up to a rank's whole mini-batch."""
    train = config.train
    own = train.max_tokens_per_gpu if train.dynamic_batch else train.micro_batch_size
    name = "max_tokens_per_gpu" if train.dynamic_batch else "micro_batch_size"
    samples = max(1, train.global_batch_size // config.data_ranks)
    whole = samples * config.rollout.max_total_tokens if train.dynamic_batch else samples
    for factor in BUDGETS:
        size = own if factor == 1 else min(int(own * factor), whole)
        if size >= 1:
            changed = train.model_copy(update={name: size})
            yield config.model_copy(update={"train": changed})


def _layouts(config: Config, shape: ModelShape) -> Iterator[Layout]:
    ranks, per_node, m = config.placement.trainer_ranks, config.placement.devices_per_node, config.megatron
    own = trainer_layout(config)
    yield own  # also one of other sizes than powers of two
    if m.vpp > 1:  # chunks of a pipeline belong to its number of stages
        return
    for layout in candidate_layouts(shape, ranks, per_node, m.cp):
        try:
            check_layout(shape, layout, per_node, fp8=config.precision == "fp8")
        except ConfigError:
            continue
        if layout != own:
            yield layout


def _with_megatron(config: Config, **settings: Any) -> Config:
    return config.model_copy(update={"megatron": config.megatron.model_copy(update=settings)})


_COMPARED = (
    "train.max_tokens_per_gpu", "train.micro_batch_size", "train.gradient_checkpointing",
    "train.recompute_layers", "train.gather_once", "megatron.tp", "megatron.pp", "megatron.ep",
    "megatron.etp", "megatron.recompute", "megatron.recompute_layers", "megatron.recompute_modules",
)  # fmt: skip


def _differences(config: Config, changed: Config) -> tuple[tuple[str, Any], ...]:
    found = []
    for name in _COMPARED:
        section, _, key = name.partition(".")
        value = getattr(getattr(changed, section), key)
        if value != getattr(getattr(config, section), key):
            found.append((name, value))
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in found)


def _text(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
