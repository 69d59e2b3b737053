"""ChatML with Hermes tool calls: Qwen 2, 2.5, 3 and 3-Coder, SmolLM2 and related models."""

from __future__ import annotations

import json

from orhpc.models.chat_formats import CONTROL_TOKENS
from orhpc.rollout.chat.base import ChatFormat, Conversation, Functions
from orhpc.rollout.chat.messages import AssistantMessage
from orhpc.rollout.chat.tagged_calls import hermes_calls


class ChatML(ChatFormat):
    """``<|im_start|>role`` ... ``<|im_end|>``; calls are JSON or XML between ``<tool_call>`` tags.

    The fallback for tokenizers without a template is Qwen3's
    (https://huggingface.co/Qwen/Qwen3-8B, ``tokenizer_config.json``).
    """

    name = "chatml"
    required = CONTROL_TOKENS["chatml"]
    stops = ("<|im_end|>", "<|endoftext|>")
    text_markers = (
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<tools>",
        "</tools>",
    )

    def parse_calls(self, text: str) -> AssistantMessage:
        return hermes_calls(text)

    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        if tools:
            tool_block = _tool_block(tools)
            system = tool_block if system is None else f"{system}\n\n{tool_block}"
        out = [] if system is None else [f"<|im_start|>system\n{system}<|im_end|>\n"]
        previous = None
        for message, following in zip(messages, [*messages[1:], None], strict=True):
            role, content = message["role"], message["content"]
            if role == "tool":
                out.append("<|im_start|>user" if previous != "tool" else "")
                out.append(f"\n<tool_response>\n{content}\n</tool_response>")
                out.append("<|im_end|>\n" if following is None or following["role"] != "tool" else "")
            elif role != "system":
                out.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
            previous = role
        out.append("<|im_start|>assistant\n")
        if not thinking and self.codec.token_id("<think>") is not None:
            out.append("<think>\n\n</think>\n\n")
        return "".join(out)


def _tool_block(tools: Functions) -> str:
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
