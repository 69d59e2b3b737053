"""The loop of a run, and the supervisor around it: the one place that knows all three parts.

    python -m orhpc.driver RUN_DIR ATTEMPT --stop-file FILE

It consumes what the node's launcher left in ``attempts/NNN`` (config, placement, keys), brings
trainers, engines and workers up under the Ray cluster that is already there, and trains.  It
produces commits, records and events, and an exit code of :mod:`orhpc.errors`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from orhpc import evaluation
from orhpc.config import Config
from orhpc.config_files import load_config
from orhpc.errors import (
    EXIT_FAILED,
    EXIT_OK,
    Action,
    EnvironmentUnavailable,
    NodeLost,
    NonFinite,
    OrhpcError,
    OutOfMemory,
    PreflightError,
    StopRequested,
    UserCodeError,
    policy_of,
)
from orhpc.event_lines import line_of
from orhpc.events import EventLog
from orhpc.launch.placement import Placement
from orhpc.parts import Parts, bring_up, ray_connect
from orhpc.resume import choose_start
from orhpc.rollout.producer import Position
from orhpc.rundir import RunDir
from orhpc.saving import Saver, State
from orhpc.step_metrics import Phases
from orhpc.step_report import report
from orhpc.storage import Stored, refusals, when_taken
from orhpc.terminal import protect_process
from orhpc.tracking import Tracker, row_of
from orhpc.train.advantages import grouped_advantages
from orhpc.train.batch import plan_batches
from orhpc.types import BatchPlan, PromptGroup, Sample

log = logging.getLogger("orhpc.driver")
T = TypeVar("T")
_STOP_POLL_S = 0.2
_TOLD_S = 60.0
"""How often watchers are told of a filesystem that takes nothing, at most."""
_LEAVE_S = 5.0
"""After a stop and its commit, how long sessions and loggers may take to close."""


class Run:
    """One attempt at a run: its folder, config, placement, logs and stop file."""

    def __init__(self, rundir: RunDir, attempt: int, stop_file: Path) -> None:
        self.rundir, self.attempt = rundir, attempt
        self.folder = rundir.attempt(attempt)
        self.config: Config = load_config(self.folder / "config.yaml")
        self.placement = Placement.from_yaml((self.folder / "placement.yaml").read_text())
        self.events = EventLog(rundir.events, attempt, _log_event)
        self.tracker = Tracker(self.config, rundir)
        self.max_tokens = self.config.train.max_tokens_per_gpu
        """Token budget of a micro-batch, as of the newest start; lowered where memory ran out."""
        self._stop_file = stop_file
        self._told = -_TOLD_S

    def stop_requested(self) -> bool:
        return self._stop_file.exists()

    async def require_newest(self) -> None:
        """See that no newer attempt has begun: its files are not ours to replace.

        Raises:
            NodeLost: one has.
            StorageRefused: the run directory does not say.
        """
        with refusals("the run directory cannot be read"):
            newest = self.rundir.newest_attempt()
        if newest > self.attempt:
            raise NodeLost("a newer attempt has begun")

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something that nothing else interrupts.

        Raises:
            StopRequested: the stop file appeared first.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=_STOP_POLL_S))[0]:
                if self.stop_requested():
                    raise StopRequested("asked to stop")
            return await task
        finally:
            task.cancel()

    def storing(self, saver: Saver) -> Stored:
        """Do something that writes to the run directory, again for as long as that takes nothing.

        It may be a commit that has filled it, and failed: its leftovers go meanwhile.

        The function raises:
            StorageRefused: nothing was taken for ``run.storage_wait_s``.
            StopRequested: the stop file appeared while it was waited for.
        """
        wait_s, stop = self.config.run.storage_wait_s, self.stop_requested

        async def stored(write: Callable[[], Awaitable[Any]]) -> Any:
            return await when_taken(write, wait_s, self._refused, stop, meanwhile=saver.poll)

        return stored

    def _refused(self, problem: str) -> None:
        """Tell of it, once for all workers of a step."""
        log.error(problem)
        if time.monotonic() >= self._told + _TOLD_S:
            self._told = time.monotonic()
            self.events.write("storage_refused", error=problem)
            self.tracker.alert(problem)

    def notice(self, line: str) -> None:
        """Report something that needs a look and ends nothing."""
        log.warning("%s", line)
        self.events.write("notice", reason=line)
        self.tracker.alert(line)

    def close(self) -> None:
        self.tracker.close(*([_LEAVE_S] if self.stop_requested() else []))
        self.events.close()


def _log_event(event: dict[str, Any]) -> None:
    """What users look for in a run's log: its steps, commits and evaluations."""
    if (line := line_of(event)) is not None:
        log.info("%s", line)


