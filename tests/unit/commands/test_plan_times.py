"""``orhpc plan`` about times: which GPU, what an earlier run measured, and what it prints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from orhpc.commands.cli import main
from orhpc.commands.plan_measured import measured_times
from orhpc.config import Config
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK
from orhpc.launch.checks.card import card_of
from orhpc.plan.rollout_time import predict_rollout
from orhpc.plan.run_plan import make_plan
from orhpc.plan.speeds import CARDS
from orhpc.plan.workload import assumed_workload
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from tests.model_configs import REAL

TENSOR_PARALLEL = str(Path(__file__).parents[3] / "benchmarks/qwen3-30b-a3b-tensor-parallel.yaml")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(REAL["Qwen3-30B-A3B"][0]))
    return [TENSOR_PARALLEL, f"model.path={folder}", f"run.root={tmp_path / 'runs'}", "run.name=mine"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The lines about times, by their first word."""
    assert main(["plan", *arguments]) == EXIT_OK
    _, _, times = capsys.readouterr().out.partition("\nseconds of a step")
    head, *lines = times.splitlines()
    return {"head": head, **{line.split()[0]: line.strip() for line in lines}}


def seconds(line: str) -> float:
    return float(line.split()[1])


def test_phases_add_up_to_the_step_and_carry_their_errors(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, *words, "--device-memory", "139")
    assert "on H200 (by its 139 GiB; else --card): 512 rollouts of 1229 tokens, assumed" in lines["head"]
    phases = [seconds(lines[name]) for name in ("rollout", "update", "record")]
    sync = lines["sync:"]
    assert re.match(r"sync: 61\.06 GB, 114 buckets, 18867 tensors; each trainer rank gets 45\.01 GB", sync)
    total = seconds(lines["step"])
    assert 0 < total - sum(phases) < 10  # the sync, whose line comes before the one about its bytes
    for name in ("rollout", "update", "step"):
        assert re.search(r"measured within \d+% \(median \d+%\)", lines[name])
    assert lines["longest:"].startswith("longest: rollout")


def test_a_layout_that_was_never_measured_has_no_errors(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, *words, "--device-memory", "139", "--nodes", "2", "placement.devices_per_node=8")
    assert "within" not in "".join(lines.values())
    assert lines["errors"].endswith("never measured: 2 nodes")


def test_a_mean_length_can_be_given(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (
        shown(capsys, *words, "--device-memory", "139", "--rollout-tokens", str(n)) for n in (400, 1600)
    )
    assert "512 rollouts of 400 tokens;" in short["head"]
    assert 3 * seconds(short["update"]) < seconds(long["update"]) < 5 * seconds(short["update"])
    for wrong in ("0", "5000"):
        assert main(["plan", *words, "--rollout-tokens", wrong]) == EXIT_CONFIG
        assert "rollout.max_total_tokens" in capsys.readouterr().err


def test_unknown_gpus_have_no_times(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *words, "--device-memory", "139", "--card", "B200")
    assert lines["not"] == "not predicted: nothing was measured on b200 (H100 and H200 are)"
    assert "step" not in lines
    named = shown(capsys, *words, "--device-memory", "200", "--card", "H200")
    assert "on H200 (--card)" in named["head"]
    assert "the GPU is not known" in shown(capsys, *words, "--device-memory", "200")["not"]


# --- calibrated times -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_other_settings_calibrates_what_is_predicted(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own times over those that are predicted for it are the factors, by phase."""
    plain = shown(capsys, *words, "--device-memory", "139")
    other = "train.max_tokens_per_gpu=16384"
    own = shown(capsys, *words, other, "--device-memory", "139", "--rollout-tokens", "125")
    run = record(words, other, events=steps(1, 5, 9.0))
    lines = shown(capsys, *words, "--device-memory", "139")
    assert (
        lines["calibrated:"]
        == f"calibrated: measured over predicted times of {run.path}, median of steps 3 to 5"
    )
    assert "512 rollouts of 1229 tokens, assumed" in lines["head"]  # they are not those of the run
    factor = re.search(r"calibrated by (\d+\.\d\d);", lines["update"])
    assert factor is not None
    assert float(factor[1]) == pytest.approx(9.0 / seconds(own["update"]), rel=0.15)  # of other lengths
    assert seconds(lines["update"]) == pytest.approx(seconds(plain["update"]) * float(factor[1]), rel=0.02)
    assert "within" not in "".join(lines.values())
    phases = [seconds(lines[name]) for name in ("rollout", "update", "record")]
    assert seconds(lines["step"]) - sum(phases) > 0
    named = shown(capsys, *words, "run.name=new", "--device-memory", "139", "--calibrate", str(run.path))
    assert named["update"] == lines["update"]
    assert "calibrated:" not in shown(capsys, *words, "run.name=new", "--device-memory", "139")


@pytest.mark.slow
def test_what_cannot_calibrate_is_refused_if_it_was_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path) -> str:
        named = ["run.name=new", "--device-memory", "139", "--calibrate", str(folder)]
        assert main(["plan", *words, *named]) == EXIT_CONFIG
        return capsys.readouterr().err

    assert "is not a run directory" in refused(tmp_path)
    short = record(words, name="short", events=steps(1, 2, 9.0))
    assert "no steps after the first two" in refused(short.path)
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(REAL["Llama-3.1-8B"][0]))
    settings = ("rollout.record_routes=false", "train.routing_replay=false", "megatron.ep=1", "engine.ep=1")
    other = record(
        [words[0], f"model.path={dense}", words[2]], *settings, name="dense", events=steps(1, 4, 9.0)
    )
    assert "its model is dense" in refused(other.path)
    # The config's own run is left out without a word: it was not named.
    mine = shown(
        capsys, *words[:3], "run.name=short", "engine.max_running=8", "--device-memory", "139"
    )  # fmt: skip
    assert "calibrated:" not in mine


