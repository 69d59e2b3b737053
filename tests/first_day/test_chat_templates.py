"""Models without a chat format of their own: rollouts equal the published templates, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from orhpc.config import ModelSettings
from orhpc.models.chat_formats import added_tokens, fitting, has_template
from orhpc.rollout.chat import chat_format
from orhpc.types import FinishReason


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
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
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "What is 2 + 2?"})
    expected = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = form.prompt_ids("What is 2 + 2?", system=system)
    assert ids == expected
    if system and name == "mistral":
        return  # its template moves the system prompt to the last message
    ids += form.codec.encode(["It is 4."]) + form.user_ids("Sure?", FinishReason.LENGTH)
    messages += [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Sure?"}]
    assert ids == made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
