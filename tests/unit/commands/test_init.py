"""``orhpc init``: every example gives a project whose configs load and whose code is importable."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.commands.init import project
from orhpc.config.files import load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK
from orhpc.launch.checks import references

EXAMPLES = ("one_turn", "tools", "end_state")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_becomes_a_project(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "task"
    assert main(["init", str(folder), "--example", example]) == EXIT_OK
    assert "orhpc launch --local train.yaml" in capsys.readouterr().out
    wanted = {"environment.py", "reward.py", "train.yaml", "gpu.yaml", "train.sbatch", "README.md"}
    assert {p.name for p in folder.iterdir()} == wanted
    monkeypatch.chdir(folder)
    for name in ("train.yaml", "gpu.yaml"):
        config = load_config(name, ["rollout.custom_reward=reward:brief"])
        assert references.check(config, folder).startswith("reward:brief, environment:")
    assert "orhpc.examples" not in "".join((folder / name).read_text() for name in wanted)
    spec = importlib.util.spec_from_file_location("environment_of_the_project", folder / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_existing_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("mine")
    assert main(["init", str(tmp_path)]) == EXIT_CONFIG
    assert "reward.py exists already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["reward.py"]
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file" / "task")]) == EXIT_CONFIG
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_readme_s_commands_exist() -> None:
    """Every command of the project's README exists."""
    lines = [x.split("#")[0].split() for x in project("tools")["README.md"].splitlines()]
    commands = {parts[1] for parts in lines if parts[:1] == ["orhpc"]}
    assert {"try-env", "check", "launch", "status", "view", "export"} <= commands
    listed = subprocess.run(
        [sys.executable, "-m", "orhpc.commands.cli", "--help"], capture_output=True, text=True
    )
    for command in commands:
        assert re.search(rf"^ +{command}\b", listed.stdout, re.MULTILINE), command


def test_the_next_command_can_be_pasted_with_a_blank_in_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my task"
    assert main(["init", str(folder)]) == 0
    assert f"  cd '{folder}'\n" in capsys.readouterr().out
