"""SGLang's pause without its wait of a second, with a class that pauses as SGLang 0.5.16 does."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orhpc.rollout.engines import sglang_pause
from orhpc.rollout.engines.sglang_pause import MODULE, shorten, shorten_pauses

SOURCE = """
import asyncio


class Lock:
    readers = 0

    async def is_locked(self):
        return self.readers > 0


class TokenizerManager:
    def __init__(self, end_s):
        self.is_pause, self.is_pause_cond, self.model_update_lock = False, asyncio.Condition(), Lock()
        self.sent, self.end_s, self.aborts, self.own_waits = set(), end_s, 0, 0

    def abort_request(self, rid="", abort_all=False):
        assert abort_all
        self.aborts += 1
        for ended in self.sent:
            asyncio.get_running_loop().call_later(self.end_s, ended.set)

    async def generate(self, tokenization_s=0.0):
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)
        self.model_update_lock.readers += 1
        await asyncio.sleep(tokenization_s)
        ended = asyncio.Event()
        self.sent.add(ended)
        await ended.wait()
        self.sent.remove(ended)
        self.model_update_lock.readers -= 1

    async def pause_generation(self, obj):
        async with self.is_pause_cond:
            self.is_pause = True
            if obj.mode == "abort":
                while True:
                    self.abort_request(abort_all=True)
                    if not await self.model_update_lock.is_locked():
                        break
                    self.own_waits += 1
                    await asyncio.sleep(1.0)
"""


@dataclass
class Request:
    mode: str = "abort"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported after :func:`shorten_pauses`."""
    parts = MODULE.split(".")
    for depth in range(1, len(parts)):
        (tmp_path / "/".join(parts[:depth])).mkdir(exist_ok=True)
        (tmp_path / "/".join(parts[:depth]) / "__init__.py").touch()
    (tmp_path / ("/".join(parts) + ".py")).write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    shorten_pauses()
    yield importlib.import_module(MODULE)
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


async def paused(manager: Any, requests: list[float]) -> float:
    """Seconds of a pause while requests are in flight, that are sent after these seconds."""
    tasks = [asyncio.create_task(manager.generate(after)) for after in requests]
    await asyncio.sleep(0.01)
    began = time.monotonic()
    await manager.pause_generation(Request())
    took = time.monotonic() - began
    assert await asyncio.gather(*tasks) == [None] * len(requests)
    waiting = asyncio.create_task(manager.generate())
    await asyncio.sleep(0.02)
    assert manager.model_update_lock.readers == 0
    waiting.cancel()
    return took


def test_a_pause_waits_for_its_requests_and_not_for_a_second(module: Any) -> None:
    manager = module.TokenizerManager(end_s=0.03)
    assert 0.03 <= asyncio.run(paused(manager, [0.0] * 8)) < 0.5
    assert manager.own_waits == 0


def test_a_request_on_its_way_to_the_scheduler_is_aborted_too(module: Any) -> None:
    manager = module.TokenizerManager(end_s=0.03)
    assert asyncio.run(paused(manager, [0.0, 0.1])) < 0.6
    assert manager.own_waits == 0


def test_requests_that_do_not_end_are_left_to_sglang(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_pause, "LONGEST_S", 0.1)
    manager = module.TokenizerManager(end_s=0.6)
    assert asyncio.run(paused(manager, [0.0])) >= 0.6
    assert manager.own_waits == 1


def test_other_modes_and_unknown_ways_are_left_alone(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = module.TokenizerManager(end_s=0.0)
    asyncio.run(manager.pause_generation(Request("in_place")))
    assert manager.is_pause
    assert manager.aborts == 0

    class Other:
        async def pause_generation(self, obj: Any) -> None:
            """Waits for events."""

    own = Other.pause_generation
    caplog.set_level("INFO")
    shorten(Other)
    assert Other.pause_generation is own
    assert "unknown way" in caplog.text
