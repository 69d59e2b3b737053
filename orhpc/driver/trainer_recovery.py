"""Updates and weight syncs that outlive failures of trainers: the work is repeated, and little starts again.

* After running out of memory the trainers recover in place: all ranks leave their collectives, form new
  process groups, and free the failed pass.  The processes, their libraries and their models stay.
* If that is impossible, or a rank is lost or hangs, the trainer processes start again.

Engines, rollout workers, environment sessions and finished rollouts stay in either case.  State that is lost
comes from the copies in the nodes' memory (:mod:`orhpc.driver.copies`), or from what the attempt started from
if it has made no step.  No collective lies between a failure and the decision: the failed rank's exception
reaches the driver, which decides for all ranks, with a deadline for their answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from orhpc.driver.memory_tries import MemoryTries, Phase, SampleLimit
from orhpc.driver.resume import restore
from orhpc.driver.run import Run
from orhpc.driver.runtime import Runtime
from orhpc.driver.state import State
from orhpc.errors import InfraError, OrhpcError, OutOfMemory, RayLost, TrainerHangs

log = logging.getLogger("orhpc.driver")
T = TypeVar("T")
_TRIES = {RayLost: 1, InfraError: 1, TrainerHangs: 1}
"""How often the trainers start again within one step, by failure: a lost rank, or a collective without it."""


async def repeat_after_failure(
    run: Run,
    runtime: Runtime,
    state: State,
    work: Callable[[State], Awaitable[T]],
    *,
    during: Phase,
    restarted: Callable[[], Awaitable[None]],
    limit: SampleLimit | None = None,
) -> tuple[T, State]:
    """Do work of the trainers that can be repeated; if they fail, bring them back to ``state`` and repeat it.

    Args:
        run: the attempt.
        runtime: its parts.
        state: that the trainers hold.
        work: gets the state, whose token budget is lower each time an update has run out of memory.
        during: phase of the step.
        restarted: is called when the trainers have lost what they did in the background.
        limit: what ``work`` may leave out of the step to need less memory; None: nothing.

    Returns the result, and the state with the budget that sufficed.

    Raises:
        OrhpcError: what ``work`` raised, if the trainers cannot be brought back or fail again.
    """
    failures, tries = 0, MemoryTries(run.config, limit, during=during)
    while True:
        try:
            return await work(state), state
        except OrhpcError as error:
            if run.stop_requested():
                raise
            if isinstance(error, OutOfMemory):
                runtime.trainers.short_of_memory = True
                smaller = tries.smaller(state, error)
                if smaller is None:
                    raise
                state = smaller
                if await _recover(run, runtime, state, error, during):
                    continue
            else:
                failures += 1
                if failures > _TRIES.get(type(error), 0):
                    raise
            if not await _restart(run, runtime, state, error, during):
                raise
            await restarted()


async def _recover(
    run: Run,
    runtime: Runtime,
    state: State,
    error: OrhpcError,
    during: Phase,
) -> bool:
    """Bring the trainers back to the state after ``state.step`` in their processes; return the success."""
    log.error("%s: %s; recovering in place", type(error).__name__, error)
    began = time.monotonic()
    try:
        restored = await run.unless_stopped(_recovered(run, runtime, state.step))
    except OrhpcError as other:
        log.error("the trainers cannot recover in place: %s", other)
        return False
    seconds = time.monotonic() - began
    _report(run, "out_of_memory_recovered", state, error, during, seconds, {"restored": restored})
    run.notice(
        f"the trainers ran out of memory, recovered in place in {seconds:.1f} s and repeat "
        f"{_repeated(state, error, during)}: {error}"
    )
    return True


def _repeated(state: State, error: OrhpcError, during: Phase) -> str:
    """What is repeated after a failure, in words."""
    if during == "sync":
        return f"the weight sync after step {state.step}"
    less = f" with {state.max_tokens} tokens per micro-batch" if isinstance(error, OutOfMemory) else ""
    return f"step {state.step + 1}{less}"


async def _recovered(run: Run, runtime: Runtime, step: int) -> bool:
    """Recover in place; return whether the state had to be restored.

    Raises:
        OrhpcError: a rank does not answer in time, or the state cannot be restored.
    """
    whole = await runtime.trainers.recover()
    if not whole:
        await _load_state(run, runtime, step)
    if runtime.engines is not None:
        await runtime.engines.leave_group()  # rank 0 has left it
    return not whole


async def _restart(run: Run, runtime: Runtime, state: State, error: OrhpcError, during: Phase) -> bool:
    """Start the trainers again with the state after ``state.step``; return whether that was possible."""
    log.error("%s: %s; restarting the trainers", type(error).__name__, error)
    began = time.monotonic()
    try:
        await run.unless_stopped(_restored(run, runtime, state.step))
    except OrhpcError as other:
        log.error("the trainers cannot be restarted alone: %s", other)
        return False
    seconds = time.monotonic() - began
    _report(run, "trainers_restarted", state, error, during, seconds, {})
    repeated = _repeated(state, error, during)
    run.notice(f"the trainers were restarted in {seconds:.0f} s and repeat {repeated}: {error}")
    return True


async def _restored(run: Run, runtime: Runtime, step: int) -> None:
    """Restart the trainers with the state after ``step``.

    Raises:
        InfraError: no state after this step can be restored.
        OrhpcError: the trainers do not start.
    """
    await runtime.trainers.restart()
    await _load_state(run, runtime, step)
    if runtime.engines is not None:
        await runtime.engines.leave_group()  # rank 0, which has ended, was a member


async def _load_state(run: Run, runtime: Runtime, step: int) -> None:
    trainers, start = runtime.trainers, runtime.start
    copy = run.copies.of_step(step)
    if copy is not None and copy in await trainers.copies():
        await trainers.restore_copy(copy)
    elif step == start.state.step and start.copy is None:
        await restore(run, trainers, start)
    else:
        raise InfraError(f"not every trainer has a copy of step {step}")


def _report(
    run: Run, event: str, state: State, error: OrhpcError, during: str, seconds: float, extra: dict[str, bool]
) -> None:
    run.max_tokens = state.max_tokens
    run.events.write(
        event,
        step=state.step,
        during=during,
        kind=type(error).__name__,
        error=str(error),
        seconds=seconds,
        max_tokens=state.max_tokens,
        max_tokens_per_gpu=state.setting,
        **extra,
    )
