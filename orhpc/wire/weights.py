"""Transfer of weights to an engine: process groups, flattened buckets and serialized tensors.

Sender (trainer) and receiver (engine) share this module, so that both sides of a transfer match.
The formats are SGLang's (0.5, ``srt/weight_sync/tensor_bucket.py``, ``srt/utils/common.py``): a
real SGLang server can join a group made here as well as the cpu engine.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pybase64
import torch
import torch.distributed as dist
from torch._utils import _rebuild_tensor_v2
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing import reductions

log = logging.getLogger(__name__)
T = TypeVar("T")
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where Linux keeps it
_MANAGER_S = 60.0
"""Seconds that torch's shared-memory manager may take to answer."""
NamedTensor = tuple[str, torch.Tensor]


# --- process groups -------------------------------------------------------------------------------


def join_weight_group(
    *, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join a process group in addition to this process's default group, if it has one.

    Rank 0 is the sender and hosts the store on ``address:port``.  Every later collective on the group
    also fails after ``timeout_s``.  Raises RuntimeError, or a subclass, if the others do not join.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(
        iter(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
    )
    store.set_timeout(timeout)
    # Only this private helper creates a group independent of the default one; SGLang's servers call it too,
    # and both ends must wrap the store in the same prefixes.
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,  # pyright: ignore[reportArgumentType]
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave_weight_group(group: dist.ProcessGroup) -> None:
    """Leave a group of :func:`join_weight_group`."""
    dist.destroy_process_group(group)


# --- flattened buckets ----------------------------------------------------------------------------


@dataclass
class FlattenedTensorMetadata:
    """Place of one tensor in a flattened bucket; offsets in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def flatten_bucket(named: Sequence[NamedTensor]) -> tuple[torch.Tensor, list[FlattenedTensorMetadata]]:
    """Concatenate tensors of any types as bytes: uint8 ``[total bytes]`` and the place of each."""
    parts: list[torch.Tensor] = []
    metadata: list[FlattenedTensorMetadata] = []
    at = 0
    for name, tensor in named:
        part = tensor.detach().contiguous().flatten().view(torch.uint8)
        parts.append(part)
        metadata.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + part.numel(), part.numel())
        )
        at += part.numel()
    return torch.cat(parts), metadata


def empty_bucket(specs: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> list[FlattenedTensorMetadata]:
    """Return the places of tensors, given as (name, type, shape), in a bucket to be received."""
    metadata: list[FlattenedTensorMetadata] = []
    at = 0
    for name, dtype, shape in specs:
        size = torch.Size(shape)
        length = size.numel() * dtype.itemsize
        metadata.append(FlattenedTensorMetadata(name, size, dtype, at, at + length, length))
        at += length
    return metadata


def unflatten_bucket(flat: torch.Tensor, metadata: Iterable[FlattenedTensorMetadata]) -> list[NamedTensor]:
    """Return views (copies where a type's alignment requires it) of a bucket's tensors.

    Raises ValueError when the metadata does not fit the bytes.
    """
    data = flat.flatten().view(torch.uint8)
    named: list[NamedTensor] = []
    for m in metadata:
        length = torch.Size(m.shape).numel() * m.dtype.itemsize
        if m.end_idx - m.start_idx != length or not 0 <= m.start_idx <= m.end_idx <= data.numel():
            raise ValueError(
                f"{m.name}: bytes {m.start_idx} .. {m.end_idx} do not hold {m.dtype} {tuple(m.shape)}"
            )
        part = data[m.start_idx : m.end_idx]
        if (data.storage_offset() + m.start_idx) % m.dtype.itemsize:
            part = part.clone()
        named.append((m.name, part.view(m.dtype).reshape(m.shape)))
    return named


# --- shared buckets -------------------------------------------------------------------------------


def shared_bucket(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate a bucket that another process of this node can map: uint8 ``[nbytes]``.

    On a GPU it is a separate plain allocation, which CUDA can export; raises OSError when the
    machine's shared memory (``/dev/shm``) is too full.
    """
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < nbytes:
        # Writing past the end of shared memory kills the process with SIGBUS.
        raise OSError(f"{SHARED_MEMORY}: {free >> 20} MiB free, a bucket needs {nbytes >> 20}")
    flat = torch.empty(nbytes, dtype=torch.uint8)
    _patiently(flat.untyped_storage()._share_filename_cpu_)
    return flat


def start_shared_memory_manager() -> None:
    """Start the process with which torch manages host memory that :func:`shared_bucket` allocates.

    It inherits all open sockets of this process.  Call it before any are opened that others must see closed
    when this process closes them.
    """
    _patiently(torch.empty(1, dtype=torch.uint8).untyped_storage()._share_filename_cpu_)


def _patiently(call: Callable[[], T]) -> T:
    """Make a call that needs the answer of torch's shared-memory manager, which has one second for it.

    That is too short on a busy machine, so the call is repeated for :data:`_MANAGER_S`.  Source of the limit:
    torch/lib/libshm/socket.h.
    """
    end = time.monotonic() + _MANAGER_S
    while True:
        try:
            return call()
        except RuntimeError as error:
            if "timed out" not in str(error) or time.monotonic() > end:
                raise
            log.warning("torch's shared-memory manager did not answer within a second; asking again")


def bucket_handle(flat: torch.Tensor, metadata: Iterable[FlattenedTensorMetadata]) -> str:
    """Serialize a handle of a :func:`shared_bucket`, for ``/update_weights_from_tensor``.

    It does not contain the bytes, which must not change before the receiver has answered.  The pickle has
    no classes of SGLang or orhpc, so that every release's list of allowed globals accepts it: metadata are
    plain namespaces.  GPUs are identified by UUID, because processes number them differently.
    """
    entries = [SimpleNamespace(**vars(m)) for m in metadata]
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.dispatch_table = _HANDLE_REDUCERS
    pickler.dump({"flattened_tensor": flat, "metadata": entries})
    return pybase64.b64encode(buffer.getbuffer()).decode("ascii")


_DEVICE = 6
"""Position of the device among the arguments of torch's ``rebuild_cuda_tensor``."""


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    manager, handle, size = storage._share_filename_cpu_()
    storage._shared_incref()
    return reductions.rebuild_storage_filename, (type(storage), manager, handle, size)


_HANDLE_REDUCERS = copyreg.dispatch_table | {
    torch.Tensor: _reduce_tensor,
    torch.storage.TypedStorage: reductions.reduce_typed_storage,
    torch.UntypedStorage: _reduce_storage,
}
"""A table instead of a method of the pickler, which would be called for each of thousands of metadata."""


# --- serialized tensors ---------------------------------------------------------------------------


NO_TENSORS = pybase64.b64encode(pickle.dumps([])).decode("ascii")
"""An empty list of named tensors, serialized for ``/update_weights_from_tensor``."""


def deserialize_named_tensors(encoded: str | bytes, load_format: str | None = None) -> list[NamedTensor]:
    """Read what a sender serialized, without running code that the sender chose.

    It accepts base64 of a pickle whose globals are in a short list: tensors with their bytes inside, or
    tensors in shared memory under torch's ``file_system`` sharing strategy; lists, tuples, dicts, strings
    and numbers; and SGLang's bucket metadata.  Tensors passed by file descriptor or CUDA handle are
    refused.  Raises ValueError for anything else.
    """
    try:
        data = pybase64.b64decode(encoded, validate=True)
        value = _TensorUnpickler(io.BytesIO(data)).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
        IndexError,
    ) as error:
        raise ValueError(f"serialized tensors cannot be read: {error}") from error
    if load_format == "flattened_bucket":
        if not isinstance(value, dict) or not isinstance(value.get("flattened_tensor"), torch.Tensor):
            raise ValueError("a flattened bucket is a dict of flattened_tensor and metadata")
        return unflatten_bucket(value["flattened_tensor"], value.get("metadata") or [])
    if load_format is not None:
        raise ValueError(f"load_format {load_format!r} is neither null nor 'flattened_bucket'")
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(
        isinstance(p, tuple | list)
        and len(p) == 2
        and isinstance(p[0], str)
        and isinstance(p[1], torch.Tensor)
        for p in pairs
    ):
        raise ValueError("serialized tensors must be a list of (name, tensor)")
    return [(name, tensor) for name, tensor in pairs]


def _load_storage_from_bytes(data: bytes) -> Any:
    # torch.storage._load_from_bytes would unpickle without limits.
    return torch.load(io.BytesIO(data), weights_only=True)


def _rebuild_storage_filename(cls: Any, manager: bytes, handle: bytes, size: int, dtype: Any = None) -> Any:
    if not re.fullmatch(rb"/torch_\d+_\d+_\d+", handle):
        raise ValueError(f"{handle!r} is not a shared-memory name of torch")
    return _patiently(partial(reductions.rebuild_storage_filename, cls, manager, handle, size, dtype))


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): _rebuild_storage_filename,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage_from_bytes,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.storage", "UntypedStorage"): torch.storage.UntypedStorage,
    ("orhpc.wire.weights", "FlattenedTensorMetadata"): FlattenedTensorMetadata,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): FlattenedTensorMetadata,
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in serialized tensors")
        return found