@pytest.mark.slow
def test_a_trainer_of_the_other_backend_does_not_calibrate_the_update(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fsdp = ("placement.devices_per_node=4", "engine.memory_fraction=0.8")
    record(["gpu-smollm2.yaml", *words[1:]], *fsdp, events=steps(1, 5, 9.0))
    lines = shown(capsys, *words, "--device-memory", "139")
    assert "calibrated by" in lines["rollout"]
    assert "calibrated by" not in lines["update"]


# --- measured times -------------------------------------------------------------------------------


def record(
    words: list[str], *more: str, name: str = "mine", events: list[tuple[str, dict[str, Any]]]
) -> RunDir:
    config = load_config(words[0], [*words[1:], *more, f"run.name={name}"])
    run = RunDir(Path(config.run.root) / name)
    run.create()
    run.config.write_text(dump_config(config))
    log = EventLog(run.events, attempt=1)
    for event, fields in events:
        log.write(event, **fields)
    log.close()
    return run


def steps(first: int, last: int, update: float) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for step in range(first, last + 1):
        slow = 100.0 if step <= 2 else 0.0
        phases = {"rollout": 7.0, "update": update + slow, "record": 0.3, "sync": 4.0, "checkpoint": 0.0}
        found.append(
            (
                "step",
                {
                    "step": step, "steps": 10, "seconds": sum(phases.values()), "phases": phases,
                    "response_tokens": 51200.0, "total_tokens": 64000.0, "response_length_mean": 100.0,
                    "response_length_max": 250.0, "expert_rank_max_vio": 0.5,
                },
            )
        )  # fmt: skip
    return found


def config_of(words: list[str], *more: str) -> Config:
    return load_config(words[0], [*words[1:], *more])


@pytest.mark.slow
def test_an_earlier_run_s_times_and_lengths_come_first(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(words, events=steps(1, 5, 9.0))
    lines = shown(capsys, *words, "--device-memory", "139")
    assert "512 rollouts of 125 tokens; longest answer 250" in lines["head"]
    assert re.match(r"update +9\.0  measured; predicted \d+\.\d$", lines["update"])
    assert re.match(r"step +20\.3  measured; predicted \d+\.\d$", lines["step"])
    assert lines["measured:"] == f"measured: {run.path}, median of steps 3 to 5"
    assert lines["longest:"].startswith("longest: update")
    unknown = shown(capsys, *words, "--device-memory", "139", "--card", "b200")
    assert unknown["update"] == "update       9.0  measured; not predicted"
    given = shown(capsys, *words, "--device-memory", "139", "--rollout-tokens", "1000")
    assert "512 rollouts of 1000 tokens;" in given["head"]


@pytest.mark.slow
def test_only_runs_of_the_same_settings_count(words: list[str]) -> None:
    record(words, "train.lr=1e-3", "train.steps=7", events=steps(1, 5, 9.0))
    found = measured_times(config_of(words))
    assert found is not None
    assert found.work is not None
    assert (found.step, found.work.excess) == (pytest.approx(20.3), 1.5)
    assert measured_times(config_of(words, "megatron.tp=1")) is None
    assert measured_times(config_of(words, "rollout.max_response_tokens=100")) is None
    assert measured_times(config_of(words, "run.name=other")) is None
    for slower in ("algorithm.use_kl_loss=true", "algorithm.advantage=ppo", "train.deterministic=true"):
        assert measured_times(config_of(words, slower)) is None


def test_a_log_with_incomplete_steps_is_not_used(words: list[str]) -> None:
    record(words, events=[("step", {"step": n}) for n in range(1, 5)])
    assert measured_times(config_of(words)) is None


def test_a_run_s_first_steps_do_not_count(words: list[str]) -> None:
    record(words, events=steps(1, 2, 9.0))
    assert measured_times(config_of(words)) is None


def test_a_run_whose_config_cannot_be_read_is_left_out(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(words, events=steps(1, 5, 9.0))
    run.config.write_text("modle: {}")
    assert main(["plan", *words, "--device-memory", "139"]) == EXIT_OK
    captured = capsys.readouterr()
    assert "measured within" in captured.out
    assert str(run.config) in captured.err
    assert captured.err.endswith("; its times are not used\n")


def test_a_tuning_has_measured_the_update(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"seconds": 5.0, "optimizer_seconds": 1.0, "samples": 128}
    events = [
        ("candidate", {"index": 0, "settings": [], **measured}),
        ("candidate", {"index": 1, "settings": ["megatron.tp=1"], **measured, "seconds": 2.0}),
    ]
    run = record(words, name="mine-tune", events=events)
    tuning = {"samples": 512, "config": TENSOR_PARALLEL, "overrides": []}
    (run.path / "tuning.json").write_text(json.dumps(tuning))
    lines = shown(capsys, *words, "--device-memory", "139")
    assert re.match(
        r"update +17\.0  measured; predicted", lines["update"]
    )  # 4 x 4 s, and the optimizer's one
    assert "within" in lines["rollout"]
    assert lines["measured:"] == f"measured: {run.path}, by orhpc tune"


# --- which GPU ------------------------------------------------------------------------------------


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """Put programs that print something at the front of PATH."""
    folder.mkdir()
    for name, text in answers.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\nprintf '{text}'\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_driver_names_the_gpu_unless_the_user_names_its_memory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path / "bin", monkeypatch, nvidia_smi="NVIDIA H100 80GB HBM3, 81559, 580.1, 9.0\\n" * 2)
    config = config_of(words)
    assert (card := card_of(config, 79.6, given=False)).name == "h100"
    assert card.source == "nvidia-smi"
    assert card_of(config, 139.0, given=True).name == "h200"
    of_config = config_of(words, "placement.device_memory_gib=139.8")
    assert card_of(of_config, 139.8, given=False).name == "h200"
    assert card_of(config, 100.0, given=True).name is None


def test_other_and_mixed_gpus_are_not_taken_for_known_ones(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(words)
    programs(tmp_path / "one", monkeypatch, nvidia_smi="NVIDIA RTX 6000 Ada Generation, 49140, 580.1, 8.9\\n")
    assert card_of(config, 48.0, given=False).name == "nvidia rtx 6000 ada generation"
    mixed = "NVIDIA H100, 81559, 580.1, 9.0\\nNVIDIA A100, 81920, 580.1, 8.0\\n"
    programs(tmp_path / "two", monkeypatch, nvidia_smi=mixed, sinfo="gpu:a100:4\\n")
    assert card_of(config, 48.0, given=False).name == "a100"


def test_a_phase_that_is_not_predicted_may_be_the_longest(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["placement.nodes=4", "placement.devices_per_node=8", "megatron.ep=8"]
    unknown = ["algorithm.advantage=ppo", *nodes, "--device-memory", "139"]
    told = shown(capsys, *words, *unknown)
    assert "not predicted" in told["update"] and "longest:" not in told
    assert told["longest"].startswith("longest of what is known: rollout")


def test_no_time_is_predicted_of_engines_that_cannot_hold_a_rollout(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, "--device-memory", "139", "engine.memory_fraction=0.2"]) == EXIT_CONFIG
    told = capsys.readouterr()
    assert (
        "rollout        -  not predicted: the KV cache has no room for a rollout of full length" in told.out
    )
    assert "leaves 0 tokens of KV cache" in told.err


@pytest.mark.slow
def test_each_group_of_data_parallel_attention_has_a_cache(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang gives each group other requests, so that an engine holds as many as all its groups."""
    eight = [
        "placement.devices_per_node=8", "placement.device_memory_gib=139", "engine.tp=8", "megatron.ep=8",
        "rollout.max_total_tokens=32768", "megatron.tp=8",
    ]  # fmt: skip
    groups = [*eight, "engine.ep=8", "engine.dp=8", "engine.trusted_network=true"]
    whole = make_plan(load_config(words[0], [*words[1:], *eight]), 139)
    run = make_plan(load_config(words[0], [*words[1:], *groups]), 139)
    assert run.kv_tokens is not None and whole.kv_tokens is not None
    assert run.kv_tokens * 3 < whole.kv_tokens  # all key-value heads on every GPU, and more weights
    assert run.rollouts_at_once(32768) == 8 * (run.kv_tokens // 32768)
    work = assumed_workload(run.config)
    kept = 8 * int(run.kv_tokens // (work.prompt + work.response / 2))
    time = predict_rollout(run, CARDS["h200"], work, 0.0, 0.0)
    assert time.concurrent == min(run.config.engine.max_running, work.rollouts, kept)
    assert main(["plan", *words, *groups]) == EXIT_OK
    assert f"{run.kv_tokens} tokens in each of 8 attention groups" in capsys.readouterr().out
