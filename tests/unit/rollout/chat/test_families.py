"""Llama 4, MiniMax-M2 and gpt-oss: prompts, increments and calls, against chat templates."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.llama4.processing_llama4 import chat_template as LLAMA4

from orhpc.errors import MalformedToolCall
from orhpc.rollout.chat import ChatFormat, ToolCall
from orhpc.rollout.chat.template import Template
from orhpc.types import FinishReason
from tests.scripted import chat, tokenizer
from tests.unit.rollout.chat.kit import FUNCTIONS, TOOLS

LLAMA4_CONTROLS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|eot|>", "<|eom|>", "<|header_start|>", "<|header_end|>",
    "<|python_start|>", "<|python_end|>",
)  # fmt: skip
MINIMAX_CONTROLS = (
    "]~!b[", "[e~[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>",
)  # fmt: skip
HARMONY_CONTROLS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip
# The next two are written from the documentation of the formats.
MINIMAX = """\
{%- set ns = namespace(called=false) -%}
{{- ']~!b[]~b]system\n' -}}
{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- else -%}{{ 'Be helpful.' }}{%- endif -%}
{%- if tools -%}
{{- '\n\n# Tools\n<tools>\n' -}}
{%- for tool in tools -%}{{ '<tool>' + tool.function | tojson + '</tool>\n' }}{%- endfor -%}
{{- '</tools>' -}}
{%- endif -%}
{{- '[e~[\n' -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- ']~b]ai\n' + m.content -}}
{%- set ns.called = m.tool_calls | default([]) -%}
{%- if ns.called -%}
{{- '\n<minimax:tool_call>\n' -}}
{%- for call in m.tool_calls -%}
{{- '<invoke name="' + call.function.name + '">\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>\n' -}}
{%- endfor -%}
{{- '</invoke>\n' -}}
{%- endfor -%}
{{- '</minimax:tool_call>' -}}
{%- endif -%}
{{- '[e~[\n' -}}
{%- elif m.role == 'tool' -%}
{%- if not ns.called -%}{{ raise_exception('no call before the result') }}{%- endif -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{ ']~b]tool' }}{%- endif -%}
{{- '\n<response>' + m.content + '</response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '[e~[\n' }}{%- endif -%}
{%- elif m.role == 'user' -%}{{ ']~b]user\n' + m.content + '[e~[\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ']~b]ai\n<think>\n' }}{%- endif -%}
"""
HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n' -}}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\n' -}}
{{- 'Reasoning: ' + reasoning_effort + '\n\n# Valid channels: analysis, commentary, final. ' -}}
{{- 'Channel must be included for every message.' -}}
{%- if tools -%}{{ "\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif -%}
{{- '<|end|>' -}}
{%- set system = messages[0].role == 'system' -%}
{%- if system or tools -%}
{{- '<|start|>developer<|message|>' -}}
{%- if system -%}{{ '# Instructions\n\n' + messages[0].content }}{%- endif -%}
{%- if tools -%}
{{- '\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n' -}}
{%- for tool in tools -%}
{{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = ' -}}
{%- set of = tool.function.parameters.properties -%}
{%- if of -%}
{{- '(_: {\n' -}}
{%- for key, spec in of.items() -%}
{{- key + '?: ' + ('number' if spec.type == 'integer' else spec.type) + ',\n' -}}
{%- endfor -%}
{{- '}) => any;\n\n' -}}
{%- else -%}{{ '() => any;\n\n' }}{%- endif -%}
{%- endfor -%}
{{- '} // namespace functions' -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set ns = namespace(name=none) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.tool_calls -%}
{%- set call = m.tool_calls[0].function -%}{%- set ns.name = call.name -%}
{%- if m.content -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson + '<|call|>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- m.content | tojson + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""
MODELS = {
    "llama-4": (LLAMA4_CONTROLS, LLAMA4),
    "template": (MINIMAX_CONTROLS, MINIMAX),
    "harmony": (HARMONY_CONTROLS, HARMONY),
}
ARGUMENTS = {"title": 'a "b" <c>', "n": 3}
RESULT = 'say "7"'


def made(name: str, template: bool = True) -> tuple[ChatFormat, Any]:
    controls, text = MODELS[name]
    form = chat(controls, text if template else None)
    assert form.name == name
    # A template's clock shows the date of all prompts.
    return form, tokenizer(controls, text.replace("strftime_now('%Y-%m-%d')", "'2024-07-26'"))


def rendered(theirs: Any, messages: list[dict[str, Any]], tools: Any = None, *, opened: bool = True) -> Any:
    return theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=opened, return_dict=False,
        enable_thinking=False, reasoning_effort="low", date_string="26 Jul 2024",
    )  # fmt: skip


def called(count: int) -> dict[str, Any]:
    function = {"name": "go", "arguments": ARGUMENTS}
    calls = [{"id": f"call{i:05d}", "type": "function", "function": function} for i in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


ASKED = {"role": "user", "content": "Hello {x}"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("with_tools", [False, True])
def test_prompts_equal_the_template(name: str, system: str | None, with_tools: bool) -> None:
    form, theirs = made(name)
    messages = [*([{"role": "system", "content": system}] if system else []), ASKED]
    tools, functions = (TOOLS, FUNCTIONS) if with_tools else ([], None)
    ids = form.prompt_ids(ASKED["content"], system=system, tools=tools)
    assert ids == rendered(theirs, messages, functions)


@pytest.mark.parametrize("name", ["llama-4", "harmony"])
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("with_tools", [False, True])
def test_without_a_template_the_prompt_is_the_same(name: str, system: str | None, with_tools: bool) -> None:
    (form, _), (without, _) = made(name), made(name, template=False)
    tools = TOOLS if with_tools else []
    ids = without.prompt_ids("Hello {x}", system=system, tools=tools)
    assert ids == form.prompt_ids("Hello {x}", system=system, tools=tools)
    results = {"after": FinishReason.LENGTH, "names": ["go"]}
    assert without.tool_results_ids([RESULT], **results) == form.tool_results_ids([RESULT], **results)
    more = without.user_ids("Sure?", FinishReason.LENGTH)
    assert more == form.user_ids("Sure?", FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("name", "count"), [("llama-4", 1), ("llama-4", 2), ("template", 1), ("template", 2), ("harmony", 1)]
)
def test_what_the_template_writes_of_calls_is_read_and_continued(name: str, count: int) -> None:
    form, theirs = made(name)
    results = [
        {"role": "tool", "content": RESULT, "name": "go", "tool_call_id": f"call{i:05d}"}
        for i in range(count)
    ]
    turn = called(count)
    if name == "template":  # its prompt has opened a thought
        turn["content"] = "<think>\nHm.\n</think>\n\n"
    whole = rendered(theirs, [ASKED, turn, *results], FUNCTIONS)
    prompt = form.prompt_ids(ASKED["content"], tools=TOOLS)
    delta = form.tool_results_ids([RESULT] * count, FinishReason.LENGTH, names=["go"] * count)
    assert whole[-len(delta) :] == delta
    start = len(prompt)
    if name == "template":
        start = len(rendered(theirs, [ASKED], FUNCTIONS, opened=False))
    sampled = [*whole[start : -len(delta)], delta[0]]
    message = form.parse(sampled)
    read = [(c.name, c.fitted(TOOLS[0].schema)) for c in message.tool_calls if isinstance(c, ToolCall)]
    assert read == [("go", ARGUMENTS)] * count
    again = form.tool_results_ids(
        [RESULT] * count, FinishReason.STOP, last_id=sampled[-1], names=["go"] * count
    )
    assert again == delta[1:]


@pytest.mark.parametrize("name", MODELS)
def test_a_user_message_continues_a_plain_answer(name: str) -> None:
    form, theirs = made(name)
    whole = rendered(
        theirs, [ASKED, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}]
    )
    delta = form.user_ids("Sure?", FinishReason.LENGTH)
    assert whole[-len(delta) :] == delta


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "go", "parameters": {"title": "x", "n": 3}}',
        '[go(title="x", n=3)]',
        '<|python_start|>[go(title="x", n=3)]<|python_end|>',
        '<|python_start|><|python_end|>{"name": "go", "parameters": {"title": "x", "n": 3}}',
    ],
)
def test_llama4_calls_as_json_or_in_python_syntax(text: str) -> None:
    (call,) = made("llama-4")[0].parse_text(text).tool_calls
    assert call == ToolCall("go", {"title": "x", "n": 3})


def test_a_llama4_argument_that_json_does_not_have_is_a_malformed_call() -> None:
    form, _ = made("llama-4")
    (call,) = form.parse_text("[go(title={'a', 'b'})]").tool_calls
    assert isinstance(call, MalformedToolCall)


def test_llama4_text_beside_calls_is_kept() -> None:
    form, _ = made("llama-4")
    assert form.parse_text("[1, 2] is a list").text == "[1, 2] is a list"
    message = form.parse_text('<|python_start|>I look.<|python_end|>{"name": "go", "parameters": {}}')
    assert (message.text, message.tool_calls) == ("I look.", [ToolCall("go", {})])
    two = form.parse_text('[go(title="x"), stay()]').tool_calls
    assert two == [ToolCall("go", {"title": "x"}), ToolCall("stay", {})]


def test_harmony_channels_are_reasoning_text_and_calls() -> None:
    form, _ = made("harmony")
    message = form.parse_text(
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.go <|constrain|>json<|message|>{"n": 3}'
    )
    assert (message.reasoning, message.text) == ("Hm.", "I look.")
    assert message.tool_calls == [ToolCall("go", {"n": 3})]
    final = form.parse_text("<|channel|>final<|message|>It is 7.")
    assert (final.reasoning, final.text, final.tool_calls) == ("", "It is 7.", [])


def test_harmony_appends_to_an_answer_that_ended_without_ending_it_again() -> None:
    form, _ = made("harmony")
    end = form.codec.token_id("<|return|>")
    ids = form.user_ids("Sure?", FinishReason.STOP, last_id=end)
    assert form.codec.decode(ids) == "<|start|>user<|message|>Sure?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-4", "[go(1)]"),
        ("llama-4", "[go(title=open('x'))]"),
        ("llama-4", '{"name": "go", "parameters": 3}'),
        ("template", "<minimax:tool_call></minimax:tool_call>"),
        ("template", "<minimax:tool_call><invoke name></invoke></minimax:tool_call>"),
        ("harmony", "<|channel|>commentary to=functions.go<|message|>not json<|call|>"),
        ("harmony", "<|channel|>commentary to=functions.go<|message|>[1]<|call|>"),
    ],
)
def test_broken_calls_become_errors_for_the_model(name: str, text: str) -> None:
    (call,) = made(name)[0].parse_text(text).tool_calls
    assert isinstance(call, MalformedToolCall)


@pytest.mark.parametrize("name", MODELS)
def test_texts_of_environments_and_names_of_calls_become_no_control_tokens(name: str) -> None:
    form, _ = made(name)
    hostile = " ".join(MODELS[name][0])
    clean = form.tool_results_ids(["hello"], FinishReason.STOP, names=["go"])
    controls = set(form.codec.controls.values())
    ids = form.tool_results_ids([hostile], FinishReason.STOP, names=[hostile])
    assert [i for i in ids if i in controls] == [i for i in clean if i in controls]
    ids, clean = form.prompt_ids(hostile, tools=TOOLS), form.prompt_ids("hello", tools=TOOLS)
    assert [i for i in ids if i in controls] == [i for i in clean if i in controls]


def test_minimax_results_need_a_call_before_them() -> None:
    form, _ = made("template")
    assert isinstance(form, Template)
    shown = form.codec.decode(form.tool_results_ids(["4", "5"], FinishReason.LENGTH))
    assert shown == ("[e~[\n]~b]tool\n<response>4</response>\n<response>5</response>[e~[\n]~b]ai\n<think>\n")
