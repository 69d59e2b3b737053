"""Measure the updates of several settings with one trainer each, instead of training.

``tuning.candidates`` lists them; each gets new trainers, which train on the newest recorded step of
``train.replay_rollouts`` several times.  The event ``candidate`` has what was measured.  After a restart the
run goes on with the candidates that have no such event; one that was being measured then counts as failed,
because it may have caused the restart, unless the run was asked to stop (``candidate_stopped``).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.driver.bring_up import trainer_config
from orhpc.driver.estimator import Estimator
from orhpc.driver.fleet import Trainers, node_ids
from orhpc.driver.loop import plan_step
from orhpc.driver.run import Run
from orhpc.errors import OrhpcError, StopRequested
from orhpc.launch.model import model_folder
from orhpc.rollout.recorded import ReplayProducer
from orhpc.rundir.events import read_events
from orhpc.types import BatchPlan, Float64Array, PromptGroup

WARM_UP = 2
"""Updates that are not timed: the first compiles kernels, the second fills caches."""


async def tune(run: Run) -> None:
    """Measure every candidate that has not been measured yet.

    Raises:
        StopRequested: the stop file appeared.
        RecordError: there are no recorded rollouts.
    """
    config = run.config
    events = read_events(run.rundir.events)
    measured = {e["index"] for e in events if e["event"] == "candidate"}
    last = {e["index"]: e["event"] for e in events if e["event"] in ("candidate_begun", "candidate_stopped")}
    recorded = ReplayProducer(str(config.train.replay_rollouts))
    groups = (await recorded.collect(recorded.steps[-1] - 1)).groups
    advantages = Estimator(config).advantages(groups)
    for index, overrides in enumerate(config.tuning.candidates):
        run.raise_if_stopped()
        if index in measured:
            continue
        if last.get(index) == "candidate_begun":
            _note(run, index, overrides, {"error": "it ended the run"})
            continue
        run.events.write("candidate_begun", index=index, settings=overrides)
        try:
            found = await _outcome(run, overrides, groups, advantages)
        except StopRequested:
            run.events.write("candidate_stopped", index=index, settings=overrides)
            raise
        _note(run, index, overrides, found)


def _note(run: Run, index: int, overrides: list[str], found: dict[str, Any]) -> None:
    run.events.write("candidate", index=index, settings=overrides, **found)


async def _outcome(
    run: Run, overrides: Sequence[str], groups: Sequence[PromptGroup], advantages: Sequence[Float64Array]
) -> dict[str, Any]:
    """Return what was measured of a candidate, or its ``error``."""
    try:
        config = load_config(run.folder / "config.yaml", overrides)
        measuring = _measure(run, config, groups, advantages)
        limit = run.config.tuning.candidate_timeout_s
        return await run.unless_stopped(asyncio.wait_for(measuring, limit))
    except StopRequested:
        raise
    except TimeoutError:
        return {"error": f"it took more than {run.config.tuning.candidate_timeout_s:g} s"}
    except OrhpcError as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


async def _measure(
    run: Run, config: Config, groups: Sequence[PromptGroup], advantages: Sequence[Float64Array]
) -> dict[str, Any]:
    ids, model_dir = node_ids(run.placement.nodes), str(model_folder(config, run.rundir))
    config = trainer_config(config, model_dir)
    budget = config.train.max_tokens_per_gpu * config.ranks_per_sequence
    batch = plan_step(groups, advantages, config, config.data_ranks, budget, 0)
    began = time.monotonic()
    trainers = await Trainers.start(config, run.placement, ids, model_dir, run.notice)
    try:
        await trainers.build()
        started = time.monotonic() - began
        updates = [await _update(trainers, batch, n) for n in range(WARM_UP + config.tuning.steps)]
    finally:
        await trainers.close()
    return {"start_seconds": started, **_summary(updates[WARM_UP:], batch, config)}


@dataclass(frozen=True, slots=True)
class _Measured:
    seconds: float
    metrics: dict[str, float]


async def _update(trainers: Trainers, batch: BatchPlan, number: int) -> _Measured:
    began = time.monotonic()
    metrics = await trainers.step(batch, number)
    return _Measured(time.monotonic() - began, metrics)


def _summary(updates: Sequence[_Measured], batch: BatchPlan, config: Config) -> dict[str, Any]:
    seconds = [each.seconds for each in updates]
    optimizer = [each.metrics.get("seconds_optimiser", 0.0) for each in updates]
    peaks = [each.metrics[key] for each in updates if (key := "memory_trainer_peak_gb") in each.metrics]
    middle = statistics.median(seconds)
    return {
        "seconds": middle,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "optimizer_seconds": statistics.median(optimizer),
        "samples": sum(minibatch.n_samples for minibatch in batch.minibatches),
        "tokens": batch.tokens,
        "micro_batches": max(len(rank) for minibatch in batch.minibatches for rank in minibatch.ranks),
        "tokens_per_s_per_rank": batch.tokens / middle / config.placement.trainer_ranks,
        "memory_peak_gb": max(peaks, default=None),
    }
