"""Restarts of rollout workers that die: what the new process learns, and when a worker is given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from orhpc.config.files import load_config
from orhpc.driver.fleet import WorkerHandle, Workers, WorkerSetup, workers
from orhpc.errors import InfraError, RayLost, WorkerDied, WorkerFails, policy_of
from orhpc.plan.placement import Node, plan
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir import RunDir
from orhpc.rundir.record import record_path
from orhpc.types import GroupRequest, Location, PromptGroup, RolloutEnd, RolloutSummary, Task
from tests.unit.rollout.producer_kit import request_of


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    async def remote(self, *args: Any) -> Any:
        return await self._actor.answer(self._name, *args)

    def options(self, **_: Any) -> Method:
        return self


class Actor:
    """Answers like Ray's actor of a worker; :meth:`die` ends every call, as a killed process does."""

    def __init__(self, *, starts: bool = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.dead = asyncio.Event()
        self.hanging: tuple[str, ...] = ()
        """Methods that do not answer."""
        self.during: Callable[[str], None] = lambda name: None
        if not starts:
            self.dead.set()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def die(self) -> None:
        self.dead.set()

    async def answer(self, name: str, *args: Any) -> Any:
        self.calls.append((name, *args))
        self.during(name)
        if name in ("stay", *self.hanging):
            await self.dead.wait()
        await asyncio.sleep(0)
        if self.dead.is_set():
            raise ActorDiedError
        if name == "memory_kills":
            return (0, 5)
        if name == "stacks":
            return "in my_reward"
        return group_of(args[0]) if name == "run_group" else None


def group_of(request: GroupRequest, file: str | None = "buffer/group_1.h5") -> PromptGroup:
    where = Location(file=file, row=0, arrays="a reference")
    rollout = RolloutSummary(
        f"{request.id}.0", request.id, 0, Task("e", "train", 0), 9, 5, RolloutEnd.TERMINAL, 1.0, 0, 1, 0, 0,
        0.1, 0, where,
    )  # fmt: skip
    return PromptGroup(request.id, request.task, (rollout,))


class Stage:
    """Workers of fake actors; the processes that start next are in ``next``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
        config = load_config("configs/tiny.yaml", [f"rollout.workers_per_node={count}"])
        placement = plan(config, (Node("n7", "127.0.0.1", 2),))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.notices: list[str] = []
        self.next: list[Actor] = []
        self.kills = (0, 5)
        setup = WorkerSetup(
            config, placement, "model", RunDir(folder), 1, "key",
            lambda name, **fields: self.events.append((name, fields)), self.notices.append,
        )  # fmt: skip

        async def kills_on(node: Node) -> tuple[int, int]:
            assert node.name == "n7"
            return self.kills

        monkeypatch.setattr(WorkerSetup, "spawn", lambda own, index, node_id: self.next.pop(0))
        monkeypatch.setattr(workers, "node_ids", lambda nodes: ["id"] * len(nodes))
        monkeypatch.setattr(workers, "_kills_on", kills_on)
        monkeypatch.setattr(workers.ray, "kill", lambda actor: actor.die())
        monkeypatch.setattr(workers, "_RETRY_S", 0.0)
        self.actors = [Actor() for _ in range(count)]
        handles: list[Any] = [WorkerHandle(actor, i) for i, actor in enumerate(self.actors)]  # type: ignore[arg-type]
        for handle in handles:
            handle.memory_kills = (0, 5)
        self.workers = Workers(handles, setup)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.001)


def play(
    scene: Callable[[Stage], Coroutine[Any, Any, None]], folder: Path, monkeypatch: pytest.MonkeyPatch,
    count: int = 1,
) -> Stage:  # fmt: skip
    async def run() -> Stage:
        stage = Stage(folder, monkeypatch, count)
        await scene(stage)
        await stage.workers.close()
        return stage

    return asyncio.run(run())


def test_a_new_process_learns_what_the_others_know_even_what_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, telling = [Actor()], list[asyncio.Future[None]]()

    async def scene(stage: Stage) -> None:
        await stage.workers.connect(["http://a"], "key")
        await stage.workers.published(3)
        stage.next = new

        def meanwhile(name: str) -> None:
            if name == "published" and ("published", 4) not in new[0].calls and stage.workers._version == 3:
                telling.append(asyncio.ensure_future(stage.workers.published(4)))
                telling.append(asyncio.ensure_future(stage.workers.pause()))

        new[0].during = meanwhile
        stage.next = list(new)
        stage.actors[0].die()
        await until(lambda: bool(stage.named("worker_restarted")))
        assert stage.workers[0].up

    stage = play(scene, tmp_path, monkeypatch)
    calls = [call for call in new[0].calls if call[0] not in ("stay", "close")]
    assert calls[:2] == [("open",), ("memory_kills",)]
    assert ("connect", ["http://a"], "key", None, len(stage.workers)) in calls
    assert [call for call in calls if call[0] == "published"][-1] == ("published", 4)
    assert calls[-1] == ("pause",)
    assert [e["worker"] for e in stage.named("worker_ended")] == [0]
    assert stage.named("worker_ended")[0]["node"] == "n7"
    assert not stage.notices


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_that_answers_nothing_is_restarted_with_its_stack_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    (tmp_path / "attempts/001").mkdir(parents=True)
    monkeypatch.setattr(workers, "_ASK_S", 0.01)
    monkeypatch.setattr(workers.hang, "ANSWER_S", 0.05)

    async def scene(stage: Stage) -> None:
        assert stage.workers._setup is not None
        limit = stage.workers._setup.config.rollout.model_copy(update={"worker_timeout_s": 0.05})
        object.__setattr__(stage.workers._setup.config, "rollout", limit)
        (handle,) = stage.workers
        old = stage.actors[0]
        stage.next = [Actor()]
        await until(lambda: [name for name, *_ in old.calls].count("answers") >= 3)  # while it answers
        assert handle.up
        old.hanging = ("answers", "run_group", *(("stacks",) if stopped else ()))
        with pytest.raises(WorkerDied):
            await handle.run_group(request_of(2))
        assert (await handle.run_group(request_of(2))).id == 2
        assert handle.actor is not old

    stage = play(scene, tmp_path, monkeypatch)
    (ended,) = stage.named("worker_ended")
    assert "worker 0 has not answered for" in ended["error"]
    kept = (tmp_path / "attempts/001/stacks.log").read_text()
    assert ("its process is stopped" in kept) is stopped
    assert ("in my_reward" in kept) is not stopped


def test_a_group_of_a_dead_worker_is_said_to_have_died_and_the_next_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        (handle,) = stage.workers
        assert (await handle.run_group(request_of(1))).id == 1
        assert handle.held == {1}
        stage.next = [Actor()]
        stage.actors[0].during = lambda name: stage.actors[0].die() if name == "run_group" else None
        with pytest.raises(WorkerDied):
            await handle.run_group(request_of(2))
        assert not handle.up
        assert handle.held == set()
        assert (await handle.run_group(request_of(2))).id == 2
        assert len(handle.died_at) == 1

    play(scene, tmp_path, monkeypatch)


@pytest.mark.parametrize("starts", [True, False])
def test_after_too_many_deaths_the_worker_is_given_up_with_reason_and_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    budget = policy_of(WorkerDied).budget

    async def scene(stage: Stage) -> None:
        (handle,) = stage.workers
        for death in range(budget + 1):
            stage.kills = (0, 6)
            stage.next = [Actor(starts=starts) for _ in range(budget)]
            handle.actor.die()  # type: ignore[attr-defined]
            await until(lambda death=death: handle.failure is not None or (starts and handle.up
                        and len(stage.named("worker_restarted")) > death))  # fmt: skip
            if handle.failure is not None:
                break
        assert len(stage.named("worker_restarted")) == (budget if starts else 0)
        with pytest.raises(WorkerFails) as failed:
            await handle.run_group(request_of(1))
        assert f"worker 0 on n7 died {budget + 1} times" in str(failed.value)
        assert "out of host memory (n7: the kernel killed 1 processes for lack of memory)" in str(
            failed.value
        )
        with pytest.raises(WorkerFails):
            stage.workers.raise_failure()

    play(scene, tmp_path, monkeypatch)


def test_deaths_long_ago_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        (handle,) = stage.workers
        handle.died_at = [time.monotonic() - workers.DEATHS_WITHIN_S - 1.0] * 9
        stage.next = [Actor()]
        stage.actors[0].die()
        await until(lambda: bool(stage.named("worker_restarted")))

    play(scene, tmp_path, monkeypatch)


def test_a_kill_for_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        stage.kills, stage.next = (1, 6), [Actor()]
        stage.actors[0].die()
        await until(lambda: bool(stage.notices))

    (line,) = play(scene, tmp_path, monkeypatch).notices
    assert line.startswith("rollout worker 0 ran out of host memory (n7: the kernel killed 1 of the job's")


@pytest.mark.parametrize("written", [True, False])
def test_a_record_that_a_death_interrupts_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    new: list[Actor] = []

    async def scene(stage: Stage) -> None:
        (handle,) = stage.workers
        group = await handle.run_group(request_of(1))
        new.append(Actor())
        stage.next = list(new)

        def dies(name: str) -> None:
            if name == "record":
                if written:
                    record_path(tmp_path, 1, 0).touch()
                stage.actors[0].die()

        stage.actors[0].during = dies

        async def store(write: Any) -> Any:
            return await write()

        await stage.workers.record(tmp_path, [(group, True)], store)

    play(scene, tmp_path, monkeypatch)
    recorded = [call for call in new[0].calls if call[0] in ("record", "cancel")]
    again = ("record", str(tmp_path), [(1, "buffer/group_1.h5", True)])
    assert recorded == ([("cancel", [1])] if written else [again])


def test_trainers_read_the_groups_of_a_dead_worker_from_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        group = await stage.workers[0].run_group(request_of(1))
        assert stage.workers.located([group]) == [group]
        stage.next = [Actor()]
        stage.actors[0].die()
        await until(lambda: bool(stage.named("worker_ended")))
        (found,) = stage.workers.located([group])
        assert found.rollouts[0].location == Location(file="buffer/group_1.h5", row=0)

    play(scene, tmp_path, monkeypatch)


def test_steps_go_on_without_a_worker_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of all workers leaves it out, and one that needs any worker takes another."""
    never = asyncio.Event

    class Slow(Actor):
        async def answer(self, name: str, *args: Any) -> Any:
            if name == "open":
                await never().wait()
            return await super().answer(name, *args)

    async def scene(stage: Stage) -> None:
        stage.next = [Slow()]
        stage.actors[0].die()
        await until(lambda: not stage.workers[0].up)
        async with asyncio.timeout(2.0):
            await stage.workers.published(7)
            assert stage.workers.any() is stage.workers[1]
            await stage.workers.any().call(RolloutWorker.num_tasks, "e", "train")
        assert ("published", 7) in stage.actors[1].calls

    play(scene, tmp_path, monkeypatch, count=2)


def test_the_failures_have_a_row_that_restarts_in_place() -> None:
    assert policy_of(WorkerFails) == policy_of(InfraError)


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_start_that_fails_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """The next start in the same attempt has its own workers; a start is canceled if another part fails."""

    async def scene(stage: Stage) -> None:
        stage.next = [Actor(), Actor(starts=cancelled)]
        started = list(stage.next)
        hanging = asyncio.Event()

        async def hang(name: str, *args: Any) -> None:
            if cancelled or started[1].dead.is_set():
                await hanging.wait()

        started[0].answer = hang  # type: ignore[method-assign]
        setup = stage.workers._setup
        assert setup is not None
        starting = asyncio.ensure_future(Workers.start(setup, ["id"]))
        if cancelled:
            await asyncio.sleep(0.01)
            starting.cancel()
        with pytest.raises((asyncio.CancelledError, RayLost)):
            await starting
        assert [actor.dead.is_set() for actor in started] == [True, True]

    play(scene, tmp_path, monkeypatch, count=2)
