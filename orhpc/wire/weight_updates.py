"""Bodies of SGLang's requests that update weights (0.5, ``srt/managers/io_struct.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FROM_TENSOR = "/update_weights_from_tensor"
FROM_DISTRIBUTED = "/update_weights_from_distributed"
FLATTENED_BUCKET = "flattened_bucket"
"""``load_format`` of tensors that travel as one array of bytes, see :mod:`orhpc.wire.weights`."""


def from_tensor_body(
    serialized_named_tensors: Sequence[str],
    *,
    load_format: str | None = None,
    flush_cache: bool = True,
    abort_all_requests: bool = False,
    weight_version: str | None = None,
) -> dict[str, Any]:
    """Load serialized tensors, one string per tensor-parallel rank."""
    return {
        "serialized_named_tensors": list(serialized_named_tensors),
        "load_format": load_format,
        "flush_cache": flush_cache,
        "abort_all_requests": abort_all_requests,
        "weight_version": weight_version,
    }


def from_distributed_body(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    group_name: str,
    load_format: str | None = None,
    flush_cache: bool = True,
    abort_all_requests: bool = False,
    weight_version: str | None = None,
) -> dict[str, Any]:
    """Receive these tensors from the group's rank 0."""
    return {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "load_format": load_format,
        "flush_cache": flush_cache,
        "abort_all_requests": abort_all_requests,
        "weight_version": weight_version,
    }
