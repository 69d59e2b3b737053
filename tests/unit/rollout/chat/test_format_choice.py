"""The chat format is chosen by the tokenizer's vocabulary."""

from __future__ import annotations

import pytest

from orhpc.config import ModelSettings
from orhpc.errors import ModelError
from orhpc.rollout.chat import chat_format
from tests.scripted import CHATML, DEEPSEEK, GLM, GLM4, LLAMA, QWEN, chat, tokenizer


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
def test_the_format_is_chosen_by_the_vocabulary(controls: tuple[str, ...], name: str) -> None:
    assert chat(controls).name == name


def test_the_error_for_an_unknown_vocabulary_names_the_setting() -> None:
    for controls, way in (
        (("<s>", "</s>"), r"write a rollout\.custom_agent"),
        ((*CHATML, *LLAMA), "set it to"),
    ):
        with pytest.raises(ModelError, match=rf"model\.chat_format: .*; .*{way}"):
            chat(controls)
    assert chat_format(ModelSettings(chat_format="llama3"), tokenizer((*CHATML, *LLAMA))).name == "llama3"


def test_the_error_for_a_wrong_format_names_the_missing_token() -> None:
    with pytest.raises(ModelError, match=r"<\|start_header_id\|>"):
        chat_format(ModelSettings(chat_format="llama3"), tokenizer(CHATML))
