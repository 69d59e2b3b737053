"""SGLang's cache of image embeddings, with modules that behave like those of SGLang 0.5.16 and 0.5.23."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from orhpc.rollout.engines.sglang_images import CACHE, SCHEDULER, empty_with_cache, forget_images, note_caches

CACHE_CODE = """
class MultiModalStaticCache:
    def __init__(self, max_size):
        self.max_size, self.mm_cache, self.current_size = max_size, {}, 0

    def set(self, mm_hash, embedding):
        self.mm_cache[mm_hash] = embedding
        self.current_size += 1

    def clear(self):
        self.mm_cache.clear()
        self.current_size = 0
"""
SCHEDULER_CODE = f"""
from {CACHE} import MultiModalStaticCache


class Scheduler:
    def __init__(self, idle=True):
        self.idle, self.images, self.prefixes = idle, MultiModalStaticCache(max_size=100), ["a"]

    def flush_cache(self, empty_cache=True):
        if self.idle:
            self.prefixes.clear()
        return self.idle
"""


@pytest.fixture
def scheduler_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class as a process of SGLang imports it, after orhpc's preparations."""
    for name, code in {CACHE: CACHE_CODE, SCHEDULER: SCHEDULER_CODE}.items():
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        for part in range(1, name.count(".") + 2):
            monkeypatch.delitem(sys.modules, ".".join(name.split(".")[:part]), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    forget_images()
    yield importlib.import_module(SCHEDULER).Scheduler
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)


def test_images_are_forgotten_with_the_prefixes(scheduler_class: Any) -> None:
    scheduler = scheduler_class()
    scheduler.images.set(7, "seen by an old vision tower")
    assert scheduler.flush_cache(empty_cache=False)
    assert (scheduler.prefixes, scheduler.images.mm_cache, scheduler.images.current_size) == ([], {}, 0)


def test_a_cache_in_use_is_left_alone(scheduler_class: Any) -> None:
    scheduler = scheduler_class(idle=False)
    scheduler.images.set(7, "of a request that runs")
    assert not scheduler.flush_cache()
    assert scheduler.images.mm_cache == {7: "of a request that runs"}


def test_a_release_without_these_classes_is_left_alone() -> None:
    module = type(sys)("module")
    note_caches(module)
    empty_with_cache(module)
    assert not [name for name in vars(module) if not name.startswith("__")]
