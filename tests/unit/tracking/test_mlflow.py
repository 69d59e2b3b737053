"""MLflow: all attempts are one run; a server that is away costs no row.

MLflow's client and store are the real ones; the store is a folder.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from orhpc.config.files import leaves, load_config
from orhpc.errors import ConfigError
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events
from orhpc.rundir.record import record_path, write_rollouts
from orhpc.rundir.trained import TrainedRollout, write_trained
from orhpc.tracking import Tracker
from orhpc.tracking.details import DetailsReader
from orhpc.tracking.feed import Feed
from orhpc.tracking.mlflow import Mlflow
from tests.unit.tracking.kit import reward_of, rollout, run_directory, write_steps

pytestmark = pytest.mark.slow

OVERRIDES = ["wandb.enabled=false", "mlflow.enabled=true", "mlflow.experiment=trial"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/server")
    return MlflowClient(tracking_uri=f"file://{tmp_path}/server")


def attempt(rundir: RunDir, number: int, steps: range, end: str) -> None:
    own = Tracker(load_config("configs/tiny.yaml", OVERRIDES), rundir)
    own.catch_up(steps.start - 1)
    write_steps(rundir, number, steps, evaluated=True)
    for event in read_events(rundir.events):
        if event["attempt"] == number:
            own.log(event)
    log = EventLog(rundir.events, number)
    log.write(end, step=steps.stop - 1, **({"error": "x"} if end == "failed" else {}))
    log.close()
    own.alert("rollout_kl is high")
    own.close()


def only_run(store: MlflowClient) -> Run:
    experiment = store.get_experiment_by_name("trial")
    assert experiment is not None
    (run,) = store.search_runs([experiment.experiment_id])
    return run


def test_two_attempts_are_one_run_with_rows_tables_and_histograms(
    store: MlflowClient, tmp_path: Path
) -> None:
    rundir = run_directory(tmp_path)
    attempt(rundir, 1, range(1, 4), "stopped")
    assert only_run(store).info.status == "KILLED"
    attempt(rundir, 2, range(4, 6), "finished")
    run = only_run(store)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tiny"
    assert run.data.params["train.lr"] == "0.003"
    assert run.data.tags["orhpc.last_alert"] == "rollout_kl is high"
    points = store.get_metric_history(run.info.run_id, "reward/reward_mean")
    assert [(p.step, p.value) for p in points] == [(s, reward_of(1 if s <= 3 else 2, s)) for s in range(1, 6)]
    assert points[0].timestamp == int(read_events(rundir.events)[0]["time"] * 1000)
    assert len(store.get_metric_history(run.info.run_id, "eval/reward_mean/letters/test")) == 5
    assert run.data.metrics["reward/rewards_p50"] == 3.5
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    table = json.loads((folder / "samples/step_000005.json").read_text())
    assert table["columns"][3:5] == ["reward", "advantage"]
    assert [row[3] for row in table["data"]] == [0.0, 2.0, 5.0, 7.0]
    assert {"path": "samples/step_000005.json", "type": "table"} in json.loads(
        run.data.tags["mlflow.loggedArtifacts"]
    )
    counted = json.loads((folder / "histograms/step_000002.json").read_text())
    assert sum(counted["mismatch/logprob_diffs"]["counts"]) == 24


def test_a_server_that_is_away_costs_a_notice_and_no_row(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = run_directory(tmp_path)
    problems: list[str] = []
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        own = Tracker(load_config("configs/tiny.yaml", OVERRIDES), rundir, problems.append)
        own.catch_up(0)
        write_steps(rundir, 1, range(1, 4))
        for event in read_events(rundir.events):
            own.log(event)
        own.close(60)
    (line,) = problems
    assert line.startswith("MLflow does not work: ")
    attempt(rundir, 2, range(4, 5), "finished")
    points = store.get_metric_history(only_run(store).info.run_id, "reward/reward_mean")
    assert [p.step for p in points] == [1, 2, 3, 4]


def test_a_run_that_is_deleted_on_the_server_is_replaced_by_one_with_all_rows(
    store: MlflowClient, tmp_path: Path
) -> None:
    """During an attempt, which knows which rows the deleted run had."""
    rundir, config = run_directory(tmp_path), load_config("configs/tiny.yaml", OVERRIDES)
    feed = Feed(Mlflow(config, rundir), rundir, DetailsReader(rundir, config.tracking))
    write_steps(rundir, 1, range(1, 4))
    assert feed.sync() == 3
    old = only_run(store).info.run_id
    store.delete_run(old)
    write_steps(rundir, 1, range(4, 6))
    with pytest.raises(MlflowException):
        feed.sync()
    feed.drop()
    assert feed.sync() == 5
    run = only_run(store)
    assert run.info.run_id != old
    points = store.get_metric_history(run.info.run_id, "reward/reward_mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("messages", [[{"role": "assistant", "content": "x"}], ["no dictionary"]])
def test_a_record_that_cannot_be_drawn_costs_no_row(
    store: MlflowClient, tmp_path: Path, messages: list[Any]
) -> None:
    """Infinite log-probabilities, or what a user's agent wrote; the rows after it would wait forever."""
    rundir = run_directory(tmp_path)
    write_steps(rundir, 1, range(1, 4))
    odd = replace(rollout(2, 0), messages=messages)
    write_rollouts(record_path(rundir.rollouts_of(2), 1, 0), [odd], trained=[odd.id])
    computed = TrainedRollout(1.0, np.full(6, -np.inf, np.float32))
    write_trained(rundir.rollouts_of(2), {odd.id: computed})
    problems: list[str] = []
    own = Tracker(load_config("configs/tiny.yaml", OVERRIDES), rundir, problems.append)
    own.catch_up(3)
    own.close()
    assert problems == []
    points = store.get_metric_history(only_run(store).info.run_id, "reward/reward_mean")
    assert [point.step for point in points] == [1, 2, 3]


