"""Deadlines, retries and lost sessions; shows that the known faults of OpenReward's SDK are absent."""

from __future__ import annotations

import asyncio
import time

import pytest

from orhpc.errors import BadTask, EnvironmentUnavailable
from orhpc.rollout.environment import leaving
from orhpc.rollout.environment import openreward_session as wire
from orhpc.rollout.environment.environment import Environment
from orhpc.types import Task
from tests.served import Served, serve
from tests.unit.rollout.environment.kit import LONG, Plain, WhoDunIt, task, within

pytestmark = pytest.mark.slow


def test_long_outputs_arrive_unchanged(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            result = await session.call("long", {})
            assert len(LONG) > 220_000
            assert result.text == LONG
            assert result.reward == 0.25

    within(served.url, body)


def test_a_call_has_a_deadline(served: Served) -> None:
    async def body(environment: Environment) -> None:
        began = time.monotonic()
        with pytest.raises(EnvironmentUnavailable, match="no answer in time"):
            async with environment.session(task()) as session:
                await session.call("hang", {})
        assert time.monotonic() - began < 20

    within(served.url, body, tool_timeout_s=0.5)


def test_a_call_whose_answer_is_lost_is_never_repeated(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.cut["/whodunit/call"] = ["before"]
        with pytest.raises(EnvironmentUnavailable):
            async with environment.session(task()) as session:
                await session.call("count", {"text": "once"})
        assert served.calls("/whodunit/call") == 1
        assert WhoDunIt.runs == {"once": 1}

    within(served.url, body)


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_call_with_an_ambiguous_answer_is_not_repeated(served: Served, status: int) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/whodunit/call"] = [(status, {})]
        with pytest.raises((EnvironmentUnavailable, BadTask)):
            async with environment.session(task()) as session:
                await session.call("count", {"text": "x"})
        assert served.calls("/whodunit/call") == 1

    within(served.url, body)


def test_a_call_is_resumed_after_a_broken_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.05)

    async def body(environment: Environment) -> None:
        served.cut["/whodunit/call"] = ["after", "after"]
        async with environment.session(task()) as session:
            result = await session.call("count", {"text": "resumed"})
        assert result.text == "1"
        assert served.calls("/whodunit/call") == 3
        assert WhoDunIt.runs == {"resumed": 1}

    within(served.url, body)


def test_a_call_that_is_refused_before_it_runs_is_retried(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            served.answers["/whodunit/call"] = [
                (429, {"Retry-After": "1"}),
                (503, {"X-Backend-State": "starting", "Retry-After": "0"}),
            ]
            began = time.monotonic()
            assert (await session.call("count", {"text": "waited"})).text == "1"
            assert time.monotonic() - began >= 1.0
            assert served.calls("/whodunit/call") == 3

    within(served.url, body)


def test_a_session_that_starts_slowly_is_awaited(served: Served) -> None:
    starting = (503, {"X-Backend-State": "starting", "Retry-After": "1"})

    async def body(environment: Environment) -> None:
        served.answers["/create_session"] = [starting, starting]
        served.answers["/whodunit/prompt"] = [starting]
        async with environment.session(task()) as session:
            assert session.prompt

    within(served.url, body, session_timeout_s=1.5, configured=True)


def test_a_session_that_never_starts_fails_after_the_timeout(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/whodunit/prompt"] = [
            (503, {"X-Backend-State": "starting", "Retry-After": "0"})
        ] * 10_000
        with pytest.raises(EnvironmentUnavailable, match="no answer in time"):
            async with environment.session(task()):
                pass

    within(served.url, body, session_timeout_s=0.5, environment_start_timeout_s=1.5)


@pytest.mark.parametrize("configured", [False, True])
def test_cancellation_never_leaks_a_session(served: Served, configured: bool) -> None:
    async def body(environment: Environment) -> None:
        async def rollout(number: int) -> None:
            async with environment.session(task()):
                await asyncio.sleep(0.02 * (number % 3))

        for wave in range(12):
            rollouts = [asyncio.ensure_future(rollout(n)) for n in range(8)]
            await asyncio.sleep(0.004 * wave)
            for each in rollouts:
                each.cancel()
            await asyncio.gather(*rollouts, return_exceptions=True)

    within(served.url, body, configured=configured)
    assert served.calls("/create") > 8
    assert served.sessions == 0


def test_a_canceled_call_deletes_the_session(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async def rollout() -> None:
            async with environment.session(task()) as session:
                await session.call("hang", {})

        running = asyncio.ensure_future(rollout())
        while not served.calls("/whodunit/call"):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    within(served.url, body)
    assert served.sessions == 0


def test_a_lost_session_is_detected_at_once(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            served.server._active_envs.clear()
            served.server._ready.clear()
            with pytest.raises(EnvironmentUnavailable, match="404"):
                await session.call("count", {"text": "x"})
            assert WhoDunIt.runs == {}

    within(served.url, body)


def test_keep_alive_pings_detect_a_lost_session_during_a_call(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PING_INTERVAL_S", 0.1)

    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentUnavailable, match="lost the session"):
            async with environment.session(task()) as session:
                pending = asyncio.ensure_future(session.call("hang", {}))
                await asyncio.sleep(0.5)
                assert not pending.done()
                served.server._active_envs.clear()
                await pending

    within(served.url, body)


def test_unanswered_pings_end_the_session(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PING_INTERVAL_S", 0.1)

    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentUnavailable, match="3 keep-alive pings"):
            async with environment.session(task()) as session:
                served.answers["/ping"] = [(500, {})] * 3
                await session.call("hang", {})

    within(served.url, body)


def test_a_stopped_server_ends_the_call_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.05)
    monkeypatch.setattr(leaving, "DELETE_TIMEOUT_S", 1.0)
    with serve(Plain) as running:

        async def body(environment: Environment) -> None:
            began = time.monotonic()
            with pytest.raises(EnvironmentUnavailable):
                async with environment.session(Task("plain", "train", 1)) as session:
                    running.stop()
                    await session.answer("1")
            assert time.monotonic() - began < 10

        within(running.url, body, name="plain")
