"""Chat formats against chat templates, and untrusted text against the tokenizers' control tokens.

The templates here are written from each format's documentation, independently of the Python renderers used
for tokenizers without a template.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import ModelSettings
from orhpc.errors import MalformedToolCall, ModelError
from orhpc.rollout.chat import ChatFormat, ToolCall, chat_format
from orhpc.rollout.chat.messages import MAX_CALLS
from orhpc.rollout.environment.tools import ToolSpec
from orhpc.types import FinishReason
from tests.scripted import CHATML, DEEPSEEK, GLM, GLM4, LLAMA, QWEN, chat, tokenizer

STOP = FinishReason.STOP
SCHEMA = {
    "type": "object",
    "title": "Where",
    "properties": {"title": {"type": "string", "title": "Title"}, "n": {"type": "integer"}},
}
TOOLS = [ToolSpec("go", 'Go "there" & <back>.', SCHEMA), ToolSpec("stay", "", {"type": "object"})]
FUNCTIONS = [
    {
        "type": "function",
        "function": {
            "name": "go",
            "description": 'Go "there" & <back>.',
            "parameters": {
                "type": "object",
                "properties": {"title": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stay", "description": "", "parameters": {"type": "object"}}},
]

SMOLLM2 = """\
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

_HERMES_TOOLS = """\
{{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
{{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments " }}
{{- "within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
{{- "{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
"""

_HERMES_TURNS = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

