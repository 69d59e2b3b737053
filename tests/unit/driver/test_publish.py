"""In which order the parts of a run take part in a weight sync."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.driver import runtime
from orhpc.driver.runtime import Runtime
from orhpc.rundir import RunDir


@pytest.mark.parametrize(("carries", "dedicated"), [(True, True), (False, True), (True, False)])
def test_what_a_sync_interrupts_is_asked_for_again_with_the_new_version(
    monkeypatch: pytest.MonkeyPatch, carries: bool, dedicated: bool
) -> None:
    """A request that an engine holds during the sync would be recorded with the version before it."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        async def call(*_: Any) -> None:
            calls.append(name)

        return call

    class Sync:
        def __init__(self, *_: Any) -> None:
            pass

        async def send(self, version: int) -> dict[str, float]:
            calls.append(f"sync {version}")
            return {}

    monkeypatch.setattr(runtime, "WeightSync", Sync)
    engines = SimpleNamespace(
        shared=[], dedicated=["http://a"] if dedicated else [], pool=SimpleNamespace(down=list),
        pause=noted("engines.pause"), continue_generation=noted("engines.continue"),
    )  # fmt: skip
    workers = SimpleNamespace(
        pause=noted("workers.pause"), resume=noted("workers.resume"), published=noted("published")
    )
    run: Any = SimpleNamespace(
        engines=engines, workers=workers, trainers=None, _restart_failed_engines=noted("restart"),
        _hold_both_weights=noted("resume_weights"),
        config=SimpleNamespace(rollout=SimpleNamespace(carries=carries)), rundir=RunDir(Path("x")),
    )  # fmt: skip
    asyncio.run(Runtime.publish(run, 4))
    order = [call for call in calls if call not in ("restart", "resume_weights")]
    synced = ["engines.pause", "sync 4", "engines.continue", "published"]
    assert order == (["workers.pause", *synced, "workers.resume"] if carries and dedicated else synced)
