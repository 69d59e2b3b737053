"""The run, step and commit of weights, over several runs that continue one another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.launch import prepare
from orhpc.rundir import RunDir
from orhpc.rundir.event_lines import start_of
from orhpc.rundir.origin import (
    FILE,
    describe,
    origin_of_commit,
    origin_of_load,
    origin_of_model,
    provenance,
    write_origin,
)


def run_with_commit(folder: Path, name: str, step: int, *overrides: str) -> tuple[RunDir, Path]:
    """A run with one attempt and a commit's folder."""
    run = RunDir(folder / name)
    run.create()
    attempt = prepare.begin_attempt(run, load_config("configs/tiny.yaml", overrides), kind="local")
    commit = run.checkpoints / f"step_{step}.a{attempt:03d}"
    commit.mkdir()
    run.record_start(attempt, None)
    return run, commit


def test_a_chain_of_runs_is_recorded(tmp_path: Path) -> None:
    """The second run loads the first one's commit; the third one's model is an export of the second."""
    first, _ = run_with_commit(tmp_path, "first", 4)
    assert provenance(first, 1)["origin"] is None
    second, second_commit = run_with_commit(tmp_path, "second", 7, f"checkpoint.load={first.path}")
    found = provenance(second, 1)["origin"]
    assert (found["run"], found["step"], found["commit"]) == ("first", 4, "step_4.a001")
    assert found["directory"] == str(first.path)
    assert found["code"] == provenance(first, 1)["code"]
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    write_origin(second_commit, export)
    third, _ = run_with_commit(tmp_path, "third", 1, f"model.path={export}")
    found = provenance(third, 1)["origin"]
    assert (found["run"], found["step"], found["commit"]) == ("second", 7, "step_7.a001")
    assert found["origin"]["run"] == "first"
    assert found["orhpc"]["version"]


def test_a_resume_keeps_what_the_first_attempt_recorded(tmp_path: Path) -> None:
    """The other run goes on, or is removed, between two attempts."""
    first, _ = run_with_commit(tmp_path, "first", 4)
    second, _ = run_with_commit(tmp_path, "second", 2, f"checkpoint.load={first.path}")
    (first.checkpoints / "step_6.a001").mkdir()
    config = load_config("configs/tiny.yaml", [f"checkpoint.load={first.path}"])
    assert prepare.begin_attempt(second, config, kind="local") == 2
    assert provenance(second, 2)["origin"]["step"] == 4
    assert origin_of_load(first.path)["step"] == 6  # type: ignore[index]


def test_folders_that_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "step_3.a001").mkdir()
    copied = origin_of_commit(tmp_path / "step_3.a001")
    assert copied is not None
    assert (copied["run"], copied["step"]) == (None, 3)
    assert describe(copied) == "step 3 (commit step_3.a001)"
    assert origin_of_commit(tmp_path) is None
    assert origin_of_model(tmp_path) is None
    for text in ("", "[]", '{"step": "4", "commit": "step_4.a001"}', "\xff" * 3, "[" * 10_000):
        (tmp_path / FILE).write_text(text)
        assert origin_of_model(tmp_path) is None


def test_an_export_of_an_export_names_only_the_newest(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"step": 1, "commit": "step_1.a001"}))
    (tmp_path / "no commit").mkdir()
    write_origin(tmp_path / "no commit", tmp_path)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"commit": "step_2.a001", "origin": "x"}, "commit step_2.a001"),
        ({"load": "/r/a/step_4.a001", "origin": "x"}, "the weights of /r/a/step_4.a001"),
        ({"origin": "step 4 of run a"}, "the base model, an export of step 4 of run a"),
        ({}, "the base model"),
    ],
)
def test_the_line_of_a_start(event: dict, line: str) -> None:
    assert start_of(event) == line
