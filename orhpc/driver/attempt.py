"""One attempt: start the run's parts, train from the newest commit to the last step, commit at the end."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from orhpc.driver.bring_up import bring_up
from orhpc.driver.loop import publish, train
from orhpc.driver.metrics import Phases
from orhpc.driver.resume import Start, choose_start
from orhpc.driver.run import CLOSE_AFTER_STOP_S, Run
from orhpc.driver.runtime import Runtime
from orhpc.driver.saver import Saver
from orhpc.driver.tuning import tune
from orhpc.errors import EnvironmentUnavailable, NonFinite, PreflightError, StopRequested
from orhpc.rollout.engines.start_log import start_phases
from orhpc.rundir.events import has_begun
from orhpc.train.checkpoint.copy_files import CopyId

log = logging.getLogger("orhpc.driver")


async def attempt_once(run: Run, token_limit: int | None) -> None:
    """Train from the newest copy in memory or intact commit to the end; commit the last step at the end.

    A run with ``tuning.candidates`` measures those instead.

    ``token_limit``: maximum tokens per micro-batch, after an attempt that ran out of memory.

    Raises:
        StopRequested: the stop file appeared; the last step is committed.
        OrhpcError: something failed; the policy table decides what follows.
    """
    if run.config.tuning.candidates:
        await tune(run)
        return
    phases = Phases()
    run.unreported, run.last_step_non_finite = None, False
    runtime, start = await _bring_up(run, token_limit, phases)
    try:
        with phases.timed("sync"):
            await run.unless_stopped(publish(run, runtime, start.state.step))
        saver = Saver(
            run.rundir,
            run.attempt,
            run.config.checkpoint,
            runtime.trainers,
            run.events,
            run.storage,
            parent=start.commit,
            state=start.state,
            alert=run.tracker.alert,
            before_commit=run.ledger.write,
        )
        run.events.write(
            "ready",
            step=start.state.step,
            steps=run.config.train.steps,
            **runtime.trainers.info,
            seconds=phases.total,
            phases=phases.seconds,
            engine_start=await asyncio.to_thread(_slowest_engine_start, run.folder),
        )
        await saver.after_start()
        await _train_and_commit(run, runtime, saver)
    finally:
        await _close(run, runtime)


def _slowest_engine_start(attempt: Path) -> dict[str, float]:
    """The phases of the engine whose start took longest; empty if no log has a start."""
    starts = [start_phases(log) for log in attempt.glob("engine_[0-9]*.log")]
    return max(starts, key=lambda phases: sum(phases.values()), default={})


async def _bring_up(run: Run, token_limit: int | None, phases: Phases) -> tuple[Runtime, Start]:
    """Choose the state from which the attempt continues, and start all parts of the run with it."""
    copied: asyncio.Future[set[CopyId]] = asyncio.get_running_loop().create_future()
    choosing = asyncio.ensure_future(choose_start(run, token_limit, copied))
    try:
        runtime = await run.unless_stopped(bring_up(run, choosing, copied, phases))
        return runtime, await choosing
    except EnvironmentUnavailable as error:
        if has_begun(run.rundir):
            raise
        # It has never answered: its address is probably wrong.
        raise PreflightError(str(error)) from error
    finally:
        choosing.cancel()


async def _train_and_commit(run: Run, runtime: Runtime, saver: Saver) -> None:
    """Train, then commit and report the last completed step, also after a failure."""
    try:
        await train(run, runtime, saver)
    except NonFinite:
        raise  # the run returns to the last commit: this state must not be committed
    except StopRequested:
        if run.config.train.steps:
            await saver.finish()
        raise
    except Exception:
        await saver.rescue()
        raise
    else:
        if run.config.train.steps:  # a run that only evaluates has nothing to commit
            await saver.finish_run()
    finally:
        # A step that is in no commit is repeated, and reported then.
        if saver.state_is_committed:
            run.report_step()


async def _close(run: Run, runtime: Runtime) -> None:
    """Close every part; after a stop only for seconds, because the scheduler's grace period is short."""
    try:
        await asyncio.wait_for(runtime.close(), CLOSE_AFTER_STOP_S if run.stop_requested() else None)
    except TimeoutError:
        log.warning("not everything was closed within %.0f s of a stop", CLOSE_AFTER_STOP_S)
