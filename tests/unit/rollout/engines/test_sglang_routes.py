"""SGLang's cache of routes in ordinary memory, with the real class's way to allocate it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orhpc.rollout.engines import sglang_routes
from orhpc.rollout.engines.sglang_routes import MODULE, allocate_routes_when_used, leave_unpinned


class BaseHostCache:
    """Like SGLang 0.5.16's: all of it in one call, by these names."""

    def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
        self.buffer = torch.zeros(
            (num_tokens, num_layers, topk_size), dtype=torch.int32, device="cpu", pin_memory=True
        )
        self.name = name


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_the_cache_is_not_pinned_and_takes_only_the_memory_that_is_used() -> None:
    module = SimpleNamespace(BaseHostCache=type("BaseHostCache", (BaseHostCache,), {}))
    leave_unpinned(module)
    before = resident_bytes()

    cache = module.BaseHostCache(2_000_000, 48, 8, name="routed_experts")  # 3.1 GB

    assert cache.name == "routed_experts" and not cache.buffer.is_pinned()
    places = torch.tensor([3, 1_999_999])
    routes = torch.arange(2 * 48 * 8, dtype=torch.int32).view(2, 48, 8)
    cache.buffer[places] = routes
    assert torch.equal(cache.buffer[places], routes) and not cache.buffer[4].any()
    assert resident_bytes() - before < 100e6


def test_a_release_without_the_class_is_left_alone() -> None:
    leave_unpinned(SimpleNamespace())


def test_the_class_is_changed_as_soon_as_its_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in MODULE.split(".")[:-1]:
        tmp_path /= part
        tmp_path.mkdir()
        (tmp_path / "__init__.py").write_text("")
    (tmp_path / "base.py").write_text("class BaseHostCache: pass\n")
    monkeypatch.syspath_prepend(tmp_path.parents[2])
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    changed: list[str] = []
    monkeypatch.setattr(sglang_routes, "leave_unpinned", lambda module: changed.append(module.__name__))
    allocate_routes_when_used()
    import sglang.srt.state_capturer.base  # pyright: ignore[reportMissingImports]

    assert changed == [MODULE] and sglang.__name__
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
