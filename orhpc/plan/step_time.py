"""Predicted seconds of a step by phase, with what they rest on; without torch.

:func:`predict` computes them from a :class:`~orhpc.plan.run_plan.RunPlan`, a card and the sizes of a step.
What was never measured is not predicted, with the reason; what lies outside of the measured layouts is
extrapolated, and said so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orhpc.plan.rollout_time import RolloutTime, predict_rollout, record_s
from orhpc.plan.run_plan import RunPlan
from orhpc.plan.speeds import CARDS, Card
from orhpc.plan.step_errors import ERRORS, Error
from orhpc.plan.sync_time import SyncTime, predict_sync
from orhpc.plan.update_time import UpdateTime, predict_update
from orhpc.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step."""

    name: str
    seconds: float | None
    """None: not predicted."""
    why: str
    """What takes the time, or why it is not predicted."""
    error: Error | None = None
    """How far predictions of this kind were off."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicted times of one step."""

    card: Card | None
    work: Workload
    rollout: RolloutTime | None
    update: UpdateTime | None
    sync: SyncTime | None
    phases: tuple[Phase, ...]
    overlap: str
    """What overlaps; empty: nothing."""
    outside: tuple[str, ...]
    """In what the config differs from everything that was measured."""
    error: Error | None
    """Of whole steps."""
    parallel: bool
    """Whether rollouts and updates run at the same time."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By what :meth:`calibrated` has multiplied phases."""

    @property
    def seconds(self) -> float | None:
        """Seconds of the step; None if a phase is not predicted."""
        known = {phase.name: phase.seconds for phase in self.phases}
        if any(seconds is None for seconds in known.values()):
            return None
        total = sum(seconds for seconds in known.values() if seconds is not None)
        if self.parallel:
            total -= min(known["rollout"] or 0.0, (known["update"] or 0.0) + (known["record"] or 0.0))
        return total

    def calibrated(self, factors: Mapping[str, float]) -> StepTimes:
        """Return the times with phases multiplied by ``factors``; how far they are off is not known then."""
        phases = tuple(
            replace(each, seconds=each.seconds * factors[each.name], error=None)
            if each.seconds is not None and each.name in factors
            else each
            for each in self.phases
        )
        return replace(self, phases=phases, error=None, factors=factors)

    def longest(self, measured: Mapping[str, float]) -> str | None:
        """Return the name of the longest phase by ``measured`` seconds, else predicted ones."""
        known = {phase.name: phase.seconds for phase in self.phases if phase.seconds is not None}
        known |= dict(measured)
        return max(known, key=lambda name: known[name], default=None)


def predict(run: RunPlan, card: str | None, work: Workload) -> StepTimes:
    """Return the times of a step.

    Args:
        run: the plan.
        card: name of the GPU in :data:`~orhpc.plan.speeds.CARDS`; None or another name: no times.
        work: sizes of the step.
    """
    what = _unknown_card(run, card)
    found = None if what else CARDS[card or ""]
    engines = bool(run.placement.engines)
    no_update = what or unknown_update(run)
    no_rollout = what or _unknown_rollout(run)
    no_sync = what or _unknown_sync(run)
    update = predict_update(run.config, run.shape, found, work) if found and not no_update else None
    sync = predict_sync(run) if found and engines and not no_sync else None
    rollout = None
    if found and engines and not no_rollout:
        # What is not predicted is taken to last long enough to hide the copies.
        hidden = (sync.seconds if sync else math.inf, update.seconds if update else math.inf)
        rollout = predict_rollout(run, found, work, *hidden)
    kind = _kind(run)
    phases = []
    if engines:
        text = _rollout_text(rollout) if rollout else no_rollout
        phases.append(Phase("rollout", rollout and rollout.seconds, text, ERRORS.get(f"rollout, {kind}")))
    text = _update_text(update) if update else no_update
    backend = run.config.train.backend
    phases.append(Phase("update", update and update.seconds, text, ERRORS.get(f"update, {kind}, {backend}")))
    if engines:
        phases.append(Phase("record", record_s(run, work) if found else None, what))
        text = f"bound by {sync.bound}" if sync else no_sync
        phases.append(Phase("sync", sync and sync.seconds, text, ERRORS.get(f"sync, {kind}")))
    split = engines and run.config.placement.mode == "split"
    parallel = split and run.config.rollout.max_staleness > 0
    return StepTimes(
        found, work, rollout, update, sync, tuple(phases),
        overlap=_overlap(rollout, update, sync, moves=not run.state_stays, parallel=parallel),
        outside=tuple(_outside(run)), error=ERRORS.get(f"step, {kind}"), parallel=parallel,
    )  # fmt: skip


