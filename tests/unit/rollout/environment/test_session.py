"""Sessions on the real OpenReward server: prompts, tools, calls, rewards and secrets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orhpc.errors import BadTask
from orhpc.rollout.environment import receiving
from orhpc.rollout.environment.environment import Environment
from orhpc.types import Task
from tests.served import Served
from tests.unit.rollout.environment.kit import WhoDunIt, task, within

pytestmark = pytest.mark.slow


def test_a_session_has_a_prompt_and_tools_and_runs_calls(served: Served) -> None:
    async def body(environment: Environment) -> None:
        assert await environment.num_tasks("train") == 5
        assert await environment.num_tasks("test") == 2
        assert environment.supports_score_group
        async with environment.session(task()) as session:
            assert session.prompt == "  Who did it?\n\nAsk."
            assert not session.terminal
            by_name = {t.name: t for t in session.tools}
            assert set(by_name) == {"long", "count", "hang", "fail", "picture", "pay", "secret"}
            assert by_name["count"].schema["required"] == ["text"]
            assert by_name["long"].schema == {"type": "object", "properties": {}}
            result = await session.call("count", {"text": "a"})
            assert (result.text, result.reward, result.finished, result.error) == ("1", None, False, None)
            result = await session.call("pay", {"text": "1"})
            assert (result.reward, result.finished) == (1.0, True)
        assert served.sessions == 0

    within(served.url, body, settings={"num_samples": 5})


def test_a_terminal_tool_receives_the_answer_and_cannot_be_called(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(Task("plain", "train", 2)) as session:
            assert (session.terminal, session.tools, session.prompt) == (True, [], "Say 2")
            assert (await session.call("submit", {"text": "2"})).error == "not_found"
            result = await session.answer("2")
            assert (result.reward, result.finished) == (1.0, True)

    within(served.url, body, name="plain")


def test_a_conversation_keeps_its_roles(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(Task("dialogue", "train", 1)) as session:
            assert session.conversation == (
                ("system", "You are a clerk."),
                ("user", "Hi."),
                ("assistant", 'Wait.\n[tool_call look] {"at": "door"}'),
                ("user", "[tool_result]\nIt is shut.\nSay 1"),
            )
            assert "[system]\nYou are a clerk." in session.prompt

    within(served.url, body, name="dialogue")


def test_a_plain_prompt_is_requested_once(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(Task("plain", "train", 1)) as session:
            assert session.conversation == ()
        assert served.calls("/plain/messages") == 0

    within(served.url, body, name="plain")


def test_errors_of_the_model_are_returned_as_results(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            for arguments in ({}, {"text": 3}, {"text": ["x"]}):
                assert (await session.call("count", arguments)).error == "input_validation"
            unknown = await session.call("cuont", {})
            assert (unknown.error, unknown.finished) == ("not_found", False)
            assert "cuont" in unknown.text
            huge = await session.call("count", {"text": 10**30})
            assert huge.error == "input_validation"
            await session.call("pay", {"text": "1"})
            after = await session.call("count", {"text": "late"})
            assert (after.error, after.finished) == ("episode_finished", True)
        assert WhoDunIt.runs == {}

    within(served.url, body)


def test_score_group_returns_one_score_per_rollout(served: Served) -> None:
    async def body(environment: Environment) -> None:
        transcripts = [
            [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "x" * n}]
            for n in (3, 1, 2)
        ]
        assert await environment.score_group(task(), transcripts) == [3.0, 1.0, 2.0]
        assert served.sessions == 0

    within(served.url, body)


def test_the_gold_answer_is_never_requested(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()):
            pass
        paths = {path for path, _ in served.requests}
        assert not {p for p in paths if p.rsplit("/", 1)[-1] in ("task", "tasks", "task_range")}

    within(served.url, body)


def test_the_session_receives_the_secrets_and_not_the_key_of_the_service(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENREWARD_API_KEY", "key-of-the-service")

    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            text = (await session.call("secret", {})).text
        assert text == repr([("MY_OWN", "v1"), ("OPENAI_API_KEY", "v2")])
        assert all("x-api-key" not in headers for _, headers in served.requests)
        with_secrets = {path for path, headers in served.requests if "x-secrets" in headers}
        assert with_secrets == {"/create_session", "/create"}

    within(served.url, body, secrets={"MY_OWN": "v1", "OPENAI_API_KEY": "v2"}, configured=True)


def test_a_server_of_the_job_receives_only_the_requests_of_the_task(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.requests.clear()
        async with environment.session(task()) as session:
            await session.call("count", {"text": "a"})
        assert served.sessions == 0

    within(served.url, body)
    wanted = ["/create", "/whodunit/prompt", "/whodunit/task_tools", "/whodunit/call", "/delete"]
    assert [path for path, _ in served.requests] == wanted


@pytest.mark.parametrize("configured", [False, True])
def test_consecutive_sessions_share_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    monkeypatch.setattr(receiving, "DRAIN_S", 10.0)

    async def body(environment: Environment) -> None:
        async def rollout() -> None:
            async with environment.session(task()) as session:
                await session.call("pay", {"text": "1"})

        # The sessions of the queries made at the start are deleted in the background, each on a connection.
        await environment._deletions.wait()
        served.connections.clear()
        for _ in range(4):
            await asyncio.gather(*(rollout() for _ in range(8)))

    within(served.url, body, configured=configured)
    assert len(served.connections) <= 8


@pytest.mark.parametrize("reward", ["nan", "inf"])
def test_a_reward_that_is_not_finite_counts_as_none(served: Served, reward: str) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            assert (await session.call("pay", {"text": reward})).reward is None

    within(served.url, body)


def test_images_are_replaced_by_a_note_and_reported_once(served: Served) -> None:
    async def body(environment: Environment) -> None:
        for _ in range(2):
            async with environment.session(task(2, "bad")) as session:
                assert session.prompt.splitlines() == [
                    "Look:", "[an image (image/png) was left out: this model is given text only]"
                ]  # fmt: skip
                assert "image/png" in (await session.call("picture", {})).text
        (notice,) = environment.notices.drain()
        assert "'Org/whodunit' sends images (image/png)" in notice

    within(served.url, body)


def test_max_opening_limits_the_sessions_that_are_opened_concurrently(served: Served) -> None:
    most = 0

    async def body(environment: Environment) -> None:
        nonlocal most
        opening = 0
        enter = environment._enter

        async def counted(of: Task) -> Any:
            nonlocal opening, most
            opening += 1
            most = max(most, opening)
            try:
                return await enter(of)
            finally:
                opening -= 1

        environment._enter = counted  # type: ignore[method-assign]

        async def rollout() -> None:
            async with environment.session(task()):
                pass

        await asyncio.gather(*(rollout() for _ in range(12)))

    within(served.url, body, settings={"max_opening": 3})
    assert most == 3


def test_a_toolset_is_requested_by_its_name(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(BadTask, match="unknown toolset 'none-such'; valid options are"):
            async with environment.session(task()):
                pass

    within(served.url, body, settings={"toolset": "none-such"})
