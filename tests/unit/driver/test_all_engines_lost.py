"""If no engine is up, the rollouts wait: the engines are restarted and get the published weights again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.driver import runtime
from orhpc.driver.runtime import Runtime
from orhpc.errors import EngineUnavailable, InfraError, RayLost, StopRequested
from orhpc.rundir import RunDir

SHARED, DEDICATED = ["http://a"], ["http://b"]


class Calls:
    """Records the names of the methods that are called."""

    def __init__(self, who: str, calls: list[str]) -> None:
        self._who, self._calls = who, calls

    def __getattr__(self, name: str) -> Any:
        async def method(*_: Any, all_moves: bool = True) -> list[Any]:
            kept = "" if all_moves else ", may keep"
            self._calls.append(f"{self._who} {name}{kept}")
            return []

        return method


class Workers(Calls):
    def raise_failure(self) -> None: ...


class Engines(Calls):
    """One engine; ``ends`` times it is found to have ended."""

    def __init__(self, calls: list[str], *, shared: bool, ends: int = 1) -> None:
        super().__init__("engines", calls)
        self.shared, self.dedicated = (SHARED, []) if shared else ([], DEDICATED)
        self.ends, self.is_down, self.starting = ends, False, False
        self.pool, self.urls = self, ["http://engine"]
        self.lowered: dict[int, tuple[int, float]] = {}
        self.restart_seconds = {0: 1.0}
        self.reasons: list[str] = []
        """Of the events about ended engines."""
        self.failing = 0
        """Starts that will fail."""
        self.may_start = asyncio.Event()
        self.may_start.set()

    @property
    def down(self) -> Any:
        """As of the engines: indices; called, as of their pool: URLs and reasons."""
        return Down([0] if self.is_down else [])

    @property
    def none_serves(self) -> bool:
        return self.is_down

    @property
    def needs_shared_devices(self) -> bool:
        return bool(self.shared) and self.is_down and not self.starting

    async def watch(self) -> list[int]:
        if self.ends and not self.is_down:
            self.ends, self.is_down = self.ends - 1, True
        return self.down

    def hosts_of(self, _: int) -> list[Any]:
        return []

    def begin_restarts(self) -> None:
        self._calls.append("engines begin_restarts")
        self.starting = True

    async def await_starts(self, *, shared: bool = False) -> None:
        await self.may_start.wait()
        self._calls.append("engines await_starts")
        self.starting = self.failing == 0
        self.failing = max(0, self.failing - 1)

    async def note_failed_starts(self) -> None:
        await self.watch()

    async def restart_failed(self) -> list[int]:
        self._calls.append("engines restart_failed")
        was_down, self.is_down, self.starting = self.is_down, False, False
        return [0] if was_down else []


class Down(list[int]):
    def __call__(self) -> dict[str, str]:
        return {"http://engine": "it has failed"} if self else {}


def made(monkeypatch: pytest.MonkeyPatch, calls: list[str], engines: Engines) -> Runtime:
    """A run whose sync only notes its version, and whose engines are watched all the time."""

    class Sync:
        def __init__(self, *_: Any) -> None: ...

        async def send(self, version: int) -> dict[str, float]:
            calls.append(f"sync {version}")
            return {}

    monkeypatch.setattr(runtime, "WeightSync", Sync)
    monkeypatch.setattr(runtime, "_WATCH_S", 0.01)
    trainers: Any = Calls("trainers", calls)
    workers: Any = Workers("workers", calls)
    producer: Any = SimpleNamespace(notices=[])
    own: Any = engines
    unused: Any = None

    def report(kind: str, **fields: Any) -> None:
        if "during" in fields:
            calls.append(f"{kind} during {fields['during']}")
        engines.reasons += fields.get("reasons", [])

    found = Runtime(
        load_config("configs/tiny.yaml", []), RunDir(Path("x")), trainers, own, workers, producer, print,
        unused, unused, unused, report,
    )  # fmt: skip
    found._published = 7
    return found


def watched(found: Runtime, work: Callable[[], Awaitable[str]]) -> str:
    async def run() -> str:
        return await asyncio.wait_for(found._watched(work()), 10)  # type: ignore[arg-type]

    return asyncio.run(run())


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "dedicated"])
def test_rollouts_wait_until_the_engines_have_the_published_weights_again(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    calls: list[str] = []
    engines = Engines(calls, shared=shared)

    async def rollouts() -> str:
        while engines.ends or engines.is_down:
            await asyncio.sleep(0.01)
        return "done"

    assert watched(made(monkeypatch, calls, engines), rollouts) == "done"
    noted = ("trainers", "sync", "start", "serving", "await")
    relevant = [call for call in calls if any(word in call for word in noted) and "during" not in call]
    started = ["engines begin_restarts", "engines await_starts"]
    if shared:
        assert relevant == [
            "trainers sleep", *started, "trainers wake", "engines restart_failed", "trainers all", "sync 7",
            "trainers sleep, may keep", "engines resume_serving",
        ]  # fmt: skip
    else:
        assert relevant == [*started, "engines restart_failed", "sync 7"]
    assert calls.index("sync 7") < calls.index("workers published")
    assert engines.reasons == ["it has failed"]
    assert "engines_restarted during rollout" in calls


def test_a_stop_does_not_wait_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    engines = Engines(calls, shared=True)
    engines.may_start.clear()

    async def rollouts() -> str:
        while not engines.starting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        raise StopRequested("the stop file appeared")

    with pytest.raises(StopRequested):
        watched(made(monkeypatch, calls, engines), rollouts)
    assert "trainers wake" not in calls


def test_engines_that_end_again_and_again_restart_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    engines = Engines(calls, shared=True, ends=100)

    async def rollouts() -> str:
        await asyncio.Event().wait()
        return ""

    with pytest.raises(EngineUnavailable, match="3 times"):
        watched(made(monkeypatch, calls, engines), rollouts)
    assert calls.count("sync 7") == 2


def test_an_engine_that_does_not_start_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Failing(Engines):
        async def restart_failed(self) -> list[int]:
            raise EngineUnavailable("engine 0 ended while starting")

    async def rollouts() -> str:
        await asyncio.Event().wait()
        return ""

    with pytest.raises(InfraError, match="while starting"):
        watched(made(monkeypatch, calls, Failing(calls, shared=True)), rollouts)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_engine_lost_asleep_starts_while_the_trainers_sleep(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """At its start it allocates all its memory, for which the trainers leave no room while they are awake."""
    calls: list[str] = []
    engines = Engines(calls, shared=True)
    engines.failing = failing
    asyncio.run(made(monkeypatch, calls, engines).publish(8))
    start = ["trainers sleep", "engines begin_restarts", "engines await_starts", "trainers wake"]
    assert calls[: len(start) * (failing + 1) + 1] == [*start * (failing + 1), "engines restart_failed"]
    assert "sync 8" in calls
    assert "engines_restarted during sync" in calls


@pytest.mark.parametrize("lost", [False, True], ids=["all up", "one lost asleep"])
def test_gradients_are_freed_while_the_step_is_recorded(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Trainers that were woken for a start have the gradients' memory again, and free it before the sync."""
    calls: list[str] = []
    found = made(monkeypatch, calls, Engines(calls, shared=True, ends=int(lost)))

    async def step() -> None:
        found.begin_release()
        await asyncio.sleep(0)
        calls.append("recorded")
        await found.publish(8)

    asyncio.run(step())
    assert calls[:2] == ["trainers all", "recorded"]
    freed_again = calls[calls.index("trainers wake") : calls.index("sync 8")] if lost else calls[2:]
    assert freed_again.count("trainers all") == lost
    assert calls.index("engines resume_weights") < calls.index("sync 8")


