"""The training loop: roll out, compute advantages, update, record, publish the weights, commit, evaluate.

It consumes finished prompt groups and produces policy versions.  Each iteration waits for, in this order:
the groups of the step (:meth:`orhpc.driver.runtime.Runtime.collect`), the trainers' update, the workers'
record of the rollouts, the weight sync.  Trainers on shared devices free their gradients while the rollouts
are recorded.  A commit is written while training continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from orhpc.config import Config
from orhpc.driver import evaluation
from orhpc.driver.estimator import oldest_trained, trained_tokens
from orhpc.driver.fleet import hang
from orhpc.driver.memory_tries import SampleLimit, dropped_notice
from orhpc.driver.metrics import Phases
from orhpc.driver.run import Run
from orhpc.driver.runtime import Runtime
from orhpc.driver.saver import Saver
from orhpc.driver.slow_ranks import report_slow_ranks
from orhpc.driver.state import State
from orhpc.driver.step_report import CompletedStep
from orhpc.driver.trainer_recovery import repeat_after_failure
from orhpc.errors import NonFinite, TrainerHangs
from orhpc.rollout.producer import StepGroups
from orhpc.rundir.events import is_evaluated, read_events
from orhpc.train.batch import plan_batches
from orhpc.types import BatchPlan, Float64Array, PromptGroup, Sample

log = logging.getLogger("orhpc.driver")


async def train(run: Run, runtime: Runtime, saver: Saver) -> None:
    """Train until ``train.steps`` are done.

    Raises:
        StopRequested: the stop file appeared.
        OrhpcError: a part of the run failed; ``saver.state`` is the state that the trainers hold, and
            ``run.unreported`` their last step, if it is not reported yet.
    """
    config = run.config
    begun = saver.state.step
    if config.evaluates_after(begun) and not is_evaluated(read_events(run.rundir.events), begun):
        await evaluate(run, runtime, saver)  # also one that the last attempt began after this step
    while saver.state.step < config.train.steps:
        run.raise_if_stopped()
        state, phases = saver.state, Phases()
        # Rollouts
        with phases.timed("rollout"):
            async with run.faults.during_rollouts(runtime, state.step + 1):
                step_groups, sharing = await runtime.collect(state.step, run.stop_requested)
        # Advantages
        advantages = runtime.estimator.advantages(step_groups.groups, state.step)
        # Update
        await run.faults.before_update(runtime, state.step + 1)
        limit = SampleLimit()
        batch = partial(train_on, run, runtime, step_groups.groups, advantages, limit)
        with phases.timed("update"):
            metrics, state = await repeat_after_failure(
                run, runtime, state, batch, during="update", restarted=saver.begin_again, limit=limit
            )
        # The trainers hold the next step now: a commit made after a later failure contains this step.
        state = replace(state, step=state.step + 1, position=runtime.producer.position)
        saver.state = state = state if metrics.get("skipped") else raise_budget(run, state)
        note_fates(run, state, step_groups, limit, skipped=bool(metrics.get("skipped")))
        metrics |= sharing | runtime.estimator.metrics(step_groups.groups)
        run.unreported = CompletedStep(state, step_groups, metrics, phases)
        metrics |= await run.copies.begin(runtime.trainers, state.step)
        runtime.begin_release()
        # Record, publish, commit
        await saver.store(run.require_newest)
        await saver.store(lambda: asyncio.to_thread(run.ledger.write))
        with phases.timed("record"):
            await runtime.record(state.step, step_groups, saver.store)
        with phases.timed("sync"):
            sent, state = await repeat_after_failure(
                run,
                runtime,
                state,
                lambda held: run.unless_stopped(publish(run, runtime, held.step)),
                during="sync",
                restarted=saver.begin_again,
            )
        metrics |= sent
        with phases.timed("checkpoint"):
            await saver.after_step()
        metrics |= await runtime.gpus.report(state.step, phases)
        run.report_step()
        run.copies.allow(state)
        report_slow_ranks(run, runtime.trainers)
        # Evaluation
        if config.evaluates_after(state.step):
            await evaluate(run, runtime, saver)


def raise_budget(run: Run, state: State) -> State:
    """Return the state after a complete step, with a token budget that may be higher than before."""
    setting = run.config.train.max_tokens_per_gpu
    raised = state.with_budget(state.budget.after_step(setting, run.config.train.budget_raise_after_steps))
    if raised.max_tokens != state.max_tokens:
        run.max_tokens = raised.max_tokens
        budget = {"max_tokens": raised.max_tokens, "max_tokens_per_gpu": setting}
        run.events.write("token_budget_raised", step=state.step, **budget)
    return raised


def note_fates(run: Run, state: State, step_groups: StepGroups, limit: SampleLimit, *, skipped: bool) -> None:
    """Add what became of the step's prompt groups to the run's ledger; ``skipped``: no update was made."""
    trained, dropped = [group.id for group in step_groups.groups], step_groups.why
    if limit.below is not None:
        run.notice(dropped_notice(run.config, state.step, limit))
        too_long = [g.id for g in step_groups.groups if all(r.length >= limit.below for r in g.trainable)]
        trained = [group for group in trained if group not in too_long]
        dropped = dropped | dict.fromkeys(too_long, "out_of_memory")
    if run.config.train.replay_rollouts is not None:  # their ids are those of another run
        trained, dropped = [], {}
    elif skipped:
        trained, dropped = [], dropped | dict.fromkeys(trained, "update_skipped")
    run.ledger.step(
        state.step,
        trained=trained,
        dropped=dropped,
        next_group=state.position.next_group,
        pending=state.position.pending,
    )


async def train_on(
    run: Run,
    runtime: Runtime,
    groups: Sequence[PromptGroup],
    advantages: Sequence[Float64Array],
    limit: SampleLimit,
    state: State,
) -> dict[str, float]:
    """Pack a step's groups into micro-batches and make its optimizer updates; returns the metrics.

    Samples that ``limit`` excludes are left out.

    Raises:
        NonFinite: in this step and in the previous one.
    """
    config = run.config
    if runtime.workers:
        groups = runtime.workers.located(groups)
    tokens = state.max_tokens * config.ranks_per_sequence
    plan = plan_step(groups, advantages, config, config.data_ranks, tokens, state.step, limit)
    dropped = {"memory_dropped_rollouts": float(limit.dropped)} if limit.dropped else {}
    return {**await update(run, runtime, plan, state), "padding": plan.padding, **dropped}


def plan_step(
    groups: Sequence[PromptGroup],
    advantages: Sequence[Float64Array],
    config: Config,
    ranks: int,
    max_tokens: int,
    version: int,
    limit: SampleLimit | None = None,
) -> BatchPlan:
    """Pack the samples of a step.

    Failed rollouts are left out, those that have only tokens of too old policies and, with
    ``algorithm.mask_truncated``, those that were cut off.

    Args:
        groups: the step's groups.
        advantages: of each group's trainable rollouts.
        config: of the run.
        ranks: trainer ranks that do not share micro-batches.
        max_tokens: largest size of a micro-batch.
        version: policy version that the update starts from.
        limit: of the samples' lengths; it gets the number of samples left out, and the longest of the others.
    """
    oldest = oldest_trained(config, version)
    samples: list[Sample] = []
    size = (
        config.train.micro_batch_size
        * max_tokens
        // (config.train.max_tokens_per_gpu * config.ranks_per_sequence)
    )  # after running out of memory, a fixed number of samples is lowered like the budget
    for group, group_advantages in zip(groups, advantages, strict=True):
        for r, a in zip(group.trainable, group_advantages, strict=True):
            if (tokens := trained_tokens(config, r, oldest)) is None:
                continue
            first = oldest if tokens < r.response_tokens else None
            samples.append(Sample(r.id, r.length, tokens, float(a), r.location, first))
    if limit is not None:
        samples = _within(samples, limit)
    return plan_batches(
        samples,
        ranks=ranks,
        n_minibatches=config.train.steps_per_rollout,
        max_tokens=max_tokens,
        micro_batch_size=None if config.train.dynamic_batch else max(1, size),
    )


def _within(samples: Sequence[Sample], limit: SampleLimit) -> list[Sample]:
    kept = [s for s in samples if limit.below is None or s.length < limit.below]
    limit.dropped = len(samples) - len(kept)
    limit.longest = max((s.length for s in kept), default=0)
    return kept


async def update(run: Run, runtime: Runtime, plan: BatchPlan, state: State) -> dict[str, float]:
    """Make the step's optimizer updates; all ranks leave out the rest of a step whose gradient is not finite.

    Raises:
        NonFinite: the same happened in the previous step.
    """
    if not plan.minibatches:
        log.warning("step %d has nothing to train on", state.step + 1)
        return {"skipped": 1.0}
    if state.max_tokens < run.config.train.max_tokens_per_gpu:  # lowered in an earlier attempt, perhaps
        runtime.trainers.short_of_memory = True
    try:
        number = state.step + 1
        traces = run.rundir.profile_of(number) if number in run.config.train.profile_steps else None
        return await runtime.trainers.step(plan, state.step, run.stop_requested, traces)
    except TrainerHangs as error:
        note_stacks(run, error)
        raise
    except NonFinite as error:
        if run.last_step_non_finite:
            raise
        if error.made:  # with the mini-batches before
            log.error("step %d ends after %d optimizer steps: %s", state.step + 1, error.made, error)
            return {"non_finite": 1.0, "optimiser_steps": float(error.made)}
        log.error("step %d is skipped: %s", state.step + 1, error)
        return {"skipped": 1.0, "non_finite": 1.0}


async def publish(run: Run, runtime: Runtime, step: int) -> dict[str, float]:
    """Send the weights after ``step`` to the engines; see :meth:`Runtime.publish`."""
    try:
        return await runtime.publish(step)
    except TrainerHangs as error:
        note_stacks(run, error)
        raise


def note_stacks(run: Run, error: TrainerHangs) -> None:
    """Append what the ranks did when an update or a sync hung to ``stacks.log`` of the attempt."""
    hang.note(run.folder, error.stacks)


async def evaluate(run: Run, runtime: Runtime, saver: Saver) -> None:
    """Roll out the evaluation tasks with the current weights, record and report them."""
    if not runtime.workers:
        return
    step, phases = saver.state.step, Phases()
    groups, metrics = await runtime.evaluate(
        lambda: run.unless_stopped(evaluation.evaluate(run.config, runtime.workers))
    )
    for line in dict.fromkeys(line for group in groups for line in group.notices):
        run.notice(line)
    await saver.store(run.require_newest)
    await runtime.record_evaluation(step, groups, saver.store)
    await publish(run, runtime, step)
    run.tracker.log(run.events.write("evaluation", step=step, seconds=phases.total, **metrics))