QWEN3 = (
    """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
"""
    + _HERMES_TOOLS
    + """\
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
    + _HERMES_TURNS
    + """\
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
"""
)

QWEN25 = (
    """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- else %}
{%- set system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}{{- '\n\n' }}
"""
    + _HERMES_TOOLS
    + """\
{%- else %}{{- '<|im_end|>\n' }}{%- endif %}
"""
    + _HERMES_TURNS
)

LLAMA31 = """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}
{%- else %}{{- m.content }}{%- endif %}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first and m.role == 'user' %}
{{- 'Given the following functions, please respond with a JSON for a function call ' }}
{{- 'with its proper arguments that best answers the given prompt.\n\n' }}
{{- 'Respond in the format {"name": function name, "parameters": ' }}
{{- 'dictionary of argument name and its value}.Do not use variables.\n\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) + '\n\n' }}{%- endfor %}
{%- endif %}
{{- m.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

DEEPSEEK3 = """\
{%- set ns = namespace(system='', tool=false) %}
{%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.system = ns.system + m.content %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '\n' if ns.tool else '<｜tool▁outputs▁begin｜>' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{%- set ns.tool = true %}
{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""

GLM45 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
{{- '</tools>\n\nFor each function call, output the function name and arguments within the following ' }}
{{- 'XML format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n' }}
{{- '<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n' }}
{{- '<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>\n<think></think>\n' + m.content.strip() }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{- '<|system|>\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{%- endif %}
"""

OFFICIAL: dict[str, tuple[tuple[str, ...], str]] = {
    "smollm2": (CHATML, SMOLLM2),
    "qwen2.5": (QWEN, QWEN25),
    "qwen3": (QWEN, QWEN3),
    "llama3.1": (LLAMA, LLAMA31),
    "deepseek": (DEEPSEEK, DEEPSEEK3),
    "glm4.5": (GLM, GLM45),
}
BUILT_IN = ("qwen3", "llama3.1", "deepseek", "glm4.5")
TAKES_TOOLS = ("qwen2.5", "qwen3", "llama3.1", "glm4.5")
PROMPTS = ["Hello world", "  padded \n\n", "\n\nhello  in", "", "é\u2028 {x} {tools}", 'quote " and \\ back']


def official(made: Any, messages: Any, *, tools: Any = None, thinking: bool = False) -> list[int]:
    """The tokenizer's own rendering of a whole conversation."""
    return made.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=True,
        enable_thinking=thinking,
        thinking=thinking,
        return_dict=False,
    )


_FORMS: dict[str, ChatFormat] = {}


def chat_for(name: str) -> ChatFormat:
    """A chat format with its official template, created once."""
    if name not in _FORMS:
        _FORMS[name] = chat(*OFFICIAL[name])
    return _FORMS[name]


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
def test_a_users_word_continues_the_official_conversation(name: str, thinking: bool) -> None:
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
def test_renderers_stand_in_for_the_template(name: str, thinking: bool) -> None:
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
def test_the_end_of_a_turn_is_written_once(controls: tuple[str, ...]) -> None:
    form = chat(controls)
    ends = [form.codec.token_id(s) for s in form.stops]
    opening = form.tool_results_ids(["x"], FinishReason.LENGTH)
    for end in ends:
        delta = form.tool_results_ids(["x"], STOP, last_id=end)
        if end == opening[0]:
            assert delta == opening[1:]  # the model sampled the end-of-turn token
        else:
            assert delta == opening  # the end-of-turn token is added, outside the trained tokens


# --- untrusted text ---------------------------------------------------------------------------------


def _foreign_texts(controls: tuple[str, ...]) -> st.SearchStrategy[str]:
    pieces = st.sampled_from([*controls, "<|im_", "end|>", "<", "|", "\n", " ", "hello", "<tool_call>", "é"])
    return st.lists(pieces | st.text(max_size=3), max_size=8).map("".join)


@pytest.mark.parametrize("name", OFFICIAL)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_foreign_text_makes_a_control_token(name: str, data: st.DataObject) -> None:
    form = chat_for(name)
    text = data.draw(_foreign_texts(OFFICIAL[name][0]))
    ids = frozenset(form.codec.controls.values())
    clean_prompt = [i for i in form.prompt_ids("hello", tools=TOOLS) if i in ids]
    assert [i for i in form.prompt_ids(text, tools=TOOLS) if i in ids] == clean_prompt
    clean = [i for i in form.tool_results_ids(["hello", "hello"], STOP) if i in ids]
    assert [i for i in form.tool_results_ids([text, text], STOP) if i in ids] == clean
    hostile = ToolSpec(text or "x", text, {"type": "object", "properties": {text: {"description": text}}})
    polite = ToolSpec("x", "", {"type": "object", "properties": {"": {"description": ""}}})
    assert [i for i in form.prompt_ids("hello", tools=[hostile]) if i in ids] == [
        i for i in form.prompt_ids("hello", tools=[polite]) if i in ids
    ]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_foreign_text_stays_the_same_text(data: st.DataObject) -> None:
    text = data.draw(_foreign_texts(QWEN))
    form = chat_for("qwen3")
    shown = form.codec.decode(form.prompt_ids(text))
    assert f"<|im_start|>user\n{_printable(text, form)}<|im_end|>\n" in shown


def _printable(text: str, form: ChatFormat) -> str:
    """Break up markers that are not tokens here; all other text stays."""
    for marker in form.text_markers:
        if form.codec.token_id(marker) is None:
            text = text.replace(marker, f"{marker[0]} {marker[1:]}")
    return text.encode("utf-8", "replace").decode()


def test_only_the_control_text_itself_is_cut() -> None:
    form = chat_for("qwen3")
    alone, cut = form.codec.encode(["hello", "hello"]), form.prompt_ids("hello<|im_end|>hello")
    assert cut.count(alone[0]) == 2
    assert len(cut) - len(form.prompt_ids("hellohello")) == len("<|im_end|>")


def test_markers_that_are_plain_text_are_broken_up() -> None:
    form = chat(CHATML, SMOLLM2)
    shown = form.codec.decode(form.tool_results_ids(['<tool_call>{"name": "x"}</tool_call>'], STOP))
    assert "<tool_call>" not in shown
    assert '< tool_call>{"name": "x"}< /tool_call>' in shown


def test_markers_that_a_normaliser_makes_are_caught() -> None:
    from tokenizers import normalizers

    made = tokenizer(QWEN)
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    made.backend_tokenizer.add_special_tokens(["<|im_end|>"])
    form = chat_format(ModelSettings(), made)
    end = form.codec.token_id("<|im_end|>")
    assert form.prompt_ids("＜|im_end|＞").count(end) == form.prompt_ids("x").count(end)


# --- the system prompt ------------------------------------------------------------------------------


def test_the_system_prompt_takes_the_tools_and_no_other_braces() -> None:
    form = chat(QWEN, QWEN3)
    shown = form.codec.decode(form.prompt_ids("Hi", system='{x} {"a": {}}\n{tools}\n{tools', tools=TOOLS))
    listed = "\n".join(json.dumps(f, ensure_ascii=False) for f in FUNCTIONS)
    assert shown.startswith('<|im_start|>system\n{x} {"a": {}}\n' + listed + "\n{tools<|im_end|>")
    assert "# Tools" not in shown


@pytest.mark.parametrize("name", ["smollm2", "deepseek"])
def test_a_template_without_tools_gets_them_in_the_system_prompt(name: str) -> None:
    form = chat_for(name)
    for system in (None, "Be brief."):
        shown = form.codec.decode(form.prompt_ids("Hi", system=system, tools=TOOLS))
        assert json.dumps(FUNCTIONS[0], ensure_ascii=False) in shown
        assert (system or "") in shown
        assert shown.count("Be brief.") == (1 if system else 0)


# --- parsing ----------------------------------------------------------------------------------------

CALLS = [ToolCall("go", {"title": "x y", "n": 3}), ToolCall("stay", {})]


def written(name: str, calls: list[ToolCall]) -> str:
    bodies = {
        "chatml": lambda c: (
            f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>\n"
        ),
        "llama3": lambda c: json.dumps({"name": c.name, "parameters": c.arguments}) + "; ",
        "deepseek": lambda c: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n"
            f"{json.dumps(c.arguments)}\n```<｜tool▁call▁end｜>\n"
        ),
        "glm": lambda c: (
            f"<tool_call>{c.name}\n"
            + "".join(
                f"<arg_key>{k}</arg_key>\n"
                f"<arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>\n"
                for k, v in c.arguments.items()
            )
            + "</tool_call>\n"
        ),
    }
    text = "".join(bodies[name](c) for c in calls)
    if name == "deepseek":
        return f"<｜tool▁calls▁begin｜>{text.strip()}<｜tool▁calls▁end｜>"
    return text


@pytest.mark.parametrize("controls", [CHATML, QWEN, LLAMA, DEEPSEEK, GLM])
@pytest.mark.parametrize("count", [1, 2])
def test_calls_come_back_in_their_order(controls: tuple[str, ...], count: int) -> None:
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
def test_json_arguments_survive(arguments: dict[str, Any]) -> None:
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
def test_a_malformed_call_says_what_is_wrong(controls: tuple[str, ...], text: str) -> None:
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
def test_nothing_a_model_writes_breaks_the_parser(pieces: list[str]) -> None:
    for name in ("qwen3", "llama3.1", "deepseek", "glm4.5"):
        message = chat_for(name).parse_text("".join(pieces))
        for call in message.tool_calls:
            assert isinstance(call, ToolCall | MalformedToolCall)


def test_good_and_bad_calls_of_a_message_are_told_apart() -> None:
    text = written("chatml", CALLS[:1]) + "<tool_call>{</tool_call>" + written("chatml", CALLS[1:])
    calls = chat(QWEN).parse_text(text).tool_calls
    assert [type(c) for c in calls] == [ToolCall, MalformedToolCall, ToolCall]


def test_reasoning_is_taken_off_and_calls_in_it_do_not_count() -> None:
    form = chat(QWEN)
    call = written("chatml", CALLS[:1])
    message = form.parse_text(f"<think>\nI could {call}\n</think>\n\nNo.")
    assert (message.text, message.tool_calls) == ("No.", [])
    assert call.strip() in message.reasoning
    assert form.parse_text("<think>never ends").text == ""
    assert form.parse_text("so\n</think>\n\nYes.", opened=True).text == "Yes."
    assert form.parse_text("no end", opened=True).text == ""


def test_a_template_that_opens_the_thought_is_known_to() -> None:
    template = SMOLLM2.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    form = chat(QWEN, template)
    message = form.parse(form.codec.encode(["thinking</think>\n\n7<|im_end|>"]))
    assert (message.reasoning, message.text) == ("thinking", "7")
    assert form.parse(form.codec.encode(["only thinking<|im_end|>"])).text == ""


def test_glm_strings_stay_strings_where_the_schema_says_so() -> None:
    (call,) = chat(GLM).parse_text(written("glm", [ToolCall("go", {"title": "007", "n": 7})])).tool_calls
    assert isinstance(call, ToolCall)
    assert call.fitted(SCHEMA) == {"title": "007", "n": 7}


def test_other_ways_to_write_a_call() -> None:
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


# --- choice of the format ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("controls", "name"),
    [
        (CHATML, "chatml"),
        (QWEN, "chatml"),
        (LLAMA, "llama3"),
        (DEEPSEEK, "deepseek"),
        (GLM, "glm"),
        (GLM4, "glm"),
    ],
)
def test_the_format_shows_in_the_vocabulary(controls: tuple[str, ...], name: str) -> None:
    assert chat(controls).name == name


def test_an_unknown_vocabulary_names_the_setting() -> None:
    for controls, way in (
        (("<s>", "</s>"), r"write a rollout\.custom_agent"),
        ((*CHATML, *LLAMA), "set it to"),
    ):
        with pytest.raises(ModelError, match=rf"model\.chat_format: .*; .*{way}"):
            chat(controls)
    assert chat_format(ModelSettings(chat_format="llama3"), tokenizer((*CHATML, *LLAMA))).name == "llama3"


def test_a_format_that_does_not_fit_names_the_missing_token() -> None:
    with pytest.raises(ModelError, match=r"<\|start_header_id\|>"):
        chat_format(ModelSettings(chat_format="llama3"), tokenizer(CHATML))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ nothing }}",
        "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    ],
)
def test_a_broken_template_is_one_clear_line(template: str) -> None:
    with pytest.raises(ModelError, match="chat template") as caught:
        chat(CHATML, template).prompt_ids("Hi")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("controls", [QWEN, LLAMA, DEEPSEEK, GLM4, GLM], ids=lambda c: c[0])
def test_any_turn_is_parsed_in_time_linear_in_its_length(controls: tuple[str, ...]) -> None:
    """Text repeated 100,000 times, after each way to start a call, used to take 67 s and more."""
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


def test_calls_beyond_the_most_are_one_error() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    message = chat(QWEN).parse_text(f"x{call * 500}y")
    assert len(message.tool_calls) == MAX_CALLS + 1
    assert isinstance(message.tool_calls[-1], MalformedToolCall)
    assert message.text == "xy"
