"""The costs of a run's restarts by its events, and what the command prints from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orhpc.commands.cli import main
from orhpc.commands.recovery_costs import NOTICE_S, QUEUE_S, measure
from orhpc.commands.simulate import nodes_of, parsed_cost
from orhpc.commands.simulate_check import measured, planned, simulated_time
from orhpc.config.faults import Fault
from orhpc.config.files import dump_config, load_config
from orhpc.errors import ConfigError
from orhpc.plan.failures import Costs, Scope
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events

TINY = "configs/tiny.yaml"


class Story:
    """A run of ten steps of 10 s (update 4 s, every second one waits 1 s for a commit), in its events."""

    def __init__(self, folder: Path, *faults: str) -> None:
        self.run = RunDir(folder / "run")
        self.run.create()
        words = [f"faults.inject={json.dumps(faults)}", "run.name=run", "train.steps=10"]
        self.config = load_config(TINY, words)
        self.run.config.write_text(dump_config(self.config))
        self.clock, self.attempt = 1000.0, 0
        self.events: list[dict[str, Any]] = []

    def say(self, event: str, after: float = 0.0, **fields: Any) -> None:
        self.clock += after
        self.events.append({"event": event, "time": self.clock, "attempt": self.attempt, **fields})
        self.run.events.write_text("".join(json.dumps(e) + "\n" for e in self.events))

    def begin(self, queued: float = 0.0, **facts: Any) -> None:
        self.clock += queued
        self.attempt += 1
        assert self.run.begin_attempt(script_started=self.clock, **facts) == self.attempt

    def ready(self, seconds: float, step: int) -> None:
        self.say("bring_up", step=step)
        self.say("ready", seconds, step=step, seconds=seconds, phases={})

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            wait = 1.0 if number % 2 == 0 else 0.0
            phases = {"rollout": 6.0, "update": 4.0, "checkpoint": wait}
            self.say("step", 10.0 + wait, step=number, steps=10, seconds=10.0 + wait, phases=phases)
            if wait:
                self.say("commit", step=number, seconds=1.0, bytes=1)


def whole(folder: Path) -> Story:
    """A run with each kind of restart."""
    story = Story(folder, "trainer_killed@4:0", "engine_killed@6:0", "node_lost@8:0")
    story.begin(chain="7")
    story.ready(50.0, 0)
    story.steps(1, 3)
    story.say("fault_injected", 6.0, fault="trainer_killed@4:0", step=4)
    story.say("trainers_restarted", 22.0, step=3, seconds=20.0, during="update")
    story.steps(4, 5)
    story.say("fault_injected", 1.0, fault="engine_killed@6:0", step=6)
    story.say("engines_ended", 2.0, engines=[0])
    story.say("engines_restarted", 35.0, engines=[0], seconds=33.0)
    story.steps(6, 7)
    story.say("fault_injected", 1.0, fault="node_lost@8:0", step=8)
    story.begin(queued=120.0, chain="7")
    story.ready(70.0, 6)
    story.steps(7, 8)
    story.say("restart", 1.0, kind="RayLost", error="gone")
    story.ready(40.0, 8)
    story.steps(9, 10)
    return story


def test_costs_are_those_of_the_events(tmp_path: Path) -> None:
    story = whole(tmp_path)
    costs = measure(story.run, story.config).costs
    assert (costs.step_s, costs.update_s, costs.interval) == (10.0, 4.0, 2)
    assert costs.commit_s == pytest.approx(1.0, rel=0.5)  # by the share of steps that commit
    assert (costs.trainers_s, costs.engine_s, costs.in_place_s) == (20.0, 33.0, 40.0)
    assert (costs.start_s, costs.queue_s, costs.notice_s) == (60.0, 120.0, 2.0)


def test_what_never_happened_is_taken_from_the_next_larger_restart(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.begin()
    story.ready(50.0, 0)
    with pytest.raises(ConfigError, match="0 undisturbed steps"):
        measure(story.run, story.config)
    story.steps(1, 10)
    found = measure(story.run, story.config)
    costs = found.costs
    assert costs.trainers_s == costs.engine_s == costs.in_place_s == costs.start_s == 50.0
    assert (costs.notice_s, costs.queue_s) == (NOTICE_S, QUEUE_S)
    assert found.sources["queue_s"] == "assumed"
    assert found.sources["trainers_s"].startswith("not measured")
    assert found.with_cost("queue_s", 60.0).costs.queue_s == 60.0


@pytest.mark.slow
def test_the_command_prints_costs_shares_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = whole(tmp_path)
    assert main(["simulate", str(story.run.path), "--nodes", "4,512", "--cost", "queue=3600"]) == 0
    told = capsys.readouterr().out
    assert "wait in the queue 3600 s as you say" in " ".join(told.split())
    rows = [line.split("|")[1:-1] for line in told.splitlines() if line.startswith(("| 4 ", "| 512"))]
    shares = [[float(cell.strip().rstrip("%")) for cell in row[2:]] for row in rows if len(row) == 5]
    assert all(row == sorted(row) for row in shares) and shares[1][0] < shares[0][0]
    assert "--spares" in told
    assert main(["simulate", str(story.run.path), "--check", str(story.run.path)]) == 0
    assert "10 steps with 3 faults took" in capsys.readouterr().out


def test_the_time_simulated_for_the_faults_of_a_run_is_its_time(tmp_path: Path) -> None:
    story = whole(tmp_path)
    steps = [e for e in story.events if e["event"] == "step"]
    seconds, count = measured(story.run, story.config, read_events(story.run.events))
    assert (seconds, count) == (steps[-1]["time"] - 1050.0, 10)
    restarted_in_place_s = 41.0  # is no injected fault
    simulated = simulated_time(measure(story.run, story.config).costs, story.config, 10)
    assert simulated.total_s == pytest.approx(seconds - restarted_in_place_s, rel=0.15)


def test_a_killed_driver_costs_a_restart_in_place_and_no_wait_in_the_queue(tmp_path: Path) -> None:
    assert planned(Fault.parse("driver_killed@4")).scope is Scope.IN_PLACE
    costs = Costs(10.0, 4.0, 1.0, 2, 2.0, 33.0, 20.0, 40.0, 60.0, 9000.0)
    simulated = simulated_time(costs, Story(tmp_path, "driver_killed@4").config, 10)
    assert (simulated.queue_s, simulated.new_jobs, simulated.restarts_s) == (0.0, 0, 42.0)


@pytest.mark.parametrize("text", ["queue", "queue=x", "queue=-1", "que=3", "step=0", "interval=1.5", "=3"])
def test_a_wrong_cost_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--cost"):
        parsed_cost(text)


@pytest.mark.parametrize("text", ["", "0", "4,", "8 9", "-1", "1000000"])
def test_wrong_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        nodes_of(text)


def test_a_run_without_a_fault_that_is_simulated_is_refused(tmp_path: Path) -> None:
    costs = Costs(10, 4, 1, 2, 1, 1, 1, 1, 1, 1)
    with pytest.raises(ConfigError, match="none of these faults"):
        simulated_time(costs, Story(tmp_path, "disk_full@3").config, 10)
    with pytest.raises(ConfigError, match="none of these faults"):
        simulated_time(costs, Story(tmp_path / "other").config, 10)


@pytest.mark.slow
def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = whole(tmp_path)
    for words in (
        ["--node-share", "2"], ["--days", "-1"], ["--days", "0"], ["--failures", "nan"], ["--spares", "-2"],
        ["--failures", "1e5", "--nodes", "8,100000"], ["--nodes", "0"], ["--cost", "step=3"],
        ["--cost", "update=11"],
    ):  # fmt: skip
        assert main(["simulate", str(story.run.path), *words]) == 2
        told = capsys.readouterr()
        assert words[0] in told.err and told.err.count("\n") == 1
        assert told.out == ""
    assert main(["simulate", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("ready", "after", "said"),
    [(False, 10.0, "do not say when an attempt was ready"), (True, 0.0, "its steps took no time")],
)
def test_an_incomplete_log_is_refused_in_one_line(
    ready: bool, after: float, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story(tmp_path)
    story.begin()
    if ready:
        story.ready(50.0, 0)
    story.say("trainers_restarted")
    for number in range(1, 5):
        story.say("step", after, step=number)
    assert main(["simulate", str(story.run.path)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
