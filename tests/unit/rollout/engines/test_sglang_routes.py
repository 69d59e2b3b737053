"""SGLang's cache of routes in ordinary memory, and its packed answers, with the real classes' methods."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orhpc.rollout.engines import sglang_routes
from orhpc.rollout.engines.sglang_routes import (
    CAPTURER,
    MODULE,
    allocate_routes_when_used,
    leave_unpinned,
    pack_routes,
    return_packed,
)
from orhpc.wire.routes import RouteShape, decode_routes


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


class BaseTopkCapturer:
    """SGLang 0.5.16's way to answer, with rows that are always the same."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: object, start_len: int = 0) -> Any:
        return self.rows[min(start_len, seqlen - 1) : seqlen - 1]


def capturers() -> Any:
    """The classes of a module that has just been imported."""
    base = type("BaseTopkCapturer", (BaseTopkCapturer,), {})
    own = type("RoutedExpertsCapturer", (base,), {})
    other = type("IndexerTopkCapturer", (base,), {})
    return SimpleNamespace(RoutedExpertsCapturer=own, IndexerTopkCapturer=other)


@pytest.mark.parametrize("experts", [128, 300])
def test_answers_are_packed_and_decoded_again(experts: int) -> None:
    rows = torch.stack([torch.randperm(experts)[:8] for _ in range(30 * 4)]).view(30, 4, 8).int()
    module = capturers()
    return_packed(module)
    answer = module.RoutedExpertsCapturer(rows).get_topk(
        req_pool_idx=1, seqlen=31, req_to_token_pool=None, start_len=3
    )
    assert answer.shape[0] == 27, "SGLang compares it with the number of tokens"
    assert answer.nbytes < rows[3:].nbytes * (0.27 if experts == 128 else 0.53)
    wire = base64.b64encode(answer.numpy().tobytes())  # _b64_encode_per_request of its detokenizer
    assert (decode_routes(wire, RouteShape(4, 8, experts), 27) == rows[3:].numpy()).all()
    assert module.IndexerTopkCapturer(rows).get_topk(1, 31, None).dtype == torch.int32


@pytest.mark.parametrize("answer", [None, torch.zeros(2, 4, 8), torch.zeros(0, 4, 8, dtype=torch.int32)])
def test_what_is_no_routes_is_passed_on(answer: Any) -> None:
    class RoutedExpertsCapturer:
        def get_topk(self) -> Any:
            return answer

    return_packed(SimpleNamespace(RoutedExpertsCapturer=RoutedExpertsCapturer))
    found = RoutedExpertsCapturer().get_topk()
    assert found is answer or (found.shape == answer.shape and found.dtype == answer.dtype)


def test_a_release_without_the_method_is_left_alone() -> None:
    return_packed(SimpleNamespace())
    return_packed(SimpleNamespace(RoutedExpertsCapturer=object))


def test_the_class_is_changed_as_soon_as_its_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in MODULE.split(".")[:-1]:
        tmp_path /= part
        tmp_path.mkdir()
        (tmp_path / "__init__.py").write_text("")
    (tmp_path / "base.py").write_text("class BaseHostCache: pass\n")
    (tmp_path / "routed_experts.py").write_text("from sglang.srt.state_capturer import base\n")
    monkeypatch.syspath_prepend(tmp_path.parents[2])
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    changed: list[str] = []
    for function in ("leave_unpinned", "return_packed"):
        monkeypatch.setattr(sglang_routes, function, lambda module: changed.append(module.__name__))
    allocate_routes_when_used()
    pack_routes()
    import sglang.srt.state_capturer.routed_experts  # pyright: ignore[reportMissingImports]

    assert changed == [MODULE, CAPTURER] and sglang.__name__
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
