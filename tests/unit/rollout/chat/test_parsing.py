"""Tool calls and reasoning are parsed from a model's text, well-formed or not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.errors import MalformedToolCall
from orhpc.rollout.chat import ToolCall
from orhpc.rollout.chat.messages import MAX_CALLS
from tests.scripted import CHATML, DEEPSEEK, GLM, GLM4, LLAMA, QWEN, chat
from tests.unit.rollout.chat.kit import CALLS, SCHEMA, SMOLLM2, chat_for, written


@pytest.mark.parametrize("controls", [CHATML, QWEN, LLAMA, DEEPSEEK, GLM])
@pytest.mark.parametrize("count", [1, 2])
def test_calls_are_parsed_in_their_order(controls: tuple[str, ...], count: int) -> None:
    form = chat(controls)
    ids = form.codec.encode([written(form.name, CALLS[:count]) + form.stops[0]])
    message = form.parse(ids)
    assert (
        [(c.name, c.arguments) for c in message.tool_calls]
        == [  # type: ignore[union-attr]
            (c.name, c.arguments) for c in CALLS[:count]
        ]
    )


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_json_arguments_are_parsed_unchanged(arguments: dict[str, Any]) -> None:
    for name, form in (("chatml", chat_for("qwen3")), ("llama3", chat_for("llama3.1"))):
        text = written(name, [ToolCall("go", arguments)])
        if "<tool_call>" in json.dumps(arguments) or "</tool_call>" in json.dumps(arguments):
            return
        (call,) = form.parse_text(text).tool_calls
        assert isinstance(call, ToolCall)
        assert call.arguments == arguments


MALFORMED = {
    "chatml": [
        "<tool_call>{'name': 'go'}</tool_call>",
        '<tool_call>{"name": "go", "arguments": {"n": 1}</tool_call>',
        '<tool_call>{"name": "go", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>"go"</tool_call>',
        "<tool_call></tool_call>",
        '<tool_call>{"name": "go", "arguments": {"n": NaN}}</tool_call>',
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"name": "go", "arguments": {"n": ' + "9" * 10_000 + "}}</tool_call>",
    ],
    "llama3": [
        '{"name": "go", "parameters": ',
        "<|python_tag|>import os",
        "<|python_tag|>{",
        "{'name': 'go'}",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>go<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{\n```<｜tool▁call▁end｜>",
    ],
    "glm": [
        "<tool_call></tool_call>",
        "<tool_call>go there\n</tool_call>",
        "<tool_call>go\n<arg_key>n</arg_key></tool_call>",
    ],
}


@pytest.mark.parametrize(
    ("controls", "text"),
    [
        (c, t)
        for c, name in ((QWEN, "chatml"), (LLAMA, "llama3"), (DEEPSEEK, "deepseek"), (GLM, "glm"))
        for t in MALFORMED[name]
    ],
)
def test_the_error_of_a_malformed_call_says_what_is_wrong(controls: tuple[str, ...], text: str) -> None:
    (call,) = chat(controls).parse_text(text).tool_calls
    assert isinstance(call, MalformedToolCall)
    assert 10 < len(str(call)) < 200
    assert "\n" not in str(call)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*QWEN, *LLAMA, *DEEPSEEK, *GLM, '{"name": "x"', "}", "[", "\n", "go"]), max_size=12
    )
)
def test_no_text_of_a_model_breaks_the_parser(pieces: list[str]) -> None:
    for name in ("qwen3", "llama3.1", "deepseek", "glm4.5"):
        message = chat_for(name).parse_text("".join(pieces))
        for call in message.tool_calls:
            assert isinstance(call, ToolCall | MalformedToolCall)


def test_valid_and_malformed_calls_of_a_message_are_distinguished() -> None:
    text = written("chatml", CALLS[:1]) + "<tool_call>{</tool_call>" + written("chatml", CALLS[1:])
    calls = chat(QWEN).parse_text(text).tool_calls
    assert [type(c) for c in calls] == [ToolCall, MalformedToolCall, ToolCall]


def test_reasoning_is_removed_and_calls_in_it_are_ignored() -> None:
    form = chat(QWEN)
    call = written("chatml", CALLS[:1])
    message = form.parse_text(f"<think>\nI could {call}\n</think>\n\nNo.")
    assert (message.text, message.tool_calls) == ("No.", [])
    assert call.strip() in message.reasoning
    assert form.parse_text("<think>never ends").text == ""
    assert form.parse_text("so\n</think>\n\nYes.", opened=True).text == "Yes."
    assert form.parse_text("no end", opened=True).text == ""


def test_a_template_that_opens_the_reasoning_is_recognized() -> None:
    template = SMOLLM2.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    form = chat(QWEN, template)
    message = form.parse(form.codec.encode(["thinking</think>\n\n7<|im_end|>"]))
    assert (message.reasoning, message.text) == ("thinking", "7")
    assert form.parse(form.codec.encode(["only thinking<|im_end|>"])).text == ""


def test_glm_arguments_stay_strings_if_the_schema_requires_it() -> None:
    (call,) = chat(GLM).parse_text(written("glm", [ToolCall("go", {"title": "007", "n": 7})])).tool_calls
    assert isinstance(call, ToolCall)
    assert call.fitted(SCHEMA) == {"title": "007", "n": 7}


def test_alternative_forms_of_a_call_are_parsed() -> None:
    llama = chat(LLAMA)
    (call,) = llama.parse_text('<|python_tag|>brave_search.call(query="a b", n=2)').tool_calls
    assert call == ToolCall("brave_search", {"query": "a b", "n": 2})
    (call,) = llama.parse_text('<|python_tag|>{"name": "go", "parameters": {"n": 1}}').tool_calls
    assert call == ToolCall("go", {"n": 1})
    assert llama.parse_text('{"answer": 3}').tool_calls == []
    deepseek = chat(DEEPSEEK)
    inner = '<｜tool▁call▁begin｜>go<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
    text = f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    assert deepseek.parse_text("Well. " + text).tool_calls == [ToolCall("go", {"n": 1})]
    assert deepseek.parse_text("Well. " + text).text == "Well. "
    glm = chat(GLM4)
    assert glm.parse_text('go\n{"n": 1}').tool_calls == [ToolCall("go", {"n": 1})]
    assert glm.parse_text("Just words.\nAnd more.").tool_calls == []
    (call,) = chat(QWEN).parse_text('<tool_call>{"name": "go", "arguments": "{\\"n\\": 1}"}').tool_calls
    assert call == ToolCall("go", {"n": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        "query={'x', 'y'}",
        "query=b'x'",
        "query=1j",
        "query=...",
        "query={(1, 2): 3}",
        "query=0x" + "f" * 9000,
        "query=1e999",
        "query=" + "[" * 60 + "{'a': " * 60 + "1" + "}" * 60 + "]" * 60,
    ],
    ids=["set", "bytes", "complex", "dots", "tuple key", "long number", "infinity", "nesting"],
)
def test_arguments_that_json_does_not_have_are_a_malformed_call(arguments: str) -> None:
    """Nothing else of a rollout could encode them, and the whole run would end."""
    (call,) = chat(LLAMA).parse_text(f"<|python_tag|>go.call({arguments})").tool_calls
    assert isinstance(call, MalformedToolCall)


def test_deeply_nested_json_is_a_malformed_call() -> None:
    def call(depth: int) -> ToolCall | MalformedToolCall:
        value = "[" * depth + "]" * depth
        text = f'<tool_call>{{"name": "go", "arguments": {{"n": {value}}}}}</tool_call>'
        (found,) = chat(QWEN).parse_text(text).tool_calls
        return found

    assert isinstance(call(90), ToolCall)
    assert isinstance(call(600), MalformedToolCall)
    brackets = '<tool_call>{"name": "go", "arguments": {"title": "' + "[" * 500 + '"}}</tool_call>'
    assert isinstance(chat(QWEN).parse_text(brackets).tool_calls[0], ToolCall)  # text, not nesting


@pytest.mark.slow
@pytest.mark.parametrize("controls", [QWEN, LLAMA, DEEPSEEK, GLM4, GLM], ids=lambda c: c[0])
def test_the_time_to_parse_a_turn_is_linear_in_its_length(controls: tuple[str, ...]) -> None:
    """A marker repeated 100,000 times after the start of a call used to take 67 s or more."""
    formed = chat(controls)
    deepseek = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```"
    repeated = (
        "<tool_call>", "<think>", "<arg_key>", "<arg_key>a</arg_key><arg_value>", "<arg_key>a</arg_key> ",
        "<｜tool▁call▁begin｜>", "<|python_tag|>", '{"name":"a"};', "\n", "[", "(", "```json\n",
    )  # fmt: skip
    for begun in ("", "<tool_call>f", "<|python_tag|>", "<|python_tag|>f(a=", deepseek, "name\n"):
        for piece in repeated:
            began = time.process_time()
            message = formed.parse_text(begun + piece * 100_000)
            assert time.process_time() - began < 5, (begun, piece)
            assert len(message.tool_calls) <= MAX_CALLS + 1


def test_calls_beyond_the_limit_give_one_error() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    message = chat(QWEN).parse_text(f"x{call * 500}y")
    assert len(message.tool_calls) == MAX_CALLS + 1
    assert isinstance(message.tool_calls[-1], MalformedToolCall)
    assert message.text == "xy"
