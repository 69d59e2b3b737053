"""The table of a drill, from events; and the drill that a config becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orhpc.commands.cli import main
from orhpc.commands.drill import USUAL, drill_overrides, random_overrides
from orhpc.commands.drill_table import BACK, Recovery, recoveries, table
from orhpc.config import Config
from orhpc.config.files import dump_config, load_config
from orhpc.errors import ConfigError
from orhpc.rundir import RunDir

TINY = "configs/tiny.yaml"


def events(*lines: tuple[float, str, dict[str, Any]], attempt: int = 1) -> list[dict[str, Any]]:
    return [{"event": kind, "time": time, "attempt": attempt, **fields} for time, kind, fields in lines]


def fault(text: str) -> dict[str, Any]:
    return {"fault": text, "step": int(text.partition("@")[2].partition(":")[0])}


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"step": number, **fields}


def made(tmp_path: Path, *faults: str, lines: list[dict[str, Any]]) -> tuple[RunDir, Config]:
    """A run directory with these events, of a run with 16 rollouts a step and commits every two steps."""
    run = RunDir(tmp_path / "run")
    run.create()
    config = load_config(TINY, [f"faults.inject={json.dumps(faults)}", "run.name=run"])
    run.config.write_text(dump_config(config))
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run, config


def test_faults_that_cost_no_attempt(tmp_path: Path) -> None:
    """Restarts of trainers and of an engine, whose events come when they are over; and a skipped update."""
    faults = ("trainer_killed@2:1", "engine_killed@3:0", "nan_gradient@4:0")
    lines = events(
        (100.0, "step", step(1)),
        (101.0, "fault_injected", fault(faults[0])),
        (114.0, "trainers_restarted", {"step": 1, "seconds": 12.0}),
        (115.0, "step", step(2)),
        (116.0, "fault_injected", fault(faults[1])),
        (118.0, "engines_ended", {"engines": [0]}),
        (126.0, "engines_restarted", {"engines": [0], "seconds": 7.0}),
        (127.0, "step", step(3, retried_rollouts=2, failed_rollouts=1)),
        (128.0, "fault_injected", fault(faults[2])),
        (129.0, "step", step(4, skipped=1.0, non_finite=1.0)),
        (130.0, "step", step(5)),
    )
    run, config = made(tmp_path, *faults, lines=lines)
    assert recoveries(run, config, 60.0) == [
        Recovery(faults[0], 1.0, 14.0, 0, 0, "trainers", BACK),
        Recovery(faults[1], 2.0, 11.0, 0, 3, "engine 0", BACK),
        Recovery(faults[2], 1.0, 1.0, 0, 16, "nothing; update skipped", BACK),
    ]


def test_a_worker_that_restarts_after_the_run_has_gone_on(tmp_path: Path) -> None:
    """Its end is noticed at once; the step that another worker made counts."""
    lines = events(
        (100.0, "step", step(1)),
        (101.0, "fault_injected", fault("worker_killed@2:0")),
        (101.5, "worker_ended", {"worker": 0, "node": "n1", "error": "the actor died"}),
        (102.0, "step", step(2)),
        (106.5, "worker_restarted", {"worker": 0, "node": "n1", "seconds": 5.0}),
        (107.0, "step", step(3)),
    )
    run, config = made(tmp_path, "worker_killed@2:0", lines=lines)
    assert recoveries(run, config, 60.0) == [Recovery("worker_killed@2:0", 0.5, 1.0, 0, 0, "worker 0", BACK)]


def test_a_worker_that_ended_with_all_other_parts_is_not_named(tmp_path: Path) -> None:
    lines = events(
        (100.0, "step", step(1)),
        (101.0, "fault_injected", fault("raylet_killed@2:0")),
        (101.5, "worker_ended", {"worker": 0, "node": "n1", "error": "the actor died"}),
        (102.0, "restart", {"kind": "RayLost", "error": "the actor died", "exit_code": 75}),
        (110.0, "bring_up", {"step": 1, "commit": None}),
        (112.0, "step", step(2)),
    )
    run, config = made(tmp_path, "raylet_killed@2:0", lines=lines)
    assert recoveries(run, config, 60.0)[0].restarted == "all parts in place"


def test_a_lost_node_that_a_spare_replaced(tmp_path: Path) -> None:
    """The attempt goes on from the commit of step 2."""
    lost = {
        "error": "n1: its launcher ended; n3 takes its place",
        "lost": "n1",
        "spare": "n3",
        "seconds": 6.0,
    }
    lines = events(
        (100.0, "bring_up", step(0)),
        (101.0, "step", step(1)), (102.0, "step", step(2)), (103.0, "step", step(3)),
        (104.0, "fault_injected", fault("node_lost@4:0")),
        (110.5, "node_replaced", lost),
        (140.0, "bring_up", step(2)),
        (141.0, "step", step(3)), (142.0, "step", step(4)),
    )  # fmt: skip
    run, config = made(tmp_path, "node_lost@4:0", lines=lines)
    assert recoveries(run, config, 60.0) == [
        Recovery("node_lost@4:0", 6.5, 38.0, 1, 16, "all parts in place, n3 for n1", BACK)
    ]


def test_a_fault_that_ends_the_attempt(tmp_path: Path) -> None:
    """The next attempt continues from the commit of step 2, of three that were made."""
    faults = ("node_lost@4:0", "disk_full@9")
    first = events(
        (100.0, "bring_up", step(0)),
        (101.0, "step", step(1)), (102.0, "step", step(2)), (103.0, "step", step(3)),
        (104.0, "fault_injected", fault(faults[0])),
    )  # fmt: skip
    second = events(
        (140.0, "bring_up", step(2)), (145.0, "step", step(3)), (146.5, "step", step(4)), attempt=2
    )
    run, config = made(tmp_path, *faults, lines=[*first, *second])
    for number, began in ((1, 99.0), (2, 124.0)):
        run.begin_attempt(script_started=began)
        assert run.attempt_metadata(number)["script_started"] == began
    rows = recoveries(run, config, 60.0)
    assert rows[0] == Recovery(faults[0], 20.0, 42.5, 1, 16, "the job", BACK)
    assert (rows[1].fault, rows[1].verdict) == (faults[1], "was not injected")
    (late,) = [row for row in recoveries(run, config, 40.0) if row.fault == faults[0]]
    assert late.verdict == "came back after more than 40 s"


def test_a_step_that_a_preempted_run_finishes_is_no_return(tmp_path: Path) -> None:
    faults = ("preemption@2",)
    first = events(
        (100.0, "bring_up", step(0)), (101.0, "step", step(1)),
        (101.5, "fault_injected", fault(faults[0])),
        (102.0, "step", step(2)), (102.5, "commit", {"step": 2}), (103.0, "stopped", {"step": 2}),
    )  # fmt: skip
    second = events((140.0, "bring_up", step(2)), (150.0, "step", step(3)), attempt=2)
    run, config = made(tmp_path, *faults, lines=[*first, *second])
    for began in (99.0, 130.0):
        run.begin_attempt(script_started=began)
    (row,) = recoveries(run, config, 60.0)
    assert row == Recovery(faults[0], 1.5, 48.5, 0, 0, "the job", BACK)


def test_the_command_fails_if_a_fault_was_not_recovered_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = events((100.0, "step", step(1)), (101.0, "fault_injected", fault("trainer_hang@2:0")))
    run, _ = made(tmp_path, "trainer_hang@2:0", lines=lines)
    assert main(["drill", "--table", str(run.path)]) == 1
    told = capsys.readouterr().out
    assert "| trainer_hang@2:0 | -" in told
    assert "did not come back" in told
    assert (run.path / "drill.md").read_text() == told


def test_columns_are_aligned() -> None:
    rows = [Recovery("disk_full@3", 0.5, 1234.0, 0, 0, "nothing", BACK)]
    assert len({len(line) for line in table(rows).splitlines()}) == 1


def test_a_config_becomes_a_short_run_under_a_name_of_its_own() -> None:
    own = ["run.name=mine", "wandb.enabled=true", "checkpoint.save_interval=null"]
    config = load_config(TINY, drill_overrides(TINY, own, None, 3))
    assert config.run.name == "mine-drill"
    assert not config.wandb.enabled
    assert config.checkpoint.save_interval == 2
    steps = [fault.step for fault in config.faults.parsed]
    assert steps == list(range(3, config.train.steps, 3))
    assert config.train.steps == steps[-1] + 3
    last = load_config(TINY, drill_overrides(TINY, [], "trainer_killed,engine_hang:0,disk_full", 2))
    assert last.faults.inject == ["trainer_killed@3:1", "engine_hang@5:0", "disk_full@7"]


def test_faults_that_do_not_apply_are_left_out_or_refused() -> None:
    elsewhere = ["environments.orhpc/letters.serve=null", "environments.orhpc/letters.url=http://localhost:1"]
    config = load_config(TINY, drill_overrides(TINY, elsewhere, None, 3))
    assert not [text for text in config.faults.inject if text.startswith("environment")]
    for faults, says in (("trainer_kiled", "did you mean trainer_killed"), (" , ", "names no fault")):
        with pytest.raises(ConfigError, match=f"--faults: .*{says}"):
            drill_overrides(TINY, [], faults, 3)


def test_a_drill_starts_nothing_while_faults_are_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORHPC_FAULT", "disk_full@3")
    assert main(["drill", TINY, "--local"]) == 2
    assert "unset the variable" in capsys.readouterr().err
    monkeypatch.delenv("ORHPC_FAULT")
    assert main(["drill", TINY, "--local", "--dry-run", "--faults", "disk_full"]) == 0
    assert "disk_full@3" in capsys.readouterr().out


@pytest.mark.parametrize("within", ["0", "-1", "nan"])
def test_a_limit_that_is_no_time_is_refused(within: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", TINY, "--dry-run", "--within", within]) == 2
    assert f"--within: {within} is not a positive number" in capsys.readouterr().err


@pytest.mark.slow
def test_random_faults_are_those_of_their_seed_and_in_steps_of_their_own() -> None:
    def drawn(seed: int, faults: str | None = None) -> Config:
        return load_config(
            TINY, random_overrides(TINY, ["checkpoint.save_interval=5"], faults, 40, 200, seed)
        )

    config = drawn(7)
    assert config.faults.inject == drawn(7).faults.inject != drawn(8).faults.inject
    assert (config.train.steps, config.checkpoint.save_interval) == (200, 5)
    steps = [fault.step for fault in config.faults.parsed]
    assert len(set(steps)) == 40 and min(steps) >= 3 and max(steps) < 200
    assert {fault.kind for fault in config.faults.parsed} == set(USUAL)
    ranks = {fault.index for fault in drawn(1, "trainer_killed").faults.parsed}
    assert ranks == {0, 1}
    assert {fault.index for fault in drawn(1, "trainer_killed:1").faults.parsed} == {1}
    with pytest.raises(ConfigError, match="at least 43 steps"):
        random_overrides(TINY, [], None, 40, 42, 0)
