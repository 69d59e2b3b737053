"""``orhpc sync`` sends what trackers lack of a run that has ended, and nothing twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.commands import sync
from orhpc.commands.cli import main
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_FAILED
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from orhpc.tracking import __main__ as program
from tests.unit.tracking.kit import run_directory, write_steps
from tests.unit.tracking.test_tensorboard import rewards
from tests.unit.tracking.test_weights_and_biases import FakeWandb


@pytest.fixture
def ended(tmp_path: Path) -> RunDir:
    """A run without trackers, whose second attempt did step 3 again and finished."""
    rundir = run_directory(tmp_path)
    rundir.config.write_text(dump_config(load_config("configs/tiny.yaml", ["wandb.enabled=false"])))
    write_steps(rundir, 1, range(1, 4))
    write_steps(rundir, 2, range(3, 6), evaluated=True)
    log = EventLog(rundir.events, 2)
    log.write("finished", step=5)
    log.close()
    return rundir


@pytest.mark.slow
def test_tensorboard_is_filled_once(ended: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(ended.path)]) == 0
    assert "no tracker is enabled" in capfd.readouterr().out
    assert main(["sync", "--tensorboard", str(ended.path)]) == 0
    assert "TensorBoard: 8 rows sent" in capfd.readouterr().out  # 5 steps and 3 evaluations
    assert rewards(ended) == pytest.approx({1: 1.1, 2: 1.2, 3: 2.3, 4: 2.4, 5: 2.5})
    files = list((ended.path / "tensorboard").iterdir())
    assert main(["sync", "--tensorboard", str(ended.path)]) == 0
    assert "TensorBoard: has every row already" in capfd.readouterr().out
    assert list((ended.path / "tensorboard").iterdir()) == files


@pytest.mark.slow
def test_failures_are_one_line_each(
    ended: RunDir, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["sync", str(ended.path / "nothing")]) == 2
    assert main(["sync", str(ended.path), "--mlflow", "./here"]) == 2
    assert "is not http://HOST:PORT" in capfd.readouterr().err
    assert main(["sync", str(ended.path), "--mlflow", "http://127.0.0.1:9", "--tensorboard"]) == 3
    output = capfd.readouterr()
    assert "TensorBoard: 8 rows sent" in output.out
    (line,) = [line for line in output.err.splitlines() if "MLflow: failed" in line]
    assert str(ended.path) in line


@pytest.mark.slow
def test_a_password_in_mlflow_s_variable_is_neither_printed_nor_stored(
    ended: RunDir, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended.config.write_text(
        dump_config(load_config("configs/tiny.yaml", ["wandb.enabled=false", "mlflow.enabled=true"]))
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter22@127.0.0.1:9")
    assert main(["sync", str(ended.path)]) == 2
    output = capfd.readouterr()
    assert "MLFLOW_TRACKING_URI: uri contains a user name or a password" in output.err
    assert "hunter22" not in output.out + output.err


def test_a_run_that_runs_is_left_to_its_own_trackers(
    ended: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    ended.begin_attempt(kind="local")
    with ended.locked():
        assert main(["sync", "--tensorboard", str(ended.path)]) == 5
    assert "is running" in capfd.readouterr().err


@pytest.mark.slow
def test_offline_parts_of_wandb_become_one_run(
    ended: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attempts that logged offline have stored what they wrote, but the server has nothing of it."""
    ended.config.write_text(dump_config(load_config("configs/tiny.yaml", [])))
    (ended.path / "trackers").mkdir()
    (ended.path / "trackers/wandb.json").write_text('{"target": "offline", "step": 5, "evaluation": 5}')
    (ended.path / "wandb_id").write_text("abc123")
    fake = FakeWandb()
    started: list[dict[str, Any]] = []
    init = fake.init
    monkeypatch.setattr(fake, "init", lambda **words: (started.append(words), init())[1])
    monkeypatch.setattr(fake, "Table", lambda **_: None, raising=False)
    monkeypatch.setattr(fake, "Histogram", lambda values: None, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setattr(program, "protect_process", lambda *_: None)
    assert program.main([str(ended.path)]) == 3
    assert "WANDB_API_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert program.main([str(ended.path)]) == 0
    assert [step for step, _ in fake.rows] == [1, 2, 3, 3, 4, 4, 5, 5]
    assert fake.rows[2][1]["reward/reward_mean"] == 2.3
    (words,) = started
    assert (words["mode"], words["id"], words["resume"]) == ("online", "abc123", "allow")
    fake.rows.clear()
    assert program.main([str(ended.path)]) == 0
    assert fake.rows == []
    assert "W&B: has every row already" in capsys.readouterr().out


def test_a_tracker_that_was_killed_has_not_sent_all_rows(
    ended: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sync.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=-9))
    assert main(["sync", str(ended.path)]) == EXIT_FAILED
    assert "its trackers were ended by signal 9" in capsys.readouterr().err
