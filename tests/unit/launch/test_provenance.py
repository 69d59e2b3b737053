"""What an attempt ran: versions, the user's code with its changes, the machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.launch import prepare, provenance
from orhpc.process import secrets
from orhpc.rundir import RunDir

CONFIG = Path(__file__).parents[3] / "configs/tiny.yaml"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository with one commit, as the working folder."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "reward.py").write_text("def reward(): return 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    return folder


def begin(tmp_path: Path) -> Path:
    """The folder of an attempt that has just begun."""
    run = RunDir(tmp_path / "run")
    run.create()
    return run.attempt(prepare.begin_attempt(run, load_config(CONFIG), kind="local"))


def record(attempt: Path) -> dict:
    return json.loads((attempt / "provenance.json").read_text())


def test_an_unchanged_repository_is_named_by_its_commit(code: Path, tmp_path: Path) -> None:
    attempt = begin(tmp_path)
    found = record(attempt)
    head = git(code, "rev-parse", "HEAD").strip()
    assert found["code"] == {"folder": str(code), "commit": head, "changed": False}
    assert not (attempt / "code.diff").exists()
    assert found["packages"]["torch"]
    assert found["seed"] == 0
    assert (attempt / "provenance.json").stat().st_mode & 0o077 == 0


def test_changes_are_stored_so_that_the_code_can_be_made_again(code: Path, tmp_path: Path) -> None:
    (code / "reward.py").write_text("def reward(): return 2\n")
    (code / "new.py").write_text("x = 1\n")
    attempt = begin(tmp_path)
    assert record(attempt)["code"]["changed"] is True
    text = (attempt / "code.diff").read_text()
    assert "# not tracked by git: new.py" in text
    git(code, "checkout", "-q", "reward.py")
    subprocess.run(["git", "-C", str(code), "apply", str(attempt / "code.diff")], check=True)
    assert (code / "reward.py").read_text() == "def reward(): return 2\n"


def test_a_secret_in_the_changes_is_not_stored(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setattr(secrets, "_pattern", None)
    secrets.remember_secrets(["s3cr3t-v4lue-of-a-key"])
    (code / "reward.py").write_text("KEY = 's3cr3t-v4lue-of-a-key'\n")
    assert "s3cr3t" not in (begin(tmp_path) / "code.diff").read_text()


def test_a_large_difference_is_cut_off(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_MOST_DIFF", 500)
    (code / "reward.py").write_text("ü" * 2000 + "\n")
    text = (begin(tmp_path) / "code.diff").read_text()
    assert text.endswith("# cut off after 500 bytes\n")
    assert len(text.encode()) < 600


def test_no_program_of_the_repository_is_run(code: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    (code / ".gitattributes").write_text("*.py diff=mine\n")
    for key in ("core.fsmonitor", "diff.external", "diff.mine.textconv", "diff.mine.command"):
        git(code, "config", key, str(trap))
    (code / "reward.py").write_text("changed\n")
    begin(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("without", ["repository", "git"])
def test_a_start_needs_neither_a_repository_nor_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if without == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    found = record(begin(tmp_path))
    assert found["code"] == {"folder": str(tmp_path), "commit": None, "changed": False}


def test_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVIDIA H100 80GB HBM3, 81559, 580.159, 9.0"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{line}'\necho '{line}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    one = {"name": "NVIDIA H100 80GB HBM3", "memory": "81559 MiB", "driver": "580.159"}
    assert provenance.gpus() == [one, one]
