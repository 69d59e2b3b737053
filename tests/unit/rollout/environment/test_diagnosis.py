"""Tasks, tools and whole environments that raise, and how the failure is classified."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from openreward.environments import TextBlock, ToolOutput, tool

from orhpc.errors import BadTask, EnvironmentRaised, EnvironmentUnavailable, UserCodeError
from orhpc.rollout.environment.environment import Environment
from orhpc.types import Task
from tests.served import Served, TrainSplit, serve
from tests.unit.rollout.environment.kit import task, within

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("index", "message"), [(0, "constructor broke"), (1, "setup broke")])
def test_a_task_that_raises_is_retried_and_does_not_fail_the_environment(
    served: Served, index: int, message: str
) -> None:
    async def body(environment: Environment) -> None:
        for _ in range(2):
            with pytest.raises(EnvironmentRaised, match=message):
                async with environment.session(task(index, "bad")):
                    pass

    within(served.url, body)
    assert served.sessions == 0
    assert served.calls("/create") < 6  # the second failure is not diagnosed again


class AlwaysRaises(TrainSplit):
    """Raises on every task in its constructor, setup or prompt."""

    TASKS: ClassVar[list[dict[str, Any]]] = [{"a": i} for i in range(5)]
    where = ""

    def __init__(self, task_spec: Any = None, secrets: Any = None) -> None:
        super().__init__(task_spec or {}, secrets or {})
        self._perhaps("constructor")

    def _perhaps(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError("in my own code")

    async def setup(self) -> None:
        self._perhaps("setup")

    def get_prompt(self) -> list[TextBlock]:
        self._perhaps("prompt")
        return super().get_prompt()

    @tool
    async def go(self) -> ToolOutput:
        """Goes."""
        return ToolOutput(blocks=[TextBlock(text="gone")])


@pytest.mark.parametrize("where", ["constructor", "setup", "prompt"])
def test_an_environment_that_raises_on_every_task_is_a_user_code_error(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(AlwaysRaises, "where", where)

    async def body(environment: Environment) -> None:
        with pytest.raises(UserCodeError, match=r"ZeroDivisionError: in my own code") as caught:
            async with environment.session(Task("alwaysraises", "train", 3)):
                pass
        assert "\n" not in str(caught.value)
        assert f"{__file__}:" in str(caught.value)
        assert "in _perhaps" in str(caught.value)
        assert "self._perhaps" in caught.value.trace

    with serve(AlwaysRaises, tracebacks=True) as running:
        within(running.url, body, name="alwaysraises")
        assert running.sessions == 0


def test_an_index_out_of_range_is_a_bad_task(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(BadTask):
            async with environment.session(task(99, "bad")):
                pass

    within(served.url, body)


def test_a_tool_error_is_shown_to_the_model_and_the_session_continues(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            for _ in range(2):
                result = await session.call("fail", {})
                assert (result.error, result.finished, result.reward) == ("tool_raised", False, None)
                assert "a bug" in result.text
            assert (await session.call("pay", {"text": "1"})).reward == 1.0
        (notice,) = environment.notices.drain()
        assert "'Org/whodunit': tool 'fail' raised" in notice

    within(served.url, body)


def test_a_tool_error_in_a_lost_session_is_retried_in_another_session(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentUnavailable, match=r"'fail' raised .*, and the session is lost"):
            async with environment.session(task()) as session:
                served.answers["/ping"] = [(410, {})]
                await session.call("fail", {})

    within(served.url, body)


def test_a_verifier_that_raises_fails_the_rollout(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentRaised, match="tool 'submit' raised"):
            async with environment.session(Task("plain", "train", 2)) as session:
                await session.answer("raise")

    within(served.url, body, name="plain")


def test_a_server_error_on_a_call_is_retried_in_another_session(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/whodunit/call"] = [(500, {})]
        with pytest.raises(EnvironmentRaised, match="HTTP 500"):
            async with environment.session(task()) as session:
                await session.call("count", {"text": "x"})
        assert served.calls("/whodunit/call") == 1

    within(served.url, body)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_session_does_not_affect_the_next(served: Served, status: int) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/create"] = [(status, {})]
        with pytest.raises(EnvironmentUnavailable, match=r"refused access .* no key was sent") as caught:
            async with environment.session(task()):
                pass
        assert "Org/whodunit" in str(caught.value)
        assert "OPENREWARD_API_KEY" not in str(caught.value)
        async with environment.session(task()) as session:
            assert session.prompt

    within(served.url, body)
