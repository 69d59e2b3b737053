"""Fixtures of several folders: a tiny model and its ranks, a known secret, replaced commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orhpc.process import secrets
from orhpc.train.actor import TrainerRank
from tests.hostile import CANARY
from tests.trainer_kit import ranks_of, save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama."""
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make(folder: str) -> Iterator[Callable[..., TrainerRank]]:
    """Makes connected, built ranks of a one-rank trainer, one at a time; takes ``make_config``'s options."""
    with ranks_of(folder) as start:
        yield start


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the canary as a secret that this process has read."""
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setattr(secrets, "_pattern", None)
    monkeypatch.setenv("MY_KEY", CANARY)
    secrets.resolve_secrets({}, {"my_key": None})


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for replacements of SLURM's commands, first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
