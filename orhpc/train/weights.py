"""The sending side of weight sync, and the bucketing it shares with export.

The receiving side is SGLang's, or an engine that speaks its protocol: ``/init_weights_update_group``
makes the engines ranks 1 and up of a process group of which trainer rank 0 is rank 0, and
``/update_weights_from_distributed`` makes them receive a bucket's tensors, in order, one broadcast
each.  The driver makes those calls; this module only sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from orhpc.errors import WeightSyncFailed
from orhpc.train.groups import hosted_store, use_interface_towards

BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Tensors sent together, in this order, as the engines are told about them beforehand."""

    names: tuple[str, ...]
    """Hugging Face checkpoint names."""
    dtypes: tuple[str, ...]
    """torch's names without the prefix: ``bfloat16``, ``float32``."""
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[str, ...]
    """The trainer's own names of the parameters they are made of."""

    @property
    def nbytes(self) -> int:
        return sum(
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def plan_buckets(
    shapes: Mapping[str, tuple[int, ...]],
    split: Callable[[str, Tensor], Mapping[str, Tensor]],
    dtype: torch.dtype,
    limit: int = BUCKET_BYTES,
) -> list[BucketSpec]:
    """Cut the parameters, in order, into buckets of at most ``limit`` bytes; a larger one is alone.

    ``split`` turns a whole parameter into the tensors of a checkpoint; it runs on the meta device.
    """
    text = str(dtype).removeprefix("torch.")
    buckets: list[BucketSpec] = []
    names: list[str] = []
    parts: list[tuple[str, tuple[int, ...]]] = []
    size = 0

    def close() -> None:
        buckets.append(
            BucketSpec(
                tuple(n for n, _ in parts), (text,) * len(parts), tuple(s for _, s in parts), tuple(names)
            )
        )

    for name, shape in shapes.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if names and size + nbytes > limit:
            close()
            names, parts, size = [], [], 0
        pieces = split(name, torch.empty(shape, dtype=dtype, device="meta"))
        names.append(name)
        parts.extend((hf_name, tuple(piece.shape)) for hf_name, piece in pieces.items())
        size += nbytes
    if names:
        close()
    return buckets


class WeightSender:
    """Trainer rank 0's end of the group that the engines receive weights through."""

    def __init__(
        self,
        *,
        device: torch.device,
        address: str,
        port: int,
        world_size: int,
        group_name: str,
        timeout_s: float,
    ) -> None:
        """Host the group's store at ``address:port`` and wait for ``world_size - 1`` engine ranks.

        Built as SGLang's receivers build theirs: a TCP store, prefixed with the group's name, and a
        group over it apart from the default one.  Raises WeightSyncFailed past ``timeout_s``.
        """
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._group: ProcessGroup | None = None
        self._store = None
        with _failing_as(f"weight-sync group {group_name} did not come up"):
            use_interface_towards(address)
            self._store = hosted_store(address, port, world_size, self._timeout, wait=True)
            group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                dist.Backend(backend),
                PrefixStore(group_name, self._store),
                group_name=group_name,  # type: ignore[arg-type]
                timeout=self._timeout,
            )
            assert isinstance(group, ProcessGroup)
            _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
            self._group = group

    def send(self, tensors: Iterable[tuple[str, Tensor]], spec: BucketSpec) -> None:
        """Broadcast one bucket's tensors in order.

        Raises WeightSyncFailed when an engine is lost or slow; the engines' weights are then mixed
        and must not be served.
        """
        if self._group is None:
            raise WeightSyncFailed("weights sent after the weight-sync group was left")
        expected = zip(spec.names, spec.shapes, strict=True)
        pending: list[tuple[Any, Tensor]] = []
        with _failing_as("weights did not reach every engine"):
            for (name, tensor), (wanted, shape) in zip(tensors, expected, strict=True):
                if name != wanted or tuple(tensor.shape) != shape:
                    raise WeightSyncFailed(
                        f"{name} {tuple(tensor.shape)} is not the announced {wanted} {shape}"
                    )
                ready = tensor.to(self._device).contiguous()
                work = dist.broadcast(ready, src=0, group=self._group, async_op=True)
                pending.append((work, ready))
            for work, _ in pending:
                work.wait(self._timeout)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leave the group; harmless when repeated or when the other side is gone."""
        group, self._group = self._group, None
        self._store = None
        if group is not None:
            with _failing_as("the weight-sync group could not be left"):
                dist.destroy_process_group(group)


class _failing_as(AbstractContextManager[None]):
    """Turns whatever the communication library raises into WeightSyncFailed."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | OSError | ValueError):
            raise WeightSyncFailed(f"{self._what}: {' '.join(str(error).split())[:300]}") from error
