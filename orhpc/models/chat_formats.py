"""Supported chat formats and how to recognize them, without a tokenizer library.

A chat format is recognized by its control tokens in the tokenizer, not by the model's family: models of many
families share one.  :mod:`orhpc.rollout.chat` implements each; login nodes check here whether one fits a
model folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orhpc.errors import ModelError
from orhpc.models.folders import read_object

if TYPE_CHECKING:
    from orhpc.config import Config

CONTROL_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama-4": ("<|header_start|>", "<|header_end|>", "<|eot|>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "glm": ("[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>"),
}
"""Control tokens of each chat format, by the values of ``model.chat_format``."""


TEMPLATE = "template"
"""The chat format of every tokenizer with a chat template to which none of :data:`CONTROL_TOKENS` fits."""


def fitting(tokens: Iterable[str], has_template: bool) -> str:
    """Return the one chat format whose control tokens are all in ``tokens``.

    ``has_template``: whether the tokenizer has a chat template, which is enough if no format fits.

    Raises:
        ModelError: none fits, or several do; the message says what to do.
    """
    present = set(tokens)
    found = [name for name, wanted in CONTROL_TOKENS.items() if present.issuperset(wanted)]
    if len(found) == 1:
        return found[0]
    if not found and has_template:
        return TEMPLATE
    which = " and ".join(found) or "none"
    other = "the tokenizer has no chat template; add one, or write a rollout.custom_agent"
    way = "set it to one of them" if found else other
    formats = ", ".join(CONTROL_TOKENS)
    raise ModelError(f"model.chat_format: {which} of {formats} fits the tokenizer's control tokens; {way}")


def check(config: Config, folder: Path | None) -> str:
    """Check that rollouts can be written in the model's chat format; return the result as text.

    ``folder``: the model's; None if it is not on this machine yet.

    Raises:
        ModelError: no chat format fits, and ``rollout.custom_agent`` is not set.
    """
    own = config.rollout.custom_agent
    if own is not None and not own.startswith("slime:"):  # slime's functions get a prompt in the chat format
        return "rollout.custom_agent writes conversations"
    if config.train.replay_rollouts is not None:
        return "recorded rollouts need no chat format"
    if config.model.chat_format != "auto":
        return config.model.chat_format
    tokens = added_tokens(folder) if folder is not None else None
    if folder is None or tokens is None:
        return "known once the tokenizer is downloaded"
    return fitting(tokens, has_template(folder))


def has_template(folder: Path) -> bool:
    """Whether a tokenizer's files contain a chat template, as transformers saves it."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(read_object(folder / "tokenizer_config.json").get("chat_template"))


def added_tokens(folder: Path) -> set[str] | None:
    """Return the tokens that a tokenizer's files declare as added; None if no file lists any.

    Formats: ``tokenizer.json`` of huggingface.co/docs/tokenizers, and transformers' ``added_tokens_decoder``
    of ``tokenizer_config.json`` and ``added_tokens.json``.
    """
    whole = read_object(folder / "tokenizer.json")
    settings = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    listed = whole.get("added_tokens")
    entries: list[Any] = list(listed) if isinstance(listed, list) else []
    entries += list(settings.values()) if isinstance(settings, dict) else []
    found = {str(entry["content"]) for entry in entries if isinstance(entry, dict) and "content" in entry}
    found |= set(read_object(folder / "added_tokens.json"))
    return found if whole or found else None
