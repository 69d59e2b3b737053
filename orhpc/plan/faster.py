"""What would shorten the longest phase of a step, as far as the model of step times can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pydantic import ValidationError

from orhpc.config import Config
from orhpc.plan.candidates import Candidate, candidates
from orhpc.plan.layout import trainer_layout
from orhpc.plan.memory import trainer_demand, trainer_memory
from orhpc.plan.rollout_time import RolloutTime
from orhpc.plan.run_plan import RunPlan
from orhpc.plan.speeds import Card
from orhpc.plan.step_time import StepTimes
from orhpc.plan.sync_time import SyncTime, predict_sync
from orhpc.plan.update_time import UpdateTime
from orhpc.plan.workload import Workload

_TRIED = 24
"""Candidates of which the fastest that can start is named."""
_WORTH = 0.15
"""Share of an update or a sync that a change must save to be named."""
_TAIL = 1.5
"""Decoding steps of the longest rollout, over those that all rollouts need, from which it is named."""


def advice(run: RunPlan, times: StepTimes, phase: str, allowed: Callable[[RunPlan], bool]) -> str:
    """Return what would shorten a phase; empty: the model cannot tell.

    Args:
        run: the plan.
        times: its predicted times.
        phase: ``rollout``, ``update``, ``sync`` or another.
        allowed: whether a run could start with a plan.
    """
    if times.card is None:
        return ""
    if phase == "update" and times.update is not None:
        factor = times.factors.get("update", 1.0)
        return _faster_update(run, times.card, times.work, times.update, allowed, factor)
    if phase == "rollout" and times.rollout is not None:
        return _faster_rollout(run, times.rollout, times.work)
    if phase == "sync" and times.sync is not None:
        return _faster_sync(run, times.sync, allowed, times.factors.get("sync", 1.0))
    return ""


def _faster_update(
    run: RunPlan,
    card: Card,
    work: Workload,
    now: UpdateTime,
    allowed: Callable[[RunPlan], bool],
    factor: float,
) -> str:
    """The fastest candidate of ``orhpc tune`` on one node; between nodes no speed was measured.

    ``factor``: by which times are calibrated.
    """
    bound = ""
    if now.host > now.device + now.exchange:
        bound = (
            "the host launches kernels more slowly than the GPU runs them; larger micro-batches have fewer"
        )
    if run.config.placement.nodes > 1:
        return bound
    for other in candidates(run.config, run.shape, run.device_bytes, _TRIED, card=card, work=work)[1:]:
        if other.seconds >= (1 - _WORTH) * now.seconds:
            break
        if allowed(changed(run, other)):
            settings = " ".join(other.overrides)
            seconds = factor * other.seconds
            return f"update about {seconds:.1f} s with {settings}, which fits; orhpc tune measures it"
    return bound


def changed(run: RunPlan, candidate: Candidate) -> RunPlan:
    """Return the plan with a candidate's settings."""
    config = run.config
    for name, value in candidate.settings:
        section, _, key = name.partition(".")
        update = {key: list(value) if isinstance(value, tuple) else value}
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=update)})
    layout, demand = trainer_layout(config), trainer_demand(config)
    trainer = trainer_memory(run.shape, layout, demand)
    return replace(run, config=config, layout=layout, demand=demand, trainer=trainer)


def _faster_sync(run: RunPlan, now: SyncTime, allowed: Callable[[RunPlan], bool], factor: float) -> str:
    """Return the advice to send each engine rank only its own experts; empty if it saves too little."""
    engine = run.config.engine
    if run.layout.sharded or engine.tp == 1 or engine.sync_own_experts:
        return ""
    settings = (("engine.ep", engine.tp),) if engine.ep == 1 else ()
    other = Candidate((*settings, ("engine.sync_own_experts", True)), 0, 0.0)
    than = changed(run, other)
    try:
        Config.model_validate(than.config.model_dump(mode="json"))
    except ValidationError:
        return ""
    sync = predict_sync(than)
    if sync.seconds >= (1 - _WORTH) * now.seconds or not allowed(than):
        return ""
    return (
        f"sync about {factor * sync.seconds:.1f} s with {' '.join(other.overrides)}; run on GPUs with "
        "Qwen3-MoE alone, so check others with engine.check_weights=true"
    )


def _faster_rollout(run: RunPlan, time: RolloutTime, work: Workload) -> str:
    if time.full:
        return (
            f"the KV cache holds {time.concurrent} rollouts an engine: a higher engine.memory_fraction, or "
            "engines of more GPUs"
        )
    needed = work.rollouts / len(run.placement.engines) * work.response / time.concurrent
    if work.longest > _TAIL * needed:
        return (
            f"the longest rollout takes {work.longest / needed:.1f} times the decoding steps that all "
            "need: rollout.oversample with rollout.partial, or rollout.max_staleness"
        )
    if work.rollouts / len(run.placement.engines) > time.concurrent:
        return "rollouts wait for each other: a higher engine.max_running"
    return ""
