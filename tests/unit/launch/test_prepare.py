"""Config changes at a start: they are allowed freely only before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import ConfigError, PreflightError
from orhpc.launch import prepare, task_files
from orhpc.launch.prepare import check_versions, write_config
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "x")
    rundir.create()
    return rundir


def config(**sections: object) -> Config:
    return Config.model_validate(
        {"environments": {"e": {"serve": "letters"}}, "run": {"name": "x"}} | sections
    )


@pytest.mark.slow
def test_a_run_without_a_step_accepts_a_changed_config_and_discards_its_rollouts(run: RunDir) -> None:
    assert write_config(run, config()) == []
    events = EventLog(run.events, run.begin_attempt())
    events.write("evaluation", step=0)
    (run.buffer / "group_3.h5").write_bytes(b"rolled out under the old settings")
    assert write_config(run, config(train={"adam_beta1": 0.8})) == ["train.adam_beta1: 0.9 -> 0.8"]
    assert load_config(run.config).train.adam_beta1 == 0.8
    assert not list(run.buffer.iterdir())
    run.config.write_text("train: {a_setting_of_another_release: 1}")
    assert write_config(run, config()) == []
    assert load_config(run.config) == config()


@pytest.mark.parametrize("how", ["event", "commit"])
def test_a_run_with_a_step_refuses_changes_of_its_identity(run: RunDir, how: str) -> None:
    write_config(run, config())
    attempt = run.begin_attempt()
    if how == "event":
        EventLog(run.events, attempt).write("step", step=1)
    else:
        run.record_start(attempt, None)
        (run.checkpoints / f"step_1.a{attempt:03d}").mkdir()
    (run.buffer / "group_3.h5").write_bytes(b"kept")
    with pytest.raises(ConfigError, match=r"train\.adam_beta1: the run was started with 0\.9"):
        write_config(run, config(train={"adam_beta1": 0.8}))
    assert write_config(run, config(train={"lr": 1e-6})) == ["train.lr: 1e-05 -> 1e-06"]
    assert (run.buffer / "group_3.h5").exists()
    run.config.write_text("train: {a_setting_of_another_release: 1}")
    with pytest.raises(ConfigError, match="a_setting_of_another_release"):
        write_config(run, config())


def test_versions_with_known_security_holes_are_refused() -> None:
    check_versions({"ray": "2.60", "no-such-package": "1"})
    with pytest.raises(PreflightError, match=r"ray [\d.]+: versions before 999"):
        check_versions({"ray": "999"})


def test_a_run_is_finished_only_with_its_last_evaluation(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop may have come between the last step and its evaluation."""
    monkeypatch.setattr(prepare, "committed_step", lambda rundir: 4)
    evaluated = config(train={"steps": 4}, evaluation={"interval": 2, "splits": {"e": ["test"]}})
    assert prepare.is_finished(run, config(train={"steps": 4}))
    assert not prepare.is_finished(run, evaluated)
    log = EventLog(run.events, run.begin_attempt(kind="local"))
    for name in ("step", "evaluation"):
        assert not prepare.is_finished(run, evaluated)
        log.write(name, step=4)
    assert prepare.is_finished(run, evaluated)
    log.write("step", step=4)  # made again after a loss
    assert not prepare.is_finished(run, evaluated)
    log.close()


@pytest.mark.slow
def test_prompts_are_read_again_only_before_the_first_step(run: RunDir, tmp_path: Path) -> None:
    """The user corrects the rows that failed, and repeats the command."""
    source, copy = tmp_path / "rows.jsonl", run.data_of("e") / "train.jsonl"
    prompts = config(environments={"e": {"data": {"path": str(source), "verifier": "exact"}}})
    for begun, text, wanted in ((False, "one", "one"), (False, "three", "three"), (True, "two", "three")):
        if begun:
            EventLog(run.events, run.begin_attempt()).write("step", step=1)
        (run.buffer / "group_0.h5").write_bytes(b"")
        source.write_text(f'{{"prompt": "{text}", "label": "1"}}\n')
        task_files.ensure(prompts, run)
        assert wanted in copy.read_text()
    assert (run.buffer / "group_0.h5").exists()
    source.unlink()
    task_files.ensure(prompts, run)
    assert "three" in copy.read_text()


@pytest.mark.parametrize("path", ["rows.jsonl", "data/rows.jsonl", "data/rows.parquet"])
def test_prompts_that_do_not_exist_are_refused_before_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = config(environments={"e": {"data": {"path": {"train": path}}}})
    with pytest.raises(ConfigError, match=rf"^environments\.e\.data\.path: {path}: no such file or folder"):
        prepare.check_paths(missing)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("")
    assert prepare.check_paths(missing) == path
    on_the_hub = config(environments={"e": {"data": {"path": "openai/gsm8k:train"}}})
    assert prepare.check_paths(on_the_hub) == "openai/gsm8k:train"
