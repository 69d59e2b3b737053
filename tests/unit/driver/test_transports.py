"""Engines on CPUs receive weights through shared memory if it is large enough."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.config.engine import SYNC_BUCKETS
from orhpc.driver.fleet.engine_places import transports
from tests.trainer_kit import make_config

MIB = 1 << 20


def chosen(monkeypatch: pytest.MonkeyPatch, *, free: int, sync: str, shared: bool = True) -> str:
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    config = make_config(engine={"sync": sync, "sync_bucket_mb": 8})
    place = SimpleNamespace(shared=shared, slots=[("a", 0)])
    engine: Any = SimpleNamespace(place=place, url="http://127.0.0.1:1")
    placement: Any = SimpleNamespace(trainers=[SimpleNamespace(node="a", device=0, rank=0)])
    by_handle, by_broadcast = transports(placement, config, [engine])
    assert len(by_handle) + len(by_broadcast) == 1
    return "ipc" if by_handle else "broadcast"


@pytest.mark.parametrize(
    ("free", "sync", "shared", "expected"),
    [
        (SYNC_BUCKETS * 8 * MIB, "auto", True, "ipc"),
        (SYNC_BUCKETS * 8 * MIB - 1, "auto", True, "broadcast"),
        (SYNC_BUCKETS * 8 * MIB, "auto", False, "broadcast"),
        (SYNC_BUCKETS * 8 * MIB, "broadcast", True, "broadcast"),
        (0, "ipc", True, "ipc"),
    ],
)
def test_shared_memory_is_used_if_it_suffices(
    monkeypatch: pytest.MonkeyPatch, free: int, sync: str, shared: bool, expected: str
) -> None:
    assert chosen(monkeypatch, free=free, sync=sync, shared=shared) == expected
