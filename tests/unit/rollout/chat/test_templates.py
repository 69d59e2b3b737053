"""Chat formats against chat templates: prompts, tool results and whole conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orhpc.errors import ModelError
from orhpc.types import FinishReason
from tests.scripted import CHATML, GLM4, QWEN, chat, tokenizer
from tests.unit.rollout.chat.kit import (
    BUILT_IN,
    FUNCTIONS,
    OFFICIAL,
    PROMPTS,
    QWEN3,
    STOP,
    TAKES_TOOLS,
    TOOLS,
    chat_for,
    official,
)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("system", [None, "Be {brief}."])
@pytest.mark.parametrize(
    ("name", "with_tools"), [(n, False) for n in OFFICIAL] + [(n, True) for n in TAKES_TOOLS]
)
def test_prompts_equal_the_official_template(
    name: str, with_tools: bool, system: str | None, thinking: bool
) -> None:
    made, form = tokenizer(*OFFICIAL[name]), chat_for(name)
    for user in PROMPTS:
        messages = ([{"role": "system", "content": system}] if system else []) + [
            {"role": "user", "content": user}
        ]
        expected = official(made, messages, tools=FUNCTIONS if with_tools else None, thinking=thinking)
        got = form.prompt_ids(user, system=system, tools=TOOLS if with_tools else [], thinking=thinking)
        assert made.decode(got) == made.decode(expected)
        assert got == expected


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("results", [["4"], ["a\n", " b", ""], ['say "hi"\t\\']])
@pytest.mark.parametrize("name", OFFICIAL)
def test_tool_results_continue_the_official_conversation(
    name: str, results: list[str], thinking: bool
) -> None:
    made, form = tokenizer(*OFFICIAL[name]), chat_for(name)
    begin = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ANSWER"}]
    messages = begin + [{"role": "tool", "content": r} for r in results]
    whole = official(made, messages, thinking=thinking)
    prompt = form.prompt_ids("Hi", thinking=thinking)
    answer = form.codec.encode(["ANSWER"])
    delta = form.tool_results_ids(results, FinishReason.LENGTH, thinking=thinking)
    assert whole[-len(answer + delta) :] == answer + delta
    text = form.codec.decode(prompt)
    assert form.codec.decode(whole).startswith(text.removesuffix("<think>\n\n</think>\n\n").rstrip())


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", OFFICIAL)
def test_a_user_message_continues_the_official_conversation(name: str, thinking: bool) -> None:
    made, form = tokenizer(*OFFICIAL[name]), chat_for(name)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ANSWER"}]
    whole = official(made, [*messages, {"role": "user", "content": "Go on."}], thinking=thinking)
    delta = form.user_ids("Go on.", FinishReason.LENGTH, thinking=thinking)
    answer = form.codec.encode(["ANSWER"])
    assert whole[-len(answer + delta) :] == answer + delta
    last = delta[0]
    assert form.user_ids("Go on.", STOP, last_id=last, thinking=thinking) == delta[1:]


@pytest.mark.parametrize("system", [None, "Be {brief}."])
@pytest.mark.parametrize("opening", [[], [("system", "You are a clerk.")]])
@pytest.mark.parametrize("name", OFFICIAL)
def test_conversations_equal_the_official_template(
    name: str, opening: list[tuple[str, str]], system: str | None
) -> None:
    made, form = tokenizer(*OFFICIAL[name]), chat_for(name)
    turns = [*opening, ("user", "Hi"), ("assistant", "Hello, you."), ("user", " What now?\n")]
    messages = [{"role": role, "content": text} for role, text in turns]
    if system and opening:
        messages[0]["content"] = f"{system}\n\n{messages[0]['content']}"
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    expected = official(made, messages)
    got = form.prompt_ids(turns, system=system)
    assert made.decode(got) == made.decode(expected)
    assert got == expected


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("thinking", [False, True])
def test_the_python_renderers_equal_the_template(name: str, thinking: bool) -> None:
    controls, template = OFFICIAL[name]
    with_template, without = chat(controls, template), chat(controls)
    assert without.stop_token_ids == with_template.stop_token_ids
    for system in (None, "Be brief."):
        for tools in ([], TOOLS):
            if tools and name not in TAKES_TOOLS:
                continue
            for user in PROMPTS:
                options: Any = {"system": system, "tools": tools, "thinking": thinking}
                expected = with_template.prompt_ids(user, **options)
                got = without.prompt_ids(user, **options)
                assert without.codec.decode(got) == with_template.codec.decode(expected)
                assert got == expected
    for results in (["x"], ["x", " y\n"]):
        got = without.tool_results_ids(results, STOP, thinking=thinking)
        assert got == with_template.tool_results_ids(results, STOP, thinking=thinking)


@pytest.mark.parametrize("controls", [c for c, _ in OFFICIAL.values()] + [GLM4])
def test_the_end_of_turn_token_occurs_once(controls: tuple[str, ...]) -> None:
    form = chat(controls)
    ends = [form.codec.token_id(s) for s in form.stops]
    opening = form.tool_results_ids(["x"], FinishReason.LENGTH)
    for end in ends:
        delta = form.tool_results_ids(["x"], STOP, last_id=end)
        if end == opening[0]:
            assert delta == opening[1:]  # the model sampled the end-of-turn token
        else:
            assert delta == opening  # the end-of-turn token is added, outside the trained tokens


def test_only_the_tools_placeholder_is_replaced_in_the_system_prompt() -> None:
    form = chat(QWEN, QWEN3)
    shown = form.codec.decode(form.prompt_ids("Hi", system='{x} {"a": {}}\n{tools}\n{tools', tools=TOOLS))
    listed = "\n".join(json.dumps(f, ensure_ascii=False) for f in FUNCTIONS)
    assert shown.startswith('<|im_start|>system\n{x} {"a": {}}\n' + listed + "\n{tools<|im_end|>")
    assert "# Tools" not in shown


@pytest.mark.parametrize("name", ["smollm2", "deepseek"])
def test_tools_are_put_in_the_system_prompt_if_the_template_has_none(name: str) -> None:
    form = chat_for(name)
    for system in (None, "Be brief."):
        shown = form.codec.decode(form.prompt_ids("Hi", system=system, tools=TOOLS))
        assert json.dumps(FUNCTIONS[0], ensure_ascii=False) in shown
        assert (system or "") in shown
        assert shown.count("Be brief.") == (1 if system else 0)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ nothing }}",
        "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    ],
)
def test_a_broken_template_gives_a_one_line_error(template: str) -> None:
    with pytest.raises(ModelError, match="chat template") as caught:
        chat(CHATML, template).prompt_ids("Hi")
    assert "\n" not in str(caught.value)