def _kind(run: RunPlan) -> str:
    return "mixture" if run.shape.experts else "dense"


# --- what is not predicted ------------------------------------------------------------------------


def _unknown_card(run: RunPlan, card: str | None) -> str:
    """Why no time at all is predicted; empty: it is."""
    if run.device_bytes is None:
        return "devices are CPU processes, whose speed differs too much"
    if card in CARDS:
        return ""
    known = " and ".join(each.name for each in CARDS.values())
    if card is None:
        return f"the GPU is not known ({known} are measured): --card"
    return f"nothing was measured on {card} ({known} are)"


def unknown_update(run: RunPlan) -> str:
    """Why the update is not predicted; empty: it is."""
    config = run.config
    problems = {
        "FP8 updates of dense models were not measured": (
            config.precision == "fp8" and not run.shape.experts
        ),
        f"updates in {config.model.dtype} were not measured": config.model.dtype != "bfloat16",
        "updates with a critic were not measured": run.demand.critic,
        "updates of models that see images were not measured": bool(run.shape.vision),
    }
    return next((problem for problem, there in problems.items() if there), "")


def _unknown_rollout(run: RunPlan) -> str:
    engine = run.config.engine
    problems = {
        "the cpu engine's speed is not known": engine.backend == "cpu",
        "speculative decoding was not measured": engine.drafts_with_weights or engine.speculative is not None,
        "batch-invariant kernels were not measured": engine.deterministic,
        "rollouts with images were not measured": bool(run.shape.vision),
        "the KV cache has no room for a rollout of full length": (
            run.rollouts_at_once(run.config.rollout.max_total_tokens) == 0
        ),
    }
    return next((problem for problem, there in problems.items() if there), "")


def _unknown_sync(run: RunPlan) -> str:
    if run.config.engine.sync == "disk":
        return "the speed of the shared disk is not known"
    return "the cpu engine's speed is not known" if run.config.engine.backend == "cpu" else ""


def _outside(run: RunPlan) -> list[str]:
    """In what a config differs from all measured rows."""
    config, layout = run.config, run.layout
    aspects = {
        f"{config.placement.nodes} nodes": config.placement.nodes > 1,
        "more than four GPUs": config.placement.nodes == 1 and config.placement.devices > 4,
        "FSDP on several GPUs": layout.sharded and layout.ranks > 1,
        "FP8 updates": config.precision == "fp8",
        "pipelines": layout.pp > 1,
        "context parallelism": layout.cp > 1,
        f"trainer TP {layout.tp}": layout.tp > 2,
        f"engine TP {run.tp}": run.tp > 4 and bool(run.placement.engines),
        "mixed placement": config.placement.mode == "mixed",
        "several updates a step": config.train.steps_per_rollout > 1,
        "a reference model": run.demand.reference,
        "overlapped all-to-alls": config.megatron.overlap_moe_expert_parallel_comm,
        "engine.direct_loading without engine.sync_own_experts": (
            config.engine.direct_loading and not config.engine.sync_own_experts
        ),
        "engine.delta_sync": config.engine.delta_sync,
    }
    return [aspect for aspect, there in aspects.items() if there]


# --- words ----------------------------------------------------------------------------------------


def _rollout_text(time: RolloutTime) -> str:
    steps = (
        f"{time.steps:.0f} decoding steps of {time.token * 1e3:.1f} ms, {time.concurrent} requests at once"
    )
    turns = f"; sleep {time.sleep:.1f}, wake {time.wake:.1f}" if time.sleep or time.wake else ""
    return f"{steps}{turns}"


def _update_text(time: UpdateTime) -> str:
    number = f"{time.micro_batches} micro-batch" + ("es" if time.micro_batches > 1 else "")
    parts = {"computing": time.device, "launches": time.host, "exchanges": time.exchange}
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
    optimizer = f"; optimizer {time.optimizer:.1f}" if time.optimizer >= 0.05 else ""
    return f"{number}; {shown}, overlapping{optimizer}" if shown else f"{number}{optimizer}"


def _overlap(
    rollout: RolloutTime | None,
    update: UpdateTime | None,
    sync: SyncTime | None,
    *,
    moves: bool,
    parallel: bool,
) -> str:
    found = []
    if rollout and rollout.sleep and moves:
        found.append("optimizer state moves during sync and update")
    if sync:
        found.append("buckets are gathered while engines load")
    if rollout and update and parallel:
        found.append("rollouts go on during the update")
    return "; ".join(found)