async def train(run: Run, parts: Parts, saver: Saver) -> None:
    """Take groups, update, publish the weights, commit; until the steps are done.

    Raises:
        StopRequested: the stop file appeared.
        OrhpcError: a part failed; ``saver.state`` is that of the last completed step.
    """
    config, stored = run.config, run.storing(saver)
    if saver.state.step == 0 and evaluation.due(config, 0):
        await evaluate(run, parts, 0, stored)
    while saver.state.step < config.train.steps:
        phases, state = Phases(), saver.state
        if run.stop_requested():
            raise StopRequested("asked to stop")
        with phases.timed("rollout"):
            async with parts.serving() as turns:
                taken = await parts.take(state.step, run.stop_requested)
        tokens = state.max_tokens * config.ranks_per_sequence
        plan = plan_step(taken.groups, config, config.data_ranks, tokens)
        with phases.timed("update"):
            metrics = await update(run, parts, plan, state)
        # From here on the trainers hold the next step: whatever else fails, it is what a commit would hold.
        saver.state = state = replace(state, step=state.step + 1, position=parts.producer.position)
        metrics |= turns | {"padding": plan.padding}
        await stored(run.require_newest)
        try:
            with phases.timed("record"):
                await parts.record(state.step, taken, stored)
            with phases.timed("sync"):
                metrics |= await parts.publish(state.step)
            with phases.timed("checkpoint"):
                await saver.after_step()
        except Exception:
            saver.when_committed = partial(report, run, state, taken, metrics, phases)
            raise
        report(run, state, taken, metrics, phases)
        if evaluation.due(config, state.step):
            await evaluate(run, parts, state.step, stored)


def plan_step(groups: Sequence[PromptGroup], config: Config, ranks: int, max_tokens: int) -> BatchPlan:
    """Advantages and packing of a step's groups, from numbers alone; failed rollouts are left out."""
    advantages = grouped_advantages(
        [[r.reward or 0.0 for r in g.trainable] for g in groups],
        normalise=config.algorithm.normalise_advantage,
    )
    samples = [
        Sample(r.id, r.length, r.response_tokens, float(a), r.location)
        for group, of_group in zip(groups, advantages, strict=True)
        for r, a in zip(group.trainable, of_group, strict=True)
    ]
    return plan_batches(
        samples,
        ranks=ranks,
        n_minibatches=config.train.steps_per_rollout,
        max_tokens=max_tokens,
        micro_batch_size=None if config.train.dynamic_batch else config.train.micro_batch_size,
    )


async def update(run: Run, parts: Parts, plan: BatchPlan, state: State) -> dict[str, float]:
    """The step's optimiser updates; a first non-finite gradient is skipped, with all ranks' consent.

    Raises:
        NonFinite: the step before was skipped too.
    """
    if not plan.minibatches:
        log.warning("step %d has nothing to train on", state.step + 1)
        return {"skipped": 1.0}
    try:
        number = state.step + 1
        traces = run.rundir.profile_of(number) if number in run.config.train.profile_steps else None
        return await parts.trainers.step(plan, state.step, run.stop_requested, traces)
    except NonFinite as error:
        if run.events.last_step_skipped:
            raise
        log.error("step %d is skipped: %s", state.step + 1, error)
        return {"skipped": 1.0, "non_finite": 1.0}


async def evaluate(run: Run, parts: Parts, step: int, stored: Stored) -> None:
    """Roll out the evaluation tasks with the current weights and report."""
    if not parts.workers:
        return
    phases = Phases()
    async with parts.serving():
        groups, metrics = await run.unless_stopped(evaluation.evaluate(run.config, parts.workers))
    for line in dict.fromkeys(line for group in groups for line in group.notices):
        run.notice(line)
    await stored(run.require_newest)
    await parts.record_evaluation(step, groups, stored)
    await parts.publish(step)
    event = run.events.write("evaluation", step=step, seconds=phases.total, **metrics)
    run.tracker.log(step, row_of(event))


