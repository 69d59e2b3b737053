"""``orhpc tune`` without a run: its made-up rollouts, its table and the config that it writes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.commands import cli, tune
from orhpc.commands.made_up_rollouts import write_made_up
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import ConfigError
from orhpc.models import shape_of
from orhpc.plan.workload import MEAN_LENGTH
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from orhpc.rundir.record import RolloutFile, read_step
from tests.model_configs import REAL, TINY

MOE = shape_of(REAL["Qwen3-30B-A3B"][0])


def config_of(*, routes: bool) -> Config:
    return Config.model_validate(
        {
            "train": {"global_batch_size": 256, "routing_replay": routes},
            "rollout": {
                "batch_size": 64, "n_samples": 4, "max_total_tokens": 400, "max_response_tokens": 300,
                "record_routes": routes,
            },
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )  # fmt: skip


@pytest.mark.slow
def test_made_up_rollouts_are_a_recorded_step_with_uneven_routes(tmp_path: Path) -> None:
    write_made_up(tmp_path, config_of(routes=True), MOE, 64)
    summaries = read_step(tmp_path / "step_1")
    assert [s.sample for s in summaries] == [0, 1, 2, 3] * 16
    lengths = [s.length for s in summaries]
    assert max(lengths) <= 400
    assert np.mean(lengths) == pytest.approx(400 * MEAN_LENGTH, rel=0.25)
    assert {s.reward for s in summaries} == {0.0, 1.0}
    with RolloutFile(str(summaries[0].location.file)) as record:
        routes = [record.routes(row) for row in range(len(record))]
        assert record.rollout(0).loss_mask_T[-1]
    whole = np.concatenate([each for each in routes if each is not None])
    assert whole.shape == (sum(lengths) - 64, len(MOE.layers), MOE.experts_per_token)
    counts = Counter(whole[:, 0].ravel().tolist())
    even = whole.shape[0] * MOE.experts_per_token / MOE.experts
    assert max(counts.values()) > 2 * even  # an even choice would stay within a fifth
    assert all(len(set(row)) == MOE.experts_per_token for row in whole[:200, 5].tolist())
    assert Counter(whole[:, 1].ravel().tolist()).most_common(1)[0][0] != counts.most_common(1)[0][0]


def tuned(tmp_path: Path, *events: dict[str, Any], room_gb: float | None = 70.0) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine-tune")
    run.create(access="private")
    run.config.write_text("{}")
    (tmp_path / "mine.yaml").write_text("extends: tiny.yaml\ntrain: {max_tokens_per_gpu: 512}\n")
    told = {
        "config": str(tmp_path / "mine.yaml"), "overrides": ["train.lr=0.5"], "samples": 400,
        "room_gb": room_gb,
    }  # fmt: skip
    (run.path / "tuning.json").write_text(json.dumps(told))
    log = EventLog(run.events, 1)
    for index, event in enumerate(events):
        log.write("candidate", index=index, **event)
    log.close()
    return run


def measured(seconds: float, peak: float, *overrides: str, optimizer: float = 0.0) -> dict[str, Any]:
    return {
        "settings": list(overrides), "seconds": seconds, "optimizer_seconds": optimizer, "samples": 100,
        "tokens": 1000, "micro_batches": 4, "tokens_per_s_per_rank": 1000 / seconds, "memory_peak_gb": peak,
        "start_seconds": 9.0,
    }  # fmt: skip


def test_the_fastest_that_leaves_memory_becomes_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faster = "train.max_tokens_per_gpu=2048"
    run = tuned(
        tmp_path,
        measured(4.0, 30.0),
        measured(2.0, 60.0, faster),
        measured(1.0, 75.0, "train.max_tokens_per_gpu=4096"),
        {"settings": ["megatron.tp=2"], "error": "OutOfMemory: no"},
    )
    assert tune.show(run, None) == 0
    shown = capsys.readouterr().out
    order = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")]
    assert order == [
        "settings",
        faster,
        "the config as it is",
        "train.max_tokens_per_gpu=4096",
        "megatron.tp=2",
    ]
    assert "leaves too little" in shown
    assert "OutOfMemory: no" in shown
    assert "2.00x of before" in shown
    assert (run.path / "tuning.md").read_text() in shown
    written = load_config("mine-tuned.yaml", ["run.name=x"])
    wanted = load_config("mine.yaml", ["train.lr=0.5", faster, "run.name=x"])
    assert written == wanted
    assert (tmp_path / "mine-tuned.yaml").read_text().splitlines()[1] == "extends: mine.yaml"


def test_an_optimizer_step_does_not_grow_with_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second computes a sample faster, but its optimizer step takes longer: 4 x 1 + 4 > 4 x 1.5 + 1."""
    monkeypatch.chdir(tmp_path)
    run = tuned(tmp_path, measured(2.5, 1.0, optimizer=1.0), measured(5.0, 1.0, "train.x=1", optimizer=4.0))
    assert tune.show(run, tmp_path / "out.yaml") == 0
    assert "train.x" not in (tmp_path / "out.yaml").read_text()


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tuned(tmp_path, measured(4.0, 30.0))
    own = tmp_path / "mine-tuned.yaml"
    own.write_text("train: {lr: 1}\n")
    with pytest.raises(ConfigError, match="-o FILE"):
        tune.show(run, None)
    assert own.read_text() == "train: {lr: 1}\n"
    own.unlink()
    assert [tune.show(run, None) for _ in range(2)] == [0, 0]  # that of a tuning is


@pytest.mark.parametrize("arguments", [["-o", "own.yaml"], []])
def test_a_file_of_the_user_is_refused_before_anything_is_measured(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / (arguments[-1] if arguments else "tiny-tuned.yaml")
    own.write_text("train: {lr: 1}\n")
    monkeypatch.setattr(tune, "attend", lambda *_: pytest.fail("the tuning was started"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY["llama"]))
    assert cli.main(["tune", *arguments, "--local", f"model.path={model}", "tiny.yaml"]) == 2
    assert "-o FILE" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_nothing_measured_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tuned(tmp_path, {"settings": [], "error": "InfraError: gone"})
    assert tune.show(run, tmp_path / "out.yaml") == 1
    assert "InfraError: gone" in capsys.readouterr().out
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--candidates", "0", "tiny.yaml"], "--candidates: 0 is not a positive number"),
        (["--updates", "-1", "tiny.yaml"], "--updates: -1 is not a positive number"),
        (["--local", "--no-wait", "tiny.yaml"], "--no-wait: --local runs in the foreground"),
        (["--table"], "--table: name one run directory"),
        (["--table", "."], "is not a run directory"),
        (["--rollouts", "nowhere", "tiny.yaml"], "nowhere"),
        (["-o", ".", "tiny.yaml"], "-o: . is a folder; name a file"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.backend=megatron", "megatron.tp=3"], "tp = 3 does not divide 4 attention heads"),
        (["engine.backend=sglang", "engine.tp=3"], "tp / dp = 3 does not divide 4 attention heads"),
    ],
)
def test_a_config_that_cannot_start_is_refused_before_anything_is_listed(
    settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY["llama"]))
    three = [f"model.path={tmp_path}", "placement.devices_per_node=3", "placement.device=cuda"]
    common = ["tune", "--dry-run", "tiny.yaml", *three, "engine.backend=sglang", *settings]
    assert cli.main(common) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""
