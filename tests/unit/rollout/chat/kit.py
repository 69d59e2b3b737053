"""Chat templates of model families, and tool calls in each format.

The templates are written from each format's documentation, independently of the Python renderers used for
tokenizers without a template.
"""

from __future__ import annotations

import json
from typing import Any

from orhpc.rollout.chat import ChatFormat, ToolCall
from orhpc.rollout.environment.tools import ToolSpec
from orhpc.types import FinishReason
from tests.scripted import CHATML, DEEPSEEK, GLM, LLAMA, QWEN, chat

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
