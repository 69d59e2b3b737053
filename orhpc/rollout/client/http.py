"""One engine over HTTP: every call that this project makes, with typed failures and deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from orhpc.errors import ConfigError, EngineUnavailable, PromptTooLong, WeightSyncFailed
from orhpc.rollout.client.connections import (
    CONTROL_BYTES,
    HEALTH_BYTES,
    Connections,
    generation_bytes,
    read_answer,
)  # fmt: skip
from orhpc.rollout.client.dialect import (
    BEGIN_UPDATE,
    END_UPDATE,
    ROUTING_KEY,
    error_message,
    read_checksums,
    target_only_fields,
)
from orhpc.rollout.client.wire import (
    TokenIds,
    generate_body,
    parsed,
    parsed_object,
    read_generation,
    read_version,
)  # fmt: skip
from orhpc.types import Generation, Sampling
from orhpc.wire.routes import RouteShape

log = logging.getLogger(__name__)

_INLINE_BYTES = 128 << 10
"""Larger answers (they carry routes) are parsed in a thread."""

_CONNECT_S = 10.0
_ABORT_S = 5.0
_DRAIN_S = 30.0
_TOO_LONG = ("context length", "maximum allowed length", "input is too long")


class EngineClient:
    """SGLang's native protocol to one engine.

    ``request_timeout_s`` bounds a generation, ``control_timeout_s`` a control call and
    ``transfer_timeout_s`` a weight transfer.  ``route_shape`` is needed to ask for expert routes,
    ``vocabulary``, how many ids there are, to refuse others.
    ``target_only``: weights that are sent are none of the drafter's, which has a model of its own.

    Every call raises EngineUnavailable when the engine cannot be reached, answers with a server error
    or not in time; ConfigError when it refuses the request or the key.
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
    ) -> Generation:
        """Sample one continuation of ``prompt_ids``.

        ``routes_start`` asks for the expert routes of context positions from there on.  A router sends
        requests of one ``routing_key`` to one engine.  Raises
        PromptTooLong when prompt and ``max_new_tokens`` exceed the engine's context, and RoutesMissing.
        """
        if routes_start is not None and self.route_shape is None:
            raise ConfigError("expert routes were asked for without the model's route_shape")
        body = generate_body(prompt_ids, sampling, rid=rid, routes_start=routes_start)
        try:
            headers = None if routing_key is None else {ROUTING_KEY: routing_key}
            limit = generation_bytes(
                len(prompt_ids), sampling, None if routes_start is None else self.route_shape
            )
            data = await self._send("POST", "/generate", body, self._request_timeout_s, headers, limit)
        except _TimedOut:
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
            )

        return read() if len(data) <= _INLINE_BYTES else await asyncio.to_thread(read)

    async def _abort_quietly(self, rid: str) -> None:
        """Abort what has already failed for us; the failure that matters is the one being raised."""
        try:
            await self._send("POST", "/abort_request", orjson.dumps({"rid": rid}), _ABORT_S)
        except (EngineUnavailable, ConfigError) as error:
            log.warning("abort of %s after its deadline failed: %s", rid, error)

    async def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None:
        """End requests whose id begins with ``rid``, or all; they answer with what they have."""
        await self._control("/abort_request", {"rid": rid, "abort_all": abort_all})

    # --- state ------------------------------------------------------------------------------------

    async def health(self, timeout_s: float = 10.0) -> None:
        """Return when the engine says that it is healthy."""
        await self._send("GET", "/health", None, timeout_s, limit=HEALTH_BYTES)

    async def health_generate(self, timeout_s: float = 60.0) -> None:
        """Return when the engine has computed a token."""
        await self._send("GET", "/health_generate", None, timeout_s)

    async def server_info(self) -> dict[str, Any]:
        """What the server says of itself, ``weight_version`` among it."""
        return await self._json("GET", "/server_info")

    async def model_info(self) -> dict[str, Any]:
        """What the server says of its model."""
        return await self._json("GET", "/model_info")

    async def weight_version(self) -> int:
        """Policy version of the weights that the engine holds."""
        return read_version((await self.model_info()).get("weight_version"), self.url)

    async def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating: ``abort`` ends requests, ``retract`` requeues them, ``in_place`` holds them."""
        await self._control("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Go on after a pause."""
        await self._control("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Forget all cached prefixes, once nothing runs any more."""
        # Aborted requests have answered before the scheduler has put the last of them away.
        await self._control(f"/flush_cache?timeout={_DRAIN_S:g}", {})

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Free ``kv_cache``, ``weights`` and ``cuda_graph``, or all; weights are gone after it."""
        await self._control("/release_memory_occupation", _tags(tags))

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again; weights need a sync before they can be served."""
        await self._control("/resume_memory_occupation", _tags(tags))

    # --- weights ----------------------------------------------------------------------------------

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
        """Join a group whose rank 0 sends weights; returns once all ranks have joined.

        This call and the others of this section raise WeightSyncFailed when the engine refuses.
        """
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
        """Leave a group."""
        await self._transfer("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_update(self) -> None:
        """Open an update; harmless with releases that have no such call."""
        if not self._has_sessions:
            return
        try:
            await self._transfer(BEGIN_UPDATE, self._selected())
        except _Unknown:
            self._has_sessions = False
        except WeightSyncFailed:
            # One that broke off is still open.
            await self._transfer(END_UPDATE, {})
            await self._transfer(BEGIN_UPDATE, self._selected())

    def _selected(self) -> dict[str, Any]:
        return target_only_fields(sessions=self._has_sessions) if self._target_only else {}

    async def end_update(self) -> None:
        """Close what :meth:`begin_update` opened; the weights are in place after it."""
        if self._has_sessions:
            await self._transfer(END_UPDATE, {})

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Receive these tensors from the group's rank 0; returns when they are in place.

        A ``weight_version`` declares the update finished.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
            "weight_version": weight_version,
        }
        # Without sessions a broadcast reaches the target alone.
        selected = self._selected() if self._has_sessions else {}
        await self._transfer("/update_weights_from_distributed", body | selected)

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Put serialised tensors in place, one string a tensor-parallel rank."""
        body = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": load_format,
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
            "weight_version": weight_version,
        }
        await self._transfer("/update_weights_from_tensor", body | self._selected())

    async def update_weights_from_disk(
        self,
        model_path: str,
        *,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Load a Hugging Face folder that the engine can see."""
        body = {
            "model_path": model_path,
            # Null means the server's own, and FP8 engines start with random weights ("dummy").
            "load_format": "auto",
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
            "weight_version": weight_version,
        }
        await self._transfer("/update_weights_from_disk", body)

    async def update_weight_version(self, version: str, *, abort_all_requests: bool = False) -> None:
        """Name the version of the weights in place."""
        body = {"new_version": version, "abort_all_requests": abort_all_requests}
        await self._transfer("/update_weight_version", body)

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """First rows of a parameter, as nested lists."""
        path, body = "/get_weights_by_name", orjson.dumps({"name": name, "truncate_size": truncate_size})
        return parsed(await self._send("POST", path, body, self._control_timeout_s), f"engine {self.url}")

    async def weight_checksums(self) -> dict[str, str]:
        """One checksum for each tensor and rank, under the engine's own names."""
        answer = await self._json("POST", "/weights_checker", {"action": "checksum"})
        return read_checksums(answer, self.url)

    # --- plumbing ---------------------------------------------------------------------------------

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        await self._send("POST", path, orjson.dumps(body), self._control_timeout_s)

    async def _transfer(self, path: str, body: dict[str, Any]) -> None:
        payload = await asyncio.to_thread(orjson.dumps, body)
        try:
            data = await self._send("POST", path, payload, self._transfer_timeout_s)
        except _Unknown:
            raise
        except ConfigError as error:
            raise WeightSyncFailed(str(error)) from error
        answer = parsed_object(data, f"engine {self.url}: {path}") if data else {}
        if not answer.get("success", True):
            raise WeightSyncFailed(f"engine {self.url}: {path}: {str(answer.get('message'))[:500]}")

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
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        session = self._connections.session()
        if path != "/health":  # asked before it is known who answers, and open as in SGLang
            headers = {**self._connections.authorization, **(headers or {})}
        try:
            async with session.request(
                method, self.url + path, data=body, timeout=timeout, headers=headers, allow_redirects=False
            ) as response:
                data = await read_answer(response, limit, f"engine {self.url}: {path}")
        except TimeoutError as error:
            raise _TimedOut(f"engine {self.url}: {path} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {self.url}: {path}: {error or type(error).__name__}") from error
        if response.status == 200:
            return data
        raise self._refusal(path, response.status, data)

    def _refusal(self, path: str, status: int, data: bytes) -> Exception:
        message = error_message(data)
        said = f"engine {self.url}: {path} answered {status}: {message}"
        if status >= 500 or status in (408, 429):
            return EngineUnavailable(said)
        if status == 404:
            return _Unknown(said)
        if status in (401, 403):
            return ConfigError(f"engine {self.url} refuses the key")
        if any(words in message.lower() for words in _TOO_LONG):
            return PromptTooLong(said)
        return ConfigError(said)


class _Unknown(ConfigError):
    """The engine has no such call."""


class _TimedOut(EngineUnavailable):
    """The deadline passed; the engine may still be at it."""


def _tags(tags: Sequence[str] | None) -> dict[str, Any]:
    return {} if tags is None else {"tags": list(tags)}
