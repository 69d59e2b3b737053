"""The weight-update calls: sources of tensors, timeouts, and the state after a failure."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from orhpc.rollout.engines.cpu.deltas import HeldBuckets, RefusedDelta, is_of_delta
from orhpc.rollout.engines.cpu.protocol import BadRequest
from orhpc.rollout.engines.cpu.scheduler import Scheduler
from orhpc.rollout.engines.cpu.weights import BadUpdate
from orhpc.wire.weights import (
    NamedTensor,
    deserialize_named_tensors,
    empty_bucket,
    join_weight_group,
    leave_weight_group,
    unflatten_bucket,
)

log = logging.getLogger(__name__)


class WeightControl:
    """Updates from disk, tensors and process groups, one at a time.

    Receiving runs outside the compute thread and has a timeout; only the copy in place runs on that thread.
    A part that is refused before anything is written leaves whole weights whole.  A failure during an update
    makes them partial, which the engine reports until a complete update.
    """

    def __init__(self, scheduler: Scheduler, *, deadline_s: float) -> None:
        self._scheduler = scheduler
        self._deadline_s = deadline_s
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._buckets = HeldBuckets(scheduler.weights)
        self._one_at_a_time = asyncio.Lock()

    async def from_disk(self, body: dict[str, Any]) -> str:
        """``/update_weights_from_disk``: a folder of safetensors with the whole model."""
        folder = _text(body, "model_path")
        _load_format(body, ("auto", "safetensors"))
        return await self._update(body, lambda: folder, complete=True)

    async def from_tensor(self, body: dict[str, Any]) -> str:
        """``/update_weights_from_tensor``: see :func:`deserialize_named_tensors` for accepted formats."""
        serialized = body.get("serialized_named_tensors")
        if not isinstance(serialized, list) or len(serialized) != 1 or not isinstance(serialized[0], str):
            raise BadRequest("serialized_named_tensors must be a list of one string (one rank)")
        load_format = _load_format(body, ("flattened_bucket",))

        def read() -> list[NamedTensor]:
            try:
                return self._buckets.whole(deserialize_named_tensors(serialized[0], load_format))
            except ValueError as error:
                raise BadUpdate(str(error)) from error

        return await self._update(body, read)

    async def from_distributed(self, body: dict[str, Any]) -> str:
        """``/update_weights_from_distributed``: one broadcast per tensor, or one of a flattened bucket."""
        group = self._groups.get(_text(body, "group_name", "weight_update_group"))
        if group is None:
            raise BadRequest(
                f"group {body.get('group_name')!r} does not exist: call init_weights_update_group"
            )
        load_format = _load_format(body, ("flattened_bucket",))
        specs = _specs(body)
        for name, _, shape in specs:
            if not is_of_delta(name):
                await self._scheduler.call(
                    lambda name=name, shape=shape: self._scheduler.weights.check(name, shape)
                )
        receive = _receive_bucket if load_format == "flattened_bucket" else _receive_each
        return await self._update(body, lambda: self._buckets.whole(receive(group, specs, self._deadline_s)))

    async def init_group(self, body: dict[str, Any]) -> str:
        """``/init_weights_update_group``: join as rank ``rank_offset``; rank 0 is the sender."""
        name = _text(body, "group_name", "weight_update_group")
        backend = _text(body, "backend", "gloo")
        if backend != "gloo":
            raise BadRequest(f"backend {backend!r}: the cpu engine supports gloo only")
        address = _text(body, "master_address")
        port, rank, size = (_positive(body, key) for key in ("master_port", "rank_offset", "world_size"))
        if rank >= size:
            raise BadRequest(f"rank_offset {rank} is not within world_size {size}")
        async with self._one_at_a_time:
            if name in self._groups:
                raise BadRequest(f"group {name!r} exists already: destroy it first")
            try:
                self._groups[name] = await asyncio.to_thread(
                    join_weight_group,
                    address=address,
                    port=port,
                    rank=rank,
                    world_size=size,
                    name=name,
                    backend=backend,
                    timeout_s=self._deadline_s,
                )
            except (RuntimeError, ValueError) as error:
                raise BadUpdate(f"joining group {name!r} failed: {_line(error)}") from error
        return "Succeeded to initialize custom process group."

    async def destroy_group(self, body: dict[str, Any]) -> str:
        """``/destroy_weights_update_group``."""
        name = _text(body, "group_name", "weight_update_group")
        async with self._one_at_a_time:
            group = self._groups.pop(name, None)
            if group is None:
                raise BadRequest(f"group {name!r} does not exist")
            await asyncio.to_thread(leave_weight_group, group)
        return "Succeeded to destroy custom process group."

    async def _update(
        self, body: dict[str, Any], source: Callable[[], list[NamedTensor] | str], *, complete: bool = False
    ) -> str:
        version = body.get("weight_version")
        if version is not None and not isinstance(version, str | int):
            raise BadRequest(f"weight_version={version!r} is neither a string nor a number")
        flush, abort_all = _flag(body, "flush_cache", True), _flag(body, "abort_all_requests", False)
        async with self._one_at_a_time:
            scheduler = self._scheduler
            try:
                named = await asyncio.to_thread(source)
                count = await scheduler.call(
                    lambda: scheduler.update_weights(
                        named,
                        flush=flush,
                        abort_all=abort_all,
                        version=None if version is None else str(version),
                    )
                )
            except RefusedDelta:
                raise  # the bucket follows whole, and the other parts of the update stay written
            except (BadRequest, BadUpdate) as error:
                # Refused before anything was written, but earlier parts of the update are incomplete now.
                reason = scheduler.weights.not_servable
                if reason is not None and not scheduler.weights.released and not complete:
                    why = f"a part was refused: {_line(error)}"
                    await scheduler.call(functools.partial(scheduler.fail_update, why))
                raise
            except Exception as error:
                why = f"an update failed: {type(error).__name__}: {_line(error)}"
                log.exception("a weight update failed")
                await scheduler.call(functools.partial(scheduler.fail_update, why))
                raise BadUpdate(f"{why}; the weights are partial until a complete update") from error
        return f"Succeeded to update {count} parameters."


def _receive_each(
    group: dist.ProcessGroup, specs: list[tuple[str, torch.dtype, list[int]]], deadline_s: float
) -> list[NamedTensor]:
    tensors = [(name, torch.empty(shape, dtype=dtype)) for name, dtype, shape in specs]
    handles = [dist.broadcast(_wire_view(t), group_src=0, group=group, async_op=True) for _, t in tensors]
    _wait(handles, deadline_s)
    return tensors


def _receive_bucket(
    group: dist.ProcessGroup, specs: list[tuple[str, torch.dtype, list[int]]], deadline_s: float
) -> list[NamedTensor]:
    metadata = empty_bucket(specs)
    flat = torch.empty(metadata[-1].end_idx, dtype=torch.uint8)
    _wait([dist.broadcast(flat, group_src=0, group=group, async_op=True)], deadline_s)
    return unflatten_bucket(flat, metadata)


def _wire_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that gloo can send: float8 as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def _wait(handles: Iterable[Any], deadline_s: float) -> None:
    for handle in handles:
        if not handle.wait(timeout=timedelta(seconds=deadline_s)):
            raise RuntimeError(f"no broadcast arrived within {deadline_s} s")


def _specs(body: dict[str, Any]) -> list[tuple[str, torch.dtype, list[int]]]:
    names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list) and names):
        raise BadRequest("names, dtypes and shapes must be non-empty lists of the same length")
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
    specs: list[tuple[str, torch.dtype, list[int]]] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise BadRequest(f"dtype {dtype!r} of {name} is not a torch type")
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise BadRequest(f"shape {shape!r} of {name} is not a list of sizes")
        specs.append((str(name), kind, shape))
    return specs


def _text(body: dict[str, Any], key: str, default: str | None = None) -> str:
    value = body.get(key, default)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{key} is missing or not a string")
    return value


def _flag(body: dict[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{key} is not a boolean")
    return value


def _positive(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BadRequest(f"{key} is missing or not a positive integer")
    return value


def _load_format(body: dict[str, Any], known: tuple[str, ...]) -> str | None:
    value = body.get("load_format")
    if value is not None and value not in known:
        raise BadRequest(f"load_format {value!r}: must be null or {' or '.join(map(repr, known))}")
    return value


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
