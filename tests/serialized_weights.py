"""Weights as SGLang's requests receive them: with their bytes, not a handle, or by a broadcast."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pybase64

from orhpc.rollout.client import EngineClient
from orhpc.wire.weight_updates import FROM_DISTRIBUTED, from_distributed_body
from orhpc.wire.weights import NamedTensor, flatten_bucket


async def receive_broadcast(
    client: EngineClient,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    **options: Any,
) -> None:
    """Have an engine receive tensors from a group's rank 0, as trainer ranks do in a sync.

    ``options``: of :func:`orhpc.wire.weight_updates.from_distributed_body`.
    """
    body = from_distributed_body(names, dtypes, shapes, **options)
    await client._transfer(FROM_DISTRIBUTED, body | client.update_fields(broadcast=True))


def serialize_named_tensors(named: Sequence[NamedTensor], load_format: str | None = None) -> str:
    """Serialize CPU tensors for ``/update_weights_from_tensor``: base64 of a pickle that holds the bytes.

    ``load_format``: None for a list of (name, tensor), ``flattened_bucket`` for one bucket of bytes.
    Raises ValueError for any other, and for float8 outside a bucket, which torch's own pickles cannot
    carry safely.
    """
    value: Any
    if load_format == "flattened_bucket":
        flat, metadata = flatten_bucket(named)
        value = {"flattened_tensor": flat, "metadata": [SimpleNamespace(**vars(m)) for m in metadata]}
    elif load_format is None:
        for name, tensor in named:
            if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
                raise ValueError(f"{name} is {tensor.dtype}, which can only be sent in a flattened bucket")
        value = [(name, tensor.detach().contiguous().clone()) for name, tensor in named]
    else:
        raise ValueError(f"load_format {load_format!r} is neither null nor 'flattened_bucket'")
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=4).dump(value)
    return pybase64.b64encode(buffer.getbuffer()).decode("ascii")