def test_settings_that_a_server_refused_are_written_by_the_next_attempt(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has been created by then, and is found again."""
    rundir = run_directory(tmp_path)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("the server went away")

    with monkeypatch.context() as away:
        away.setattr(MlflowClient, "log_batch", refused)
        attempt(rundir, 1, range(1, 2), "stopped")
    attempt(rundir, 2, range(2, 3), "finished")
    run = only_run(store)
    assert run.data.params["train.lr"] == "0.003"
    assert [p.step for p in store.get_metric_history(run.info.run_id, "reward/reward_mean")] == [1, 2]


def test_settings_of_which_a_server_took_only_some_are_completed(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more than one call takes."""
    rundir, config = run_directory(tmp_path), load_config("configs/tiny.yaml", OVERRIDES)
    log_batch, calls = MlflowClient.log_batch, iter(range(99))

    def first_only(self: MlflowClient, *arguments: Any, **values: Any) -> None:
        if next(calls) > 0:
            raise OSError("the server went away")
        log_batch(self, *arguments, **values)

    with monkeypatch.context() as away:
        away.setattr(MlflowClient, "log_batch", first_only)
        with pytest.raises(OSError, match="went away"):
            Mlflow(config, rundir).open()
    assert len(only_run(store).data.params) == 100
    Mlflow(config, rundir).open()
    assert len(only_run(store).data.params) == len(dict(leaves(config.model_dump(mode="json"))))


def test_the_config_s_token_comes_before_a_user_name_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow itself prefers the name and its password."""
    got: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(self.headers.get("Authorization"))
            self.send_error(403)

    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "")  # restored afterwards
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a password")
    monkeypatch.setenv("MY_TOKEN", "a token")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"mlflow.uri=http://127.0.0.1:{server.server_port}"
        config = load_config("configs/tiny.yaml", [*OVERRIDES, uri, "mlflow.token=env:MY_TOKEN"])
        with pytest.raises(MlflowException):
            Mlflow(config, run_directory(tmp_path)).open()
        server.shutdown()
    assert set(got) == {"Bearer a token"}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mlflow.uri=http://me:secret@host", "user name or a password"),
        ("mlflow.uri=./mlruns", "is not http://HOST:PORT"),
        ("mlflow.token=abc123", "must be null, env:NAME or file:PATH"),
        ("mlflow.experiment='a/b'", "is not a name"),
        ("tracking.samples=101", "less than or equal to 100"),
        ("tracking.interval=0", "greater than 0"),
    ],
)
def test_wrong_settings_are_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config("configs/tiny.yaml", [setting])
    assert "secret@" not in str(caught.value)
