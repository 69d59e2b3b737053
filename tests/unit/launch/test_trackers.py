"""A tracker that cannot work is one line and exit code 2 before the queue; a server that is away is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.config.files import load_config
from orhpc.errors import ConfigError
from orhpc.launch.checks import internet, trackers

CONFIG = str(Path(__file__).parents[3] / "configs/tiny.yaml")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else find(n, *a))
    settings = [f"{name}.enabled=true", f"run.root={tmp_path}", "mlflow.uri=http://127.0.0.1:9"]
    assert main(["launch", "--local", CONFIG, *settings]) == 2
    line = capsys.readouterr().err.strip()
    assert line == f"orhpc: {name}.enabled: the package is missing; pip install 'orhpc[{name}]'"
    assert list(tmp_path.iterdir()) == []
    elsewhere = load_config(CONFIG, [*settings, "slurm.python=/opt/python"])
    assert trackers.check(elsewhere).endswith(name)


def test_mlflow_needs_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(CONFIG, ["mlflow.enabled=true"])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="name a tracking server"):
        trackers.check(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:pass@host")
    with pytest.raises(ConfigError, match="user name or a password") as caught:
        trackers.check(config)
    assert "pass@" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://host/mlflow")
    assert trackers.check(config) == "wandb, mlflow"


def test_servers_that_are_away_do_not_refuse_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "http://127.0.0.1:9/s3cr3t")
    settings = ["mlflow.enabled=true", "mlflow.uri=http://127.0.0.1:9", "notify.webhook=env:HOOK"]
    found = internet.survey(load_config(CONFIG, settings))
    assert "orhpc sync" in found.line
    assert "no messages are sent" in found.line
    assert "s3cr3t" not in found.line