def test_a_failure_while_gradients_are_freed_is_one_of_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    found = made(monkeypatch, calls, Engines(calls, shared=True, ends=0))
    repaired = found.trainers

    class Dying:
        async def all(self, *_: Any) -> list[float]:
            raise RayLost("trainer rank 1 has died")

    dying: Any = Dying()

    async def step() -> None:
        found.trainers = dying
        found.begin_release()
        await asyncio.sleep(0.01)
        with pytest.raises(RayLost):
            await found.publish(8)
        assert "sync 8" not in calls
        found.trainers = repaired
        await found.publish(8)
        found.trainers = dying
        found.begin_release()  # and the run stops
        found.trainers, gpus = repaired, SimpleNamespace(close=lambda: None)
        found.gpus = gpus  # type: ignore[assignment]
        await found.close()

    asyncio.run(step(), debug=True)
    assert [call for call in calls if call in ("trainers all", "sync 8")] == ["trainers all", "sync 8"]


def test_dedicated_engines_leave_the_gradients_to_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    found = made(monkeypatch, calls, Engines(calls, shared=False, ends=0))

    async def step() -> None:
        found.begin_release()
        await found.publish(8)

    asyncio.run(step())
    assert "sync 8" in calls and "trainers all" not in calls


def test_after_an_engine_ran_out_of_memory_trainers_keep_nothing_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    engines = Engines(calls, shared=True, ends=0)
    found = made(monkeypatch, calls, engines)

    async def nothing() -> None: ...

    async def step() -> None:
        await found.while_serving(nothing)
        engines.lowered = {0: (8, 0.6)}
        await found.publish(8)
        await found.while_serving(nothing)

    asyncio.run(step())
    assert [c for c in calls if "trainers sleep" in c] == ["trainers sleep, may keep", "trainers sleep"]


def test_a_trainer_lost_during_rollouts_does_not_hinder_the_restart_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    engines = Engines(calls, shared=True)
    found = made(monkeypatch, calls, engines)

    class Dying:
        async def sleep(self, *, all_moves: bool) -> dict[str, float]:
            raise RayLost("trainer rank 1 has died")

    dying: Any = Dying()
    found.trainers = dying
    asyncio.run(found._watch_engines())
    assert calls == ["engines begin_restarts"]
