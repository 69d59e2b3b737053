"""Deadlines of tool calls that are learned from earlier calls."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.errors import ToolTimeout
from orhpc.rollout.environment import call_history
from orhpc.rollout.environment.environment import Environment
from tests.served import Served
from tests.unit.rollout.environment.kit import task, within

pytestmark = pytest.mark.slow


def test_deadlines_of_calls_are_learned(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_history, "MIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(call_history, "TIMEOUT_FACTOR", 1.0)

    async def body(environment: Environment) -> None:
        environment._history._longest["hang"] = 0.1
        environment._history._count["hang"] = call_history.CALLS_NEEDED
        began = time.monotonic()
        with pytest.raises(ToolTimeout, match=r"the longest of 20 earlier calls took 0\.1 s"):
            async with environment.session(task()) as session:
                await session.call("hang", {})
        assert time.monotonic() - began < 20
        (notice,) = environment.notices.drain()
        assert "'hang' did not answer in time" in notice

    within(served.url, body, tool_timeout_s=60)


@given(st.lists(st.floats(0.01, 500), max_size=60), st.floats(1, 1000))
def test_a_learned_deadline_is_between_its_bounds(seconds: list[float], limit: float) -> None:
    history = call_history.CallHistory(limit)
    for each in seconds:
        history.note("a", each)
    deadline = history.deadline_s("a")
    assert deadline <= limit
    assert history.deadline_s("never called") == limit
    if len(seconds) < call_history.CALLS_NEEDED:
        assert deadline == limit
    else:
        assert deadline >= min(limit, call_history.MIN_TIMEOUT_S, max(seconds))
        assert deadline >= min(limit, call_history.TIMEOUT_FACTOR * max(seconds))
