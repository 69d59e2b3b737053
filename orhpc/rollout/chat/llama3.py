"""Llama 3.1 and later: JSON tool calls, with or without the python tag."""

from __future__ import annotations

import ast
import json

from orhpc.errors import MalformedToolCall
from orhpc.models.chat_formats import CONTROL_TOKENS
from orhpc.rollout.chat.base import ChatFormat, Conversation, Functions
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall, call_of, json_values

_PYTHON_TAG = "<|python_tag|>"
MAX_PYTHON_CHARACTERS = 20_000
"""Maximum characters of a call in Python syntax: the parser's time is not linear in them."""


class Llama3(ChatFormat):
    """Header tokens around the role; JSON with a name, or text after the python tag, is a tool call.

    The fallback for tokenizers without a template is Llama 3.1's
    (https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1), with tools in the user's turn.
    """

    name = "llama3"
    required = CONTROL_TOKENS["llama3"]
    stops = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def parse_calls(self, text: str) -> AssistantMessage:
        text_before, tagged, call = text.partition(_PYTHON_TAG)
        if not tagged and not is_json_call(text):
            return AssistantMessage(text)
        body = call if tagged else text
        calls: list[ToolCall | MalformedToolCall] = []
        try:
            if tagged and not body.lstrip().startswith(("{", "[")):
                calls.append(_python_call(body))
            else:
                calls += json_calls(body)
        except MalformedToolCall as error:
            calls.append(error)
        return AssistantMessage(text_before if tagged else "", tool_calls=calls)

    def tool_instructions(self, tools: str) -> str:
        return (
            f"You can call these functions:\n{tools}\n\nTo call one, answer with nothing but\n"
            '{"name": "...", "parameters": {...}}'
        )

    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
        environment = "Environment: ipython\n" if tools else ""
        dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        out = ["<|begin_of_text|>", _turn("system", f"{environment}{dates}{system}")]
        tools_written = not tools
        for message in messages:
            role, content = message["role"], message["content"].strip()
            if role == "user" and not tools_written:
                out.append(_turn("user", tool_block(tools) + content))
                tools_written = True
            elif role == "tool":
                quoted = json.dumps(message["content"], ensure_ascii=False)
                out.append(_turn("ipython", quoted))
            elif role != "system":
                out.append(_turn(role, content))
        return "".join(out) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def _turn(role: str, content: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"


def tool_block(tools: Functions) -> str:
    listed = "".join(json.dumps(tool, ensure_ascii=False, indent=4) + "\n\n" for tool in tools)
    return (
        "Given the following functions, please respond with a JSON for a function call "
        "with its proper arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": '
        "dictionary of argument name and its value}.Do not use variables.\n\n" + listed
    )


def json_calls(text: str) -> list[ToolCall | MalformedToolCall]:
    """Read ``{"name": ..., "parameters": {...}}`` objects, alone, one after another or in a list.

    Raises MalformedToolCall.
    """
    calls: list[ToolCall | MalformedToolCall] = []
    for value in json_values(text, ";,"):
        listed = value if isinstance(value, list) else [value]
        calls += [call_of(one, keys=("parameters", "arguments")) for one in listed]
    return calls


def is_json_call(text: str) -> bool:
    """Whether a turn is a tool call: it starts as an object whose first key is one of a call's.

    An answer can also be JSON, so valid JSON is not sufficient; and a call can be broken JSON.
    """
    start = "".join(text.split())[:14].replace("'", '"')
    return start.startswith(('{"name":', '[{"name":', '{"type":"funct', '[{"type":"func'))


def _python_call(text: str) -> ToolCall:
    """Read ``tool.call(argument="value")``, the syntax for built-in tools."""
    try:
        if len(text) > MAX_PYTHON_CHARACTERS:
            raise ValueError
        return keyword_call(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise MalformedToolCall(
            'the tool call after <|python_tag|> is neither {"name": ..., "parameters": {...}} '
            "nor tool.call(argument=value)"
        ) from None


def keyword_call(node: ast.expr) -> ToolCall:
    """Read ``NAME(argument=value)`` or ``NAME.call(argument=value)``; raises ValueError for anything else."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "call":
        function = function.value
    name = ast.unparse(function)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError
    return ToolCall(name, {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg})
