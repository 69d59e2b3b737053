"""Conversations, transcripts and tool results in OpenReward's format, valid and malformed."""

from __future__ import annotations

from typing import Any

import pytest
from openreward.environments.types import Message, ToolCallBlock, ToolResultBlock

from orhpc.errors import BadAnswer
from orhpc.rollout.environment.answers import AnswerImages, conversation, tool_result, wire_messages
from orhpc.rollout.environment.environment import Environment
from tests.served import Served
from tests.unit.rollout.environment.kit import task, within

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "messages", [None, {}, [1], [{"role": "tool", "blocks": []}], [{"role": "user", "blocks": "Hi"}]]
)
def test_a_malformed_conversation_is_a_bad_answer(messages: Any) -> None:
    with pytest.raises(BadAnswer):
        conversation(messages, "a task", AnswerImages(print, kept=False))


@pytest.mark.parametrize("roles", [[], ["user", "assistant"], ["user", "system", "user"]])
def test_a_conversation_that_no_template_can_render_stays_one_prompt(roles: list[str]) -> None:
    messages = [{"role": role, "blocks": [{"text": "x"}]} for role in roles]
    assert conversation(messages, "a task", AnswerImages(print, kept=False)) == ()


TRANSCRIPT = [
    {"role": "user", "content": "Who?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "Hm.",
        "tool_calls": [
            {"name": "look", "arguments": {"at": 1}},
            {"error": "no JSON"},
            {"name": "go", "arguments": {}},
        ],
    },
    {"role": "tool", "content": "a door", "name": "look"},
    {"role": "tool", "content": "Error: no JSON", "name": "", "error": "malformed"},
    {"role": "tool", "content": "", "name": "go", "error": "tool_raised"},
    {"role": "assistant", "content": "It was I."},
    {"role": "tool", "content": "Right.", "name": "answer", "reward": 1.0},
]


def test_a_transcript_is_sent_with_its_calls_and_results() -> None:
    made = [Message.model_validate(message) for message in wire_messages(TRANSCRIPT, rich=True)]
    assert [m.role for m in made] == ["user", "assistant", "user", "user", "user", "assistant", "user"]
    kinds = [[block.type for block in m.blocks] for m in made]
    assert kinds[1] == ["reasoning", "text", "tool_call", "tool_call"]
    assert kinds[2:5] == [["tool_result"], ["text"], ["tool_result"]]
    calls = {block.id: block for block in made[1].blocks if isinstance(block, ToolCallBlock)}
    results = [b for m in made for b in m.blocks if isinstance(b, ToolResultBlock)]
    assert [(calls[r.tool_call_id].name, r.is_error) for r in results] == [("look", False), ("go", True)]
    assert kinds[5:] == [["text"], ["text"]]


def test_an_older_server_receives_only_text() -> None:
    made = wire_messages(TRANSCRIPT)
    assert {block["type"] for m in made for block in m["blocks"]} == {"text"}
    assert [m["role"] for m in made] == ["user", "assistant", "user", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/whodunit/task_tools", {"tools": None}),
        ("/whodunit/task_tools", {"tools": [{"name": "a", "description": "", "input_schema": "text"}]}),
        ("/whodunit/task_tools", {"tools": [{"name": "a", "description": ""}] * 2}),
        ("/whodunit/task_tools", []),
        ("/whodunit/task_tools", {"tools": [], "terminal_tool": {"arg": "x"}}),
        ("/whodunit/prompt", {"text": "?"}),
        ("/whodunit/prompt", None),
        ("/whodunit/prompt", [{"type": "text"}]),
        ("/whodunit/prompt", [{"type": "sound", "data": "?"}]),
        ("/whodunit/prompt", "Do it."),
    ],
)
def test_a_malformed_answer_fails_the_rollout(served: Served, path: str, document: Any) -> None:
    async def body(environment: Environment) -> None:
        served.documents[path] = document
        with pytest.raises(BadAnswer, match="Org/whodunit/train/0"):
            async with environment.session(task()):
                pass

    within(served.url, body)
    assert served.sessions == 0


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"ok": True}, {"ok": True, "output": None}, {"ok": True, "output": {"blocks": None}},
     {"ok": False}, {"ok": False, "error": 3}],
)  # fmt: skip
def test_a_malformed_result_is_a_bad_answer(answer: Any) -> None:
    with pytest.raises(BadAnswer, match="tool 'x'"):
        tool_result(answer, "tool 'x'", AnswerImages(print, kept=False))
