"""The calls to one rollout worker, which wait while it is restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError

from orhpc.driver.fleet.actors import call
from orhpc.errors import OrhpcError, WorkerDied
from orhpc.rollout.worker import RolloutWorker
from orhpc.types import GroupRequest, PromptGroup

P = ParamSpec("P")
R = TypeVar("R")


class WorkerHandle:
    """Handle of one rollout worker; calls wait while it is restarted."""

    def __init__(self, actor: ActorHandle[Any], index: int) -> None:
        self.actor = actor
        self.index = index
        self.held: set[int] = set()
        """Groups whose arrays the worker has in memory."""
        self.died_at: list[float] = []
        self.failure: OrhpcError | None = None
        """Why it is not restarted any more."""
        self.memory_kills: tuple[int, int] = (0, 0)
        """Kills on its node when it started."""
        self.on_death: Callable[[WorkerHandle, OrhpcError], None] = lambda handle, error: None
        self._up = asyncio.Event()
        self._up.set()

    @property
    def up(self) -> bool:
        """Whether the worker's process runs, as far as the driver knows."""
        return self._up.is_set() and self.failure is None

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        """Generate one group; raises what :meth:`call` raises."""
        await self._wait()
        actor = self.actor
        group = await self._answer(actor, actor.run_group.remote(request), f"worker {self.index}", None)
        if actor is self.actor and self.up and group.rollouts:
            self.held.add(group.id)
        return group

    async def stay(self) -> None:
        """Wait for the worker's death, which is noted at once; raises WorkerDied."""
        await self._answer(self.actor, self.actor.stay.remote(), f"worker {self.index}", None)

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """Cancel groups; nothing to do if the worker is down."""
        if self.up:
            await call(self.actor.cancel.remote(list(group_ids)), f"worker {self.index}", 30.0)
            self.held.difference_update(group_ids)

    async def call(
        self,
        method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of the worker, once it is up.

        Raises:
            WorkerDied: it has died during the call, and is being restarted.
            WorkerFails: it is not restarted any more.
            OrhpcError: what :func:`orhpc.driver.fleet.actors.call` raises.
        """
        await self._wait()
        return await self._answer(self.actor, *self._begin(self.actor, method, *args, **kwargs), None)

    async def call_new(
        self,
        actor: ActorHandle[Any],
        timeout_s: float | None,
        method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of an actor that is not up yet, or is being closed; raises RayLost if it dies."""
        return await call(*self._begin(actor, method, *args, **kwargs), timeout_s)

    def _begin(
        self, actor: ActorHandle[Any], method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, str]:
        name = method.__name__
        return getattr(actor, name).remote(*args, **kwargs), f"worker {self.index} {name}"

    async def _wait(self) -> None:
        await self._up.wait()
        if self.failure is not None:
            raise self.failure

    async def _answer(
        self, actor: ActorHandle[Any], reference: Any, what: str, timeout_s: float | None
    ) -> Any:
        try:
            return await call(reference, what, timeout_s)
        except OrhpcError as error:
            if not isinstance(error.__cause__, RayActorError | OutOfMemoryError):
                raise
            self.note_death(actor, error)
            raise WorkerDied(str(error)) from error

    def note_death(self, actor: ActorHandle[Any], error: OrhpcError) -> None:
        """Note the death of the process once, whichever call has failed first."""
        if actor is self.actor and self.up:
            self._up.clear()
            self.held.clear()
            self.died_at.append(time.monotonic())
            self.on_death(self, error)

    def replaced(self, actor: ActorHandle[Any]) -> None:
        """Send the calls that wait to a new process."""
        self.actor = actor
        self._up.set()

    def fail(self, error: OrhpcError) -> None:
        """Give the worker up: calls that wait, and all later ones, raise the error."""
        self.failure = error
        self._up.set()
