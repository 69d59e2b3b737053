"""Models without a fitting chat format are refused before anything starts, unless there is a custom agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from orhpc.commands.cli import main
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_PREFLIGHT, ModelError
from orhpc.launch.local import run_local
from orhpc.models import chat_formats
from orhpc.rollout.chat import CHAT_FORMATS, chat_format
from orhpc.rollout.loaded_agent import load_agent
from orhpc.rollout.transcript import RolloutBuilder
from orhpc.types import GroupRequest, Rollout, RolloutEnd, Sampling, Task
from tests.scripted import CHATML, DEEPSEEK, GLM, LLAMA, QWEN, tokenizer

GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
AGENT = f"{__name__}:own_agent"


def model_of(folder: Path, controls: tuple[str, ...]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer(controls).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma2", "num_hidden_layers": 2}))
    return folder


def config_of(folder: Path, **rollout: Any) -> Config:
    environments = {"room": {"url": "http://127.0.0.1:1"}}
    raw = {"environments": environments, "model": {"path": str(folder)}, "rollout": rollout}
    return Config.model_validate(raw)


async def own_agent(context: Any, request: Any) -> Rollout:
    """An agent that builds prompts with the tokenizer alone."""
    builder = RolloutBuilder()
    builder.add_context(context.tokenizer.encode("Hello", add_special_tokens=False))
    end = RolloutEnd.ANSWERED
    return builder.rollout(request, end, reward=0.0, error=None, seconds=0.0, limit=99)


async def careless_agent(context: Any, request: Any) -> Any:
    return context.chat.prompt_ids("Hello")


@pytest.mark.parametrize("controls", [CHATML, QWEN, LLAMA, DEEPSEEK, GLM, GEMMA])
def test_the_format_read_from_files_equals_the_tokenizers(tmp_path: Path, controls: tuple[str, ...]) -> None:
    """Login nodes read files; workers use transformers; both find the same tokens."""
    folder = model_of(tmp_path / "model", controls)
    made = tokenizer(controls)
    config = config_of(folder)
    if controls is GEMMA:
        for ask in (lambda: chat_format(config.model, made), lambda: chat_formats.check(config, folder)):
            with pytest.raises(ModelError, match=r"none of .* fits .*rollout\.custom_agent") as caught:
                ask()
            assert "\n" not in str(caught.value)
    else:
        assert chat_formats.check(config, folder) == chat_format(config.model, made).name
    assert {*chat_formats.CONTROL_TOKENS, chat_formats.TEMPLATE} == set(CHAT_FORMATS)


def test_a_chat_template_is_enough_for_other_models(tmp_path: Path) -> None:
    made = tokenizer(GEMMA, "{% for m in messages %}{{ m.content + '<end_of_turn>' }}{% endfor %}")
    made.save_pretrained(tmp_path)
    config = config_of(tmp_path)
    assert chat_formats.check(config, tmp_path) == chat_format(config.model, made).name == "template"


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_are_found_in_every_file_that_lists_them(tmp_path: Path, name: str) -> None:
    tokens = {token: 100 + i for i, token in enumerate(chat_formats.CONTROL_TOKENS["chatml"])}
    decoder = {str(i): {"content": token, "special": True} for token, i in tokens.items()}
    content = tokens if name == "added_tokens.json" else {"added_tokens_decoder": decoder}
    (tmp_path / name).write_text(json.dumps(content))
    assert chat_formats.check(config_of(tmp_path), tmp_path) == "chatml"


def test_nothing_is_refused_before_the_tokenizer_is_downloaded(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        assert "known once the tokenizer is downloaded" in chat_formats.check(config_of(tmp_path), folder)
    (tmp_path / "tokenizer.json").write_text("{damaged")
    assert "known once" in chat_formats.check(config_of(tmp_path), tmp_path)


def test_check_and_launch_refuse_an_unknown_format_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_of(tmp_path / "model", GEMMA)
    arguments = ["configs/tiny.yaml", f"model.path={folder}", f"run.root={tmp_path / 'runs'}"]
    assert main(["check", *arguments]) == EXIT_PREFLIGHT
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "chat format" in line)
    assert row.startswith("BAD  chat format: model.chat_format: none of chatml")
    assert row.endswith("no chat template; add one, or write a rollout.custom_agent")
    main(["check", *arguments, f"rollout.custom_agent={AGENT}"])
    assert "ok   chat format: rollout.custom_agent writes" in capsys.readouterr().out
    with pytest.raises(ModelError):
        run_local(load_config(arguments[0], arguments[1:]))
    assert not (tmp_path / "runs").exists()


def test_a_custom_agent_needs_no_chat_format(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", GEMMA)
    with pytest.raises(ModelError, match="none of"):
        load_agent(config_of(folder), str(folder))
    request = GroupRequest(9, Task("room", "train", 0), 1, Sampling(max_new_tokens=5), 5)
    rest: dict[str, Any] = {"environment": None, "generate": None}
    agent = load_agent(config_of(folder, custom_agent=AGENT), str(folder))
    found: Any = asyncio.run(agent.run(request, 0, **rest))  # type: ignore[arg-type]
    assert found.tokens_T.tolist() == tokenizer(GEMMA).encode("Hello", add_special_tokens=False)
    careless = config_of(folder, custom_agent=f"{__name__}:careless_agent")
    with pytest.raises(ModelError, match=r"uses context\.chat\.prompt_ids, but model\.chat_format: none"):
        asyncio.run(load_agent(careless, str(folder)).run(request, 0, **rest))  # type: ignore[arg-type]
