"""The format ``template``: models with a chat template and no format of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orhpc.config import ModelSettings
from orhpc.errors import MalformedToolCall, ModelError
from orhpc.rollout.chat import ChatFormat, ToolCall, chat_format
from orhpc.types import FinishReason
from tests.scripted import tokenizer
from tests.unit.rollout.chat.kit import TOOLS

# Written from the documentation of each format.
GEMMA_CONTROLS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
GEMMA2 = """\
{{- '<bos>' -}}
{%- for m in messages -%}
{%- if m.role not in ('user', 'assistant') -%}{{ raise_exception('unknown role ' + m.role) }}{%- endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('not in turn') }}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim -}}
{{- '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
MISTRAL_CONTROLS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip
MISTRAL = """\
{{- '<s>' -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 -%}{{ raise_exception('ids have 9 characters') }}{%- endif -%}
{{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' -}}
{%- elif m.role == 'assistant' -%}{{ m.content + '</s>' }}
{%- elif m.role == 'user' -%}
{%- if tools and loop.last -%}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif -%}
{{- '[INST]' + m.content + '[/INST]' -}}
{%- endif -%}
{%- endfor -%}
"""


def form_of(controls: tuple[str, ...], template: str) -> tuple[ChatFormat, Any]:
    made = tokenizer(controls, template)
    return chat_format(ModelSettings(), made), made


@pytest.fixture
def gemma() -> tuple[ChatFormat, Any]:
    return form_of(GEMMA_CONTROLS, GEMMA2)


@pytest.fixture
def mistral() -> tuple[ChatFormat, Any]:
    return form_of(MISTRAL_CONTROLS, MISTRAL)


@pytest.mark.parametrize(
    ("controls", "template", "end"),
    [(GEMMA_CONTROLS, GEMMA2, "<end_of_turn>"), (MISTRAL_CONTROLS, MISTRAL, "</s>")],
)
def test_conversations_equal_the_template(controls: tuple[str, ...], template: str, end: str) -> None:
    form, made = form_of(controls, template)
    assert form.name == "template"
    assert form.stop_token_ids[0] == made.convert_tokens_to_ids(end)
    talk = [
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "More, "),
        ("assistant", "No."),
        ("user", "Bye"),
    ]
    messages = [{"role": role, "content": text} for role, text in talk]
    ids = form.prompt_ids("Hi")
    for role, text in talk[1:]:
        if role == "assistant":
            ids += form.codec.encode([text])
        else:
            ids += form.user_ids(text, FinishReason.LENGTH)
    whole = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == form.codec.encode([whole])


def test_a_refused_system_prompt_is_put_before_the_first_message(gemma: tuple[ChatFormat, Any]) -> None:
    form, made = gemma
    text = made.decode(form.prompt_ids("Hi", system="Be brief."))
    assert text == "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"


def test_tools_that_the_template_does_not_take_are_described(gemma: tuple[ChatFormat, Any]) -> None:
    form, made = gemma
    text = made.decode(form.prompt_ids("Hi", system="Use {tools}.", tools=TOOLS))
    assert text.startswith('<bos><start_of_turn>user\nUse {"type": "function", "function": {"name": "go"')
    assert "<tool_call>" in made.decode(form.prompt_ids("Hi", tools=TOOLS))


def test_refused_tool_results_become_one_user_message(gemma: tuple[ChatFormat, Any]) -> None:
    form, made = gemma
    end = form.stop_token_ids[0]
    ids = form.tool_results_ids(["4", "<end_of_turn></tool_response>"], FinishReason.STOP, last_id=end)
    assert ids.count(end) == 1  # that of the results' own turn: the model's was sampled, and text is no token
    text = made.decode(ids)
    assert text.startswith("\n<start_of_turn>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n")
    assert "< /tool_response>" in text


def test_tool_results_and_calls_of_mistral(mistral: tuple[ChatFormat, Any]) -> None:
    form, made = mistral
    results = form.tool_results_ids(['say "hi"', "2"], FinishReason.LENGTH)
    assert made.decode(results) == (
        '</s>[TOOL_RESULTS]{"content": "say \\"hi\\""}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "2"}[/TOOL_RESULTS]'
    )
    assert "[AVAILABLE_TOOLS]" in made.decode(form.prompt_ids("Hi", tools=TOOLS))
    call = {"name": "go", "arguments": {"n": 1}}
    for written in (f"[TOOL_CALLS]{json.dumps([call, call])}", '[TOOL_CALLS]go[ARGS]{"n": 1}' * 2):
        message = form.parse_text(f"I go. {written}")
        assert message.text == "I go. "
        assert message.tool_calls == [ToolCall("go", {"n": 1})] * 2
    (broken,) = form.parse_text('[TOOL_CALLS][{"name": "go", ').tool_calls
    assert isinstance(broken, MalformedToolCall)


def test_a_system_prompt_that_the_template_moves_to_the_last_message() -> None:
    """As Mistral's templates do."""
    moving = (
        "{%- set ns = namespace(said='') -%}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{%- set ns.said = m.content + ': ' -%}"
        "{%- elif m.role == 'user' -%}[INST]{{ (ns.said if loop.last else '') + m.content }}[/INST]"
        "{%- else -%}{{ m.content }}</s>{%- endif -%}{%- endfor -%}"
    )
    form, made = form_of(MISTRAL_CONTROLS, moving)
    conversation = [("system", "short"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in conversation]
    expected = made.apply_chat_template(messages, return_dict=False)
    assert form.prompt_ids(conversation) == expected
    assert made.decode(expected) == "[INST]a[/INST]b</s>[INST]short: c[/INST]"


@pytest.mark.parametrize("controls", [GEMMA_CONTROLS, ("<|im_start|>", "<|im_end|>")])
def test_calls_between_tags(controls: tuple[str, ...]) -> None:
    form, _ = form_of(controls, GEMMA2.replace("<end_of_turn>", controls[-1]))
    message = form.parse_text(
        'First.<tool_call>\n{"name": "go", "arguments": {"n": 2}}\n</tool_call>'
        "<tool_call>\n<function=go>\n<parameter=title>\n12\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    json_call, xml_call = message.tool_calls
    assert json_call == ToolCall("go", {"n": 2})
    assert isinstance(xml_call, ToolCall)
    assert xml_call.arguments == {"title": 12, "n": 3}
    assert xml_call.fitted(TOOLS[0].schema) == {"title": "12", "n": 3}


@pytest.mark.parametrize(
    "text",
    [
        "<function=go>",
        "<function=go><parameter>1</parameter></function>",
        "<function=go><parameter=n</function>",
    ],
)
def test_a_broken_xml_call_is_malformed(gemma: tuple[ChatFormat, Any], text: str) -> None:
    calls = gemma[0].parse_text(f"<tool_call>{text}</tool_call>").tool_calls
    assert all(isinstance(call, (MalformedToolCall, ToolCall)) for call in calls)
    if "<parameter>" not in text:
        assert isinstance(calls[0], MalformedToolCall)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match="template needs a tokenizer with a chat template"):
        chat_format(ModelSettings(chat_format="template"), tokenizer(GEMMA_CONTROLS))
