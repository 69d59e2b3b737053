"""The documentation: it builds without a warning, and its examples are accepted by the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.config.flags import FLAGS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guide").glob("*.md")])
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[Any]:
    """Every code block of a language, with its page and line as the test's id."""
    for page in PAGES:
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            if found[1] == language:
                line = text[: found.start()].count("\n") + 2
                yield pytest.param(found[2], id=f"{page.relative_to(ROOT)}:{line}")


def test_every_setting_and_command_is_in_the_reference(tmp_path: Path) -> None:
    """The program fails if a setting has no description, or a command no help."""
    program = [sys.executable, str(ROOT / "docs/generate.py"), str(tmp_path)]
    subprocess.run(program, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    documented = (tmp_path / "commands.md").read_text()
    commands = re.findall(r"^ {4}(\w[\w-]*)(?: {2}|$)", help_of(""), re.MULTILINE)
    assert len(commands) > 15
    assert [command for command in commands if f"## orhpc {command}\n" not in documented] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    result = subprocess.run([*command, ROOT / "docs", tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    settings = (tmp_path / "reference/settings.html").read_text()
    assert all(
        f">{name}<" in settings for name in ("train.lr", "rollout.n_samples", "environments.NAME.serve")
    )


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_example_is_a_config(text: str, tmp_path: Path) -> None:
    """Merged into the defaults, with an environment and a model where the example has none."""
    tree = yaml.safe_load(text)
    assert isinstance(tree, dict)
    missing = (
        {} if "environments" in tree else {"environments": {"orhpc/letters": {"serve": "orhpc/letters"}}}
    )
    tree.setdefault("extends", "base.yaml")
    (tmp_path / "example.yaml").write_text(yaml.safe_dump({**missing, **tree}))
    assert isinstance(load_config(tmp_path / "example.yaml"), Config)


def commands() -> Iterator[Any]:
    for block in blocks("console"):
        for line in block.values[0].splitlines():
            if line.startswith("$ ") and re.search(r"\borhpc\b", line):
                yield pytest.param(line[2:], id=f"{block.id} {line[2:40]}")


HELP: dict[str, str] = {}


def help_of(command: str) -> str:
    if command not in HELP:
        program = [sys.executable, "-m", "orhpc.commands.cli", *([command] if command else []), "--help"]
        HELP[command] = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return HELP[command]


@pytest.mark.parametrize("line", commands())
def test_a_command_of_an_example_and_its_options_exist(line: str) -> None:
    for part in re.split(r"&&|\|(?!\|)|;", line.split(" #")[0]):
        words = shlex.split(part)
        if words[:3] == ["python", "-m", "orhpc.launch"]:
            words = ["orhpc", "launch", *words[3:]]
        if not words or words[0] != "orhpc":
            continue
        command = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
        shown = help_of(command)
        for option in (word.split("=")[0] for word in words[1:] if word.startswith("-")):
            known = option in shown or option in FLAGS or option in ("--", "--config")
            assert known or option.startswith("--sglang-"), f"{option} is not an option of: {line}"
