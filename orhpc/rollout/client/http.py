"""HTTP client of one engine: all calls used by this project, with typed failures and timeouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import orjson

from orhpc.errors import ConfigError, EngineUnavailable, WeightSyncFailed
from orhpc.process.pacing import pace
from orhpc.rollout.client.dialect import (
    BEGIN_UPDATE,
    END_UPDATE,
    ROUTING_KEY,
    read_checksums,
    target_only_fields,
)
from orhpc.rollout.client.wire import (
    TokenIds,
    generate_body,
    generation_bytes,
    read_generation,
    read_version,
)
from orhpc.types import Generation, PlacedImage, Sampling
from orhpc.wire.engine_requests import (
    CONTROL_BYTES,
    HEALTH_BYTES,
    Connections,
    EngineRequests,
    NoSuchEndpoint,
    TimedOut,
    parsed,
    parsed_object,
)
from orhpc.wire.routes import RouteShape
from orhpc.wire.weight_updates import FROM_TENSOR, from_tensor_body

log = logging.getLogger(__name__)

_INLINE_BYTES = 128 << 10
"""Larger answers (they carry routes) are parsed in a thread."""

_ABORT_S = 5.0
_DRAIN_S = 30.0


class EngineClient:
    """Client of SGLang's native protocol for one engine.

    ``request_timeout_s`` limits a generation, ``control_timeout_s`` a control call and
    ``transfer_timeout_s`` a weight transfer.  ``route_shape`` is required to request expert routes.
    ``vocabulary``: number of token ids; others are refused.
    ``target_only``: weight updates exclude the draft model, which is a separate model.

    Every call raises EngineUnavailable when the engine cannot be reached, answers with a server error or
    does not answer in time; ConfigError when it refuses the request or the key.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        request_timeout_s: float,
        control_timeout_s: float = 120.0,
        transfer_timeout_s: float = 600.0,
        route_shape: RouteShape | None = None,
        vocabulary: int | None = None,
        connections: Connections | None = None,
        target_only: bool = False,
    ) -> None:
        self._target_only = target_only
        self.url = url.rstrip("/")
        self.route_shape = route_shape
        self._vocabulary = vocabulary
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._connections = connections or Connections(key)
        self._requests = EngineRequests(url, self._connections)
        self._has_sessions = True

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    # --- generation -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling,
        *,
        rid: str,
        routes_start: int | None = None,
        routing_key: str | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Sample one continuation of ``prompt_ids``, which contain the tokens of ``images``.

        ``routes_start`` requests the expert routes from that context position on.  A router sends requests
        with the same ``routing_key`` to the same engine.  Raises PromptTooLong when prompt and
        ``max_new_tokens`` exceed the engine's context, and RoutesMissing.
        """
        if routes_start is not None and self.route_shape is None:
            raise ConfigError("expert routes were requested without the model's route_shape")
        await pace()
        body = generate_body(prompt_ids, sampling, rid=rid, routes_start=routes_start, images=images)
        try:
            headers = None if routing_key is None else {ROUTING_KEY: routing_key}
            limit = generation_bytes(
                len(prompt_ids), sampling, None if routes_start is None else self.route_shape
            )
            data = await self._send("POST", "/generate", body, self._request_timeout_s, headers, limit)
        except TimedOut:
            await self._abort_quietly(rid)
            raise

        def read() -> Generation:
            return read_generation(
                data,
                self.url,
                prompt_tokens=len(prompt_ids),
                routes_start=routes_start,
                route_shape=self.route_shape,
                vocabulary=self._vocabulary,
                images=bool(images),
                stops=sampling.stop_token_ids,
            )

        if len(data) > _INLINE_BYTES:
            return await asyncio.to_thread(read)
        await pace()
        return read()

    async def _abort_quietly(self, rid: str) -> None:
        """Abort a timed-out request; errors are only logged, because the timeout is being raised."""
        try:
            await self._send("POST", "/abort_request", orjson.dumps({"rid": rid}), _ABORT_S)
        except (EngineUnavailable, ConfigError) as error:
            log.warning("abort of %s after its deadline failed: %s", rid, error)

    async def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None:
        """End requests whose id starts with ``rid``, or all; they return the tokens sampled so far."""
        await self._control("/abort_request", {"rid": rid, "abort_all": abort_all})

    # --- state ------------------------------------------------------------------------------------

    async def health(self, timeout_s: float = 10.0) -> None:
        """Return if the engine reports that it is healthy."""
        await self._send("GET", "/health", None, timeout_s, limit=HEALTH_BYTES)

    async def health_generate(self, timeout_s: float = 60.0) -> None:
        """Return if the engine can generate a token."""
        await self._send("GET", "/health_generate", None, timeout_s)

    async def server_info(self) -> dict[str, Any]:
        """The server's settings and state, including ``weight_version``."""
        return await self._json("GET", "/server_info")

    async def model_info(self) -> dict[str, Any]:
        """The server's description of its model."""
        return await self._json("GET", "/model_info")

    async def weight_version(self) -> int:
        """Policy version of the weights that the engine holds."""
        return read_version((await self.model_info()).get("weight_version"), self.url)

    async def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating: ``abort`` ends requests, ``retract`` requeues them, ``in_place`` holds them."""
        await self._control("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Continue after a pause."""
        await self._control("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Drop all cached prefixes, once no request is running."""
        # Aborted requests are answered before the scheduler has removed all of them.
        await self._control(f"/flush_cache?timeout={_DRAIN_S:g}", {})

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Free ``kv_cache``, ``weights`` and ``cuda_graph``, or all; freed weights are lost."""
        await self._control("/release_memory_occupation", _tags(tags))

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again; weights must be synced before they can be served."""
        await self._control("/resume_memory_occupation", _tags(tags))

    # --- weights: these calls raise WeightSyncFailed when the engine refuses ----------------------

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join a process group whose rank 0 sends weights; returns once all ranks have joined."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._transfer("/init_weights_update_group", body)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave a process group."""
        await self._transfer("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_update(self) -> None:
        """Open an update session; no effect with releases that have none."""
        if not self._has_sessions:
            return
        try:
            await self._transfer(BEGIN_UPDATE, self._selected())
        except NoSuchEndpoint:
            self._has_sessions = False
        except WeightSyncFailed:
            # An interrupted session is still open: close it first.
            await self._transfer(END_UPDATE, {})
            await self._transfer(BEGIN_UPDATE, self._selected())

    def _selected(self) -> dict[str, Any]:
        return target_only_fields(sessions=self._has_sessions) if self._target_only else {}

    async def end_update(self) -> None:
        """Close the session opened by :meth:`begin_update`; the weights are then in place."""
        if self._has_sessions:
            await self._transfer(END_UPDATE, {})

    def update_fields(self, *, broadcast: bool) -> dict[str, Any]:
        """Further fields of the requests that update weights, of which trainers make most.

        ``broadcast``: for tensors that the engine receives through a group.
        """
        # Without update sessions, a broadcast updates only the target model.
        return self._selected() if self._has_sessions or not broadcast else {}

    async def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], **options: Any
    ) -> None:
        """Load serialized tensors, one string per tensor-parallel rank.

        ``options``: of :func:`orhpc.wire.weight_updates.from_tensor_body`.
        """
        body = from_tensor_body(serialized_named_tensors, **options)
        await self._transfer(FROM_TENSOR, body | self.update_fields(broadcast=False))

    async def update_weights_from_disk(
        self,
        model_path: str,
        *,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Load a Hugging Face folder that is visible to the engine."""
        body = {
            "model_path": model_path,
            # Null means the server's own format, and many engines start with random weights ("dummy").
            "load_format": "auto",
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
            "weight_version": weight_version,
        }
        await self._transfer("/update_weights_from_disk", body)

    async def update_weight_version(self, version: str, *, abort_all_requests: bool = False) -> None:
        """Set the version of the current weights."""
        body = {"new_version": version, "abort_all_requests": abort_all_requests}
        await self._transfer("/update_weight_version", body)

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first rows of a parameter, as nested lists."""
        path, body = "/get_weights_by_name", orjson.dumps({"name": name, "truncate_size": truncate_size})
        return parsed(await self._send("POST", path, body, self._control_timeout_s), f"engine {self.url}")

    async def weight_checksums(self) -> dict[str, str]:
        """One checksum per tensor and rank, by the engine's tensor names."""
        answer = await self._json("POST", "/weights_checker", {"action": "checksum"})
        return read_checksums(answer, self.url)

    # --- requests ---------------------------------------------------------------------------------

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        await self._send("POST", path, orjson.dumps(body), self._control_timeout_s)

    async def _transfer(self, path: str, body: dict[str, Any]) -> None:
        await self._requests.transfer(path, body, self._transfer_timeout_s)

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        payload = None if body is None else orjson.dumps(body)
        data = await self._send(method, path, payload, self._control_timeout_s)
        return parsed_object(data, f"engine {self.url}: {path}")

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        limit: int = CONTROL_BYTES,
    ) -> bytes:
        return await self._requests.send(method, path, body, timeout_s, headers, limit)


def _tags(tags: Sequence[str] | None) -> dict[str, Any]:
    return {} if tags is None else {"tags": list(tags)}
