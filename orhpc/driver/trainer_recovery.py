"""Updates and weight syncs that outlive a lost trainer: the trainers alone start again, and repeat them.

Engines, rollout workers, environment sessions and finished rollouts stay.  The state comes from the copies in
the nodes' memory (:mod:`orhpc.driver.copies`), or from what the attempt started from if it has made no step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from orhpc.driver.resume import restore
from orhpc.driver.run import Run
from orhpc.driver.runtime import Runtime
from orhpc.driver.state import State
from orhpc.errors import InfraError, OrhpcError, OutOfMemory, RayLost, TrainerHangs, policy_of

log = logging.getLogger("orhpc.driver")
T = TypeVar("T")
_TRIES = {RayLost: 1, InfraError: 1, TrainerHangs: 1, OutOfMemory: policy_of(OutOfMemory).budget}
"""How often the trainers start again within one step, by failure: a lost rank, or a collective without it."""


async def repeat_with_new_trainers(
    run: Run,
    runtime: Runtime,
    state: State,
    work: Callable[[State], Awaitable[T]],
    *,
    during: str,
    restarted: Callable[[], Awaitable[None]],
) -> tuple[T, State]:
    """Do work of the trainers that can be repeated; if they fail, restart them in ``state`` and repeat it.

    Args:
        run: the attempt.
        runtime: its parts.
        state: that the trainers hold.
        work: gets the state, of which the token budget is halved each time the trainers run out of memory.
        during: phase of the step, for the event.
        restarted: is called when the trainers have been restarted, in ``state``.

    Returns the result, and the state with the budget that sufficed.

    Raises:
        OrhpcError: what ``work`` raised, if the trainers cannot be restarted or fail again.
    """
    failures = 0
    while True:
        try:
            return await work(state), state
        except OrhpcError as error:
            failures += 1
            if failures > _TRIES.get(type(error), 0) or run.stop_requested():
                raise
            if isinstance(error, OutOfMemory):
                state = replace(state, max_tokens=max(1, state.max_tokens // 2))
            if not await _restart(run, runtime, state, error, during):
                raise
            await restarted()


async def _restart(run: Run, runtime: Runtime, state: State, error: OrhpcError, during: str) -> bool:
    """Start the trainers again with the state after ``state.step``; return whether that was possible."""
    log.error("%s: %s; restarting the trainers", type(error).__name__, error)
    began = time.monotonic()
    try:
        await run.unless_stopped(_restored(run, runtime, state.step))
    except OrhpcError as other:
        log.error("the trainers cannot be restarted alone: %s", other)
        return False
    run.max_tokens = state.max_tokens
    seconds = time.monotonic() - began
    run.events.write(
        "trainers_restarted",
        step=state.step,
        during=during,
        kind=type(error).__name__,
        error=str(error),
        seconds=seconds,
        max_tokens=state.max_tokens,
        max_tokens_per_gpu=state.setting,
    )
    less = f" with {state.max_tokens} tokens per micro-batch" if isinstance(error, OutOfMemory) else ""
    run.notice(
        f"the trainers were restarted in {seconds:.0f} s and repeat step {state.step + 1}{less}: {error}"
    )
    return True


async def _restored(run: Run, runtime: Runtime, step: int) -> None:
    """Restart the trainers with the state after ``step``.

    Raises:
        InfraError: no state after this step can be restored.
        OrhpcError: the trainers do not start.
    """
    trainers, start = runtime.trainers, runtime.start
    await trainers.restart()
    copy = run.copies.of_step(step)
    if copy is not None and copy in await trainers.copies():
        await trainers.restore_copy(copy)
    elif step == start.state.step and start.copy is None:
        await restore(run, trainers, start)
    else:
        raise InfraError(f"not every trainer has a copy of step {step}")
    if runtime.engines is not None:
        await runtime.engines.leave_group()  # rank 0, which has ended, was a member