async def attempt_once(run: Run, lowered: int | None) -> None:
    """Bring the parts up, go on from the newest good commit; commits on the way out of a stop."""
    phases = Phases()
    choosing = asyncio.ensure_future(choose_start(run, lowered))

    async def beginning() -> tuple[Position, int]:
        *_, state = await choosing
        return state.position, state.step

    start = bring_up(run.config, run.placement, run.rundir, run.attempt, beginning, phases)
    try:
        parts = await run.unless_stopped(start)
        parts.notice = run.notice
        name, folder, state = await choosing
    except EnvironmentUnavailable as error:
        if run.rundir.lineage():
            raise
        # It has been waited for, and the run has nothing to lose: more likely a wrong address.
        raise PreflightError(str(error)) from error
    finally:
        choosing.cancel()
    try:
        with phases.timed("restore"):
            await run.unless_stopped(parts.trainers.restore(folder))
        with phases.timed("sync"):
            await run.unless_stopped(parts.publish(state.step))
        saver = Saver(
            run.rundir,
            run.attempt,
            run.config.checkpoint,
            parts.trainers,
            run.events,
            parent=name,
            state=state,
            alert=run.tracker.alert,
        )
        run.events.write(
            "ready",
            step=state.step,
            steps=run.config.train.steps,
            **parts.trainers.info,
            seconds=phases.total,
            phases=phases.seconds,
        )
        try:
            await train(run, parts, saver)
        except StopRequested:
            if run.config.train.steps:
                await saver.finish()
            raise
        except NonFinite:
            raise  # what is to be rolled back must not be committed
        except Exception:
            await saver.rescue()
            raise
        if run.config.train.steps:  # an evaluation leaves nothing to commit
            await saver.finish_run(run.config.run.storage_wait_s, run.stop_requested)
    finally:
        await leave(run, parts)


async def leave(run: Run, parts: Parts) -> None:
    """Close every part; after a stop within seconds, since what the scheduler grants is short."""
    try:
        await asyncio.wait_for(parts.close(), _LEAVE_S if run.stop_requested() else None)
    except TimeoutError:
        log.warning("not everything was closed within %.0f s of a stop", _LEAVE_S)


async def supervise(run: Run, lowered: int | None = None) -> int:
    """Run attempts in place as the policy table says; returns the process's exit code."""
    failures, last_step = 0, -1
    while True:
        try:
            with refusals("the run directory refuses", below=run.rundir.path):
                await attempt_once(run, lowered)
        except OrhpcError as error:
            policy = policy_of(error)
            reached = run.events.last_step
            failures = failures + 1 if reached <= last_step else 1
            last_step = max(last_step, reached)
            again = policy.action in (Action.RETRY, Action.REDO_STEP, Action.SKIP_STEP)
            if isinstance(error, StopRequested):
                run.events.write("stopped", step=reached, reason=str(error))
                return policy.exit_code
            again = again and failures <= policy.budget and not run.stop_requested()
            log.error("%s: %s", type(error).__name__, error)
            trace = error.trace if isinstance(error, UserCodeError) else ""
            if trace:
                log.error("the traceback:\n%s", trace)
            run.events.write(
                "restart" if again else "failed",
                kind=type(error).__name__,
                error=str(error),
                exit_code=policy.exit_code,
                **({"trace": trace} if trace else {}),
            )
            if not again:
                return policy.exit_code
            await asyncio.sleep(min(30.0, 2.0**failures))
            if isinstance(error, OutOfMemory):
                lowered = run.max_tokens = max(1, run.max_tokens // 2)
        else:
            run.events.write("finished", step=run.config.train.steps)
            return EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="orhpc.driver")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, help="token budget after the host ran out of memory")
    options = parser.parse_args(arguments)
    run = Run(RunDir(options.run_dir), options.attempt, options.stop_file)
    protect_process(*run.config.secret_sources)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        ray_connect(run.placement, run.folder / "ray.token")
        return asyncio.run(supervise(run, options.max_tokens))
    except OrhpcError as error:
        code = policy_of(error).exit_code
        run.events.write("failed", kind=type(error).__name__, error=str(error), exit_code=code)
        return code
    except Exception as error:
        log.exception("a bug, or something that no class of errors.py names")
        run.events.write("failed", kind=type(error).__name__, error=str(error)[:500], exit_code=EXIT_FAILED)
        return EXIT_FAILED
    finally:
        run.close()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # without Ray's three seconds of goodbye: the launcher takes Ray down
