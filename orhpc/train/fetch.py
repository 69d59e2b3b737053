"""Fetch the arrays of a micro-batch for the rank that trains on them, one micro-batch ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from orhpc.errors import GroupDamaged, RayLost, RecordError
from orhpc.rundir import BUFFER
from orhpc.train.batch import PackedBatch, ReadsImages, pack
from orhpc.types import Location, MicroBatch
from orhpc.wire.routes import RouteShare

T = TypeVar("T")
R = TypeVar("R")

FETCH_TIMEOUT_S = 600.0
"""Deadline for fetching one rollout's arrays from Ray's object store."""
_FILES_FIRST_S = 60.0
"""How long rollouts are read from files first after a worker has died: Ray takes a second for each one that
it has lost."""
_files_first_until = 0.0

Arrays = Mapping[str, Any]


def fetch_arrays(location: Location, *, routes: RouteShare | None = None) -> Arrays:
    """Return ``tokens_T``, ``loss_mask_T``, ``logprobs_T``, ``images`` and, if requested, ``routes`` of one
    rollout.

    They come from Ray's object store if it still holds them, else from the file in the run's buffer or
    record; routes that were not recorded are None.  Raises RayLost when the only copy was in a lost object
    store, GroupDamaged for a bad file of the run's buffer, and RecordError for a bad record.
    """
    global _files_first_until
    held = location.arrays
    if isinstance(held, Mapping):
        return held if routes is None else {**held, "routes": routes.cut(held.get("routes"))}
    files_first = location.file is not None and routes is None and time.monotonic() < _files_first_until
    if held is not None and not files_first:
        import ray
        import ray.exceptions

        try:
            arrays: Any = ray.get(held, timeout=FETCH_TIMEOUT_S)
            if routes is None:
                return arrays
            refs = location.routes
            own = None if refs is None else ray.get(refs[routes.stage], timeout=FETCH_TIMEOUT_S)
            return {**arrays, "routes": own}
        except ray.exceptions.RayError as error:
            if location.file is None:
                reason = str(error).split("\n", 1)[0]
                raise RayLost(f"a rollout's arrays are gone from the object store: {reason}") from error
            _files_first_until = time.monotonic() + _FILES_FIRST_S
    if location.file is None:
        raise RayLost("a rollout's arrays are neither in memory nor in a record")
    from orhpc.rundir.record import read_arrays

    try:
        return read_arrays(location.file, location.row, routes=routes)
    except RecordError as error:
        if Path(location.file).parent.name != BUFFER:
            raise  # no copy other than the record exists
        raise GroupDamaged(f"{error}; its group will be rolled out again") from None


def load_batch(
    micro_batch: MicroBatch,
    fetch: Callable[..., Arrays] = fetch_arrays,
    *,
    routes: RouteShare | None = None,
    images: ReadsImages | None = None,
) -> PackedBatch:
    """Fetch and pack one micro-batch, with this rank's share of its expert routes if requested, and with
    ``images`` of a model that sees."""
    arrays = [fetch(sample.location, routes=routes) for sample in micro_batch.samples]
    return pack(micro_batch.samples, arrays, routes=routes is not None, images=images)


def prefetched(load: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield ``load(item)`` in order, loading the next one while the caller works on this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        ahead = None
        for item in items:
            following = pool.submit(load, item)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()
