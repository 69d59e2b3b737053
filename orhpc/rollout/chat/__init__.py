"""Chat formats: :func:`chat_format` selects one for a tokenizer.

chat = chat_format(config.model, tokenizer)
ids = chat.prompt_ids(session.prompt, tools=session.tools, thinking=config.rollout.thinking)
...                                                 # sample; the ids stay as they were sampled
message = chat.parse(sampled)
ids += sampled + chat.tool_results_ids(["4"], FinishReason.STOP, last_id=sampled[-1])
"""

from __future__ import annotations

from typing import Any

from orhpc.config import ModelSettings
from orhpc.errors import ModelError
from orhpc.models.chat_formats import fitting
from orhpc.rollout.chat.base import TOOLS_PLACE, ChatFormat
from orhpc.rollout.chat.chatml import ChatML
from orhpc.rollout.chat.deepseek import DeepSeek
from orhpc.rollout.chat.glm import Glm
from orhpc.rollout.chat.harmony import Harmony
from orhpc.rollout.chat.llama3 import Llama3
from orhpc.rollout.chat.llama4 import Llama4
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall
from orhpc.rollout.chat.template import Template

__all__ = ["TOOLS_PLACE", "AssistantMessage", "ChatFormat", "ToolCall", "chat_format"]

_FORMATS = (ChatML, Llama3, Llama4, Harmony, DeepSeek, Glm, Template)
CHAT_FORMATS: dict[str, type[ChatFormat]] = {f.name: f for f in _FORMATS}
"""By the values of ``model.chat_format``; control tokens are in :mod:`orhpc.models.chat_formats`."""


class NoChatFormat:
    """Placeholder for agents that need no chat format; every use raises ModelError."""

    def __init__(self, reason: ModelError) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise ModelError(f"rollout.custom_agent uses context.chat.{name}, but {self._reason}")


def chat_format(settings: ModelSettings, tokenizer: Any, *, required: bool = True) -> ChatFormat:
    """Return the chat format of a model.

    Args:
        settings: ``chat_format`` is a name, or ``auto`` to detect it from the vocabulary's control tokens.
        tokenizer: transformers' tokenizer.
        required: whether to refuse a model without a chat format; otherwise only its use raises.

    Raises:
        ModelError: no format fits, the vocabulary lacks the format's tokens, or the chat template
            does not render a plain conversation.
    """
    try:
        name = settings.chat_format
        if name == "auto":
            name = fitting(tokenizer.get_added_vocab(), bool(getattr(tokenizer, "chat_template", None)))
        return CHAT_FORMATS[name](tokenizer)
    except ModelError as error:
        if required:
            raise
        stand_in: Any = NoChatFormat(error)
        return stand_in
