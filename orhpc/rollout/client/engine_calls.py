"""Calls of :class:`~orhpc.rollout.client.http.EngineClient` that are made to all engines of a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from orhpc.errors import EngineUnavailable
from orhpc.rollout.client.http import EngineClient


class EngineCalls(ABC):
    """The calls; a pool says which engines there are, and which of them are down."""

    @property
    @abstractmethod
    def urls(self) -> list[str]:
        """URLs of all engines."""

    @abstractmethod
    def down(self) -> dict[str, str]:
        """Engines that receive no requests, and why."""

    @abstractmethod
    async def each(
        self, call: Callable[[EngineClient], Awaitable[Any]], urls: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Call all engines that are up, or those of ``urls``; returns their answers by URL."""

    async def pause_generation(self, mode: str = "abort") -> None:
        """Call all engines that are up; see :class:`EngineClient` for this and the following calls."""
        await self.each(lambda c: c.pause_generation(mode))

    async def continue_generation(self) -> None:
        await self.each(lambda c: c.continue_generation())

    async def flush_cache(self) -> None:
        await self.each(lambda c: c.flush_cache())

    async def abort_all(self) -> None:
        await self.each(lambda c: c.abort_request(abort_all=True))

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        await self.each(lambda c: c.release_memory_occupation(tags))

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        await self.each(lambda c: c.resume_memory_occupation(tags))

    async def update_weight_version(self, version: int | str) -> None:
        await self.each(lambda c: c.update_weight_version(str(version)))

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offsets: Mapping[str, int],
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Let the engines of ``rank_offsets`` (URL to first rank) join; requires these to be up."""
        self._all_up("a weight group", list(rank_offsets))
        offsets = {url.rstrip("/"): rank for url, rank in rank_offsets.items()}
        await self.each(
            lambda c: c.init_weights_update_group(
                master_address=master_address,
                master_port=master_port,
                rank_offset=offsets[c.url],
                world_size=world_size,
                group_name=group_name,
                backend=backend,
            ),
            list(offsets),
        )

    async def destroy_weights_update_group(self, group_name: str, urls: Sequence[str] | None = None) -> None:
        await self.each(lambda c: c.destroy_weights_update_group(group_name), urls)

    async def update_weights_from_disk(self, model_path: str, **options: Any) -> None:
        await self.each(lambda c: c.update_weights_from_disk(model_path, **options))

    def _all_up(self, what: str, urls: Sequence[str] | None) -> None:
        wanted = self.urls if urls is None else [url.rstrip("/") for url in urls]
        if down := [why for url, why in self.down().items() if url in wanted]:
            raise EngineUnavailable(f"{what} needs all engines: {'; '.join(down)}")
