"""Buckets and serialized tensors."""

from __future__ import annotations

import base64
import pickle
import sys
import threading
import time
import types

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing import reductions

from orhpc.wire.weights import (
    FlattenedTensorMetadata,
    bucket_handle,
    deserialize_named_tensors,
    empty_bucket,
    flatten_bucket,
    shared_bucket,
    unflatten_bucket,
)
from tests import preloaded
from tests.serialized_weights import serialize_named_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]
tensors = st.builds(
    lambda shape, dtype, seed: (
        torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).float().to(dtype)
    ),
    st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
named_tensors = st.lists(tensors, min_size=1, max_size=6).map(
    lambda found: [(f"model.layer.{i}", t) for i, t in enumerate(found)]
)


def assert_same(got: list[tuple[str, torch.Tensor]], wanted: list[tuple[str, torch.Tensor]]) -> None:
    assert [n for n, _ in got] == [n for n, _ in wanted]
    for (_, a), (_, b) in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.flatten().view(torch.uint8).tolist() == b.flatten().view(torch.uint8).tolist()


@given(named_tensors)
def test_buckets_hold_any_types(named: list[tuple[str, torch.Tensor]]) -> None:
    flat, metadata = flatten_bucket(named)
    assert_same(unflatten_bucket(flat, metadata), named)
    assert empty_bucket([(n, t.dtype, t.shape) for n, t in named]) == metadata


@given(named_tensors, st.sampled_from([None, "flattened_bucket"]))
def test_serialized_tensors_are_read_back_unchanged(
    named: list[tuple[str, torch.Tensor]], load_format: str | None
) -> None:
    if load_format is None and any(t.dtype == torch.float8_e4m3fn for _, t in named):
        with pytest.raises(ValueError, match="only be sent in a flattened bucket"):
            serialize_named_tensors(named, load_format)
        return
    text = serialize_named_tensors(named, load_format)
    assert_same(deserialize_named_tensors(text, load_format), named)


def test_metadata_in_sglangs_format_is_read() -> None:
    """The metadata is pickled under the name of SGLang's class."""
    name = "sglang.srt.weight_sync.tensor_bucket"
    module = types.ModuleType(name)
    theirs = type("FlattenedTensorMetadata", (), {"__module__": name})
    module.FlattenedTensorMetadata = theirs  # type: ignore[attr-defined]
    named = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16))]
    flat, metadata = flatten_bucket(named)
    copies = []
    for m in metadata:
        copy = theirs()
        copy.__dict__.update(vars(m))
        copies.append(copy)
    packages = {"sglang": types.ModuleType("sglang"), "sglang.srt": types.ModuleType("sglang.srt")}
    packages["sglang.srt.weight_sync"] = types.ModuleType("sglang.srt.weight_sync")
    packages[name] = module
    sys.modules.update(packages)
    try:
        data = pickle.dumps({"flattened_tensor": flat, "metadata": copies})
    finally:
        for package in packages:
            del sys.modules[package]
    assert_same(deserialize_named_tensors(base64.b64encode(data), "flattened_bucket"), named)


@pytest.mark.parametrize(
    "change", [{"start_idx": -4}, {"end_idx": 1000}, {"end_idx": 20}, {"shape": torch.Size([100])}]
)
def test_inconsistent_metadata_is_refused(change: dict[str, object]) -> None:
    flat, (metadata,) = flatten_bucket([("a", torch.arange(6.0))])
    broken = FlattenedTensorMetadata(**{**vars(metadata), **change})
    with pytest.raises(ValueError, match="do not hold"):
        unflatten_bucket(flat, [broken])


@pytest.mark.parametrize(
    "data", [b"", b"junk", pickle.dumps(3), pickle.dumps([("a", 1)]), pickle.dumps(print)]
)
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_other_objects_are_refused(data: bytes, load_format: str | None) -> None:
    with pytest.raises(ValueError):
        deserialize_named_tensors(base64.b64encode(data), load_format)


def test_a_file_descriptor_is_refused() -> None:
    import io
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing as mp

    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_descriptor")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump([("a", torch.ones(3))])
    finally:
        mp.set_sharing_strategy(before)
    with pytest.raises(ValueError, match="rebuild_storage_fd"):
        deserialize_named_tensors(base64.b64encode(buffer.getvalue()))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_busy_shared_memory_manager_is_waited_for(who: str) -> None:
    """torch gives it one second for each allocation, in the sending and in the receiving process."""
    process = preloaded.start(share_while_the_manager_is_busy, (who,))
    process.join()
    assert process.exitcode == 0


def share_while_the_manager_is_busy(who: str) -> None:
    def shared() -> str:
        flat, metadata = flatten_bucket([("w", torch.arange(4.0))])
        bucket = shared_bucket(flat.numel(), torch.device("cpu"))
        return bucket_handle(bucket.copy_(flat), metadata)

    handle = shared()
    reductions.shared_cache.clear()  # as in another process
    (manager,) = [p for p in psutil.Process().children() if p.name().startswith("torch_shm")]
    manager.suspend()
    threading.Timer(2.5, manager.resume).start()
    began = time.monotonic()
    if who == "sender":
        handle = shared()
    (named,) = deserialize_named_tensors(handle, "flattened_bucket")
    assert time.monotonic() - began > 2.0
    assert (named[0], named[1].numel()) == ("w", 4)
