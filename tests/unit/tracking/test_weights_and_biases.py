"""Weights & Biases: a killed attempt's rows are written by the next; no failure of it reaches the run."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import tracemalloc
import types
from pathlib import Path
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events, steps_of
from orhpc.tracking import Tracker, weights_and_biases
from orhpc.tracking.rows import row_of

PHASES = {"rollout": 1.0, "update": 0.5}


class FakeWandb(types.ModuleType):
    """The calls that the tracker uses; each can be made to fail or to hang."""

    def __init__(self, failing: str = "", starting_step: int = 0) -> None:
        super().__init__("wandb")
        self.failing, self.starting_step = failing, starting_step
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.alerts: list[str] = []
        self.calls: list[str] = []
        self.gate = threading.Event()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.failing == f"{name} hangs":
            self.gate.wait(30)
        elif self.failing == name:
            raise OSError(f"{name}: network is unreachable")

    Settings = staticmethod(lambda **_: None)

    def init(self, **_: Any) -> FakeWandb:
        self._call("init")
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self._call("log")
        self.rows.append((step, row))

    def alert(self, title: str, text: str, wait_duration: int) -> None:
        self._call("alert")
        self.alerts.append(text)

    def finish(self) -> None:
        self._call("finish")


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    return rundir


def tracker(
    rundir: RunDir, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, problems: list[str] | None = None
) -> Tracker:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = load_config("configs/tiny.yaml", ["wandb.enabled=true"])
    return Tracker(config, rundir, ([] if problems is None else problems).append)


def step_event(step: int, reward: float, event: str = "step") -> dict[str, Any]:
    return {"event": event, "step": step, "time": 1.0, "reward_mean": reward}


def attempt(rundir: RunDir, number: int, steps: range) -> None:
    log = EventLog(rundir.events, number)
    for step in steps:
        log.write("step", step=step, steps=9, seconds=2.0, phases=PHASES, reward_mean=step / 10,
                  rollout_kl=float("nan"))  # fmt: skip
    log.write("evaluation", step=steps[-1], seconds=1.0, **{"reward_mean/letters/test": 0.5})
    log.close()


def test_the_next_attempt_writes_the_rows_of_a_killed_one(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 1 and 2 were completely written, steps 3 and 4 committed by a killed attempt, step 5 lost."""
    fake = FakeWandb()
    first = tracker(rundir, fake, monkeypatch)
    for step in (1, 2):
        first.log(step_event(step, step / 10))
    first.log(step_event(2, 0.5, "evaluation"))
    first.close()
    attempt(rundir, 1, range(1, 3))
    attempt(rundir, 2, range(3, 6))
    fake.rows.clear()
    last = tracker(rundir, fake, monkeypatch)
    last.catch_up(4)
    last.log(step_event(5, 0.55))
    last.log(step_event(5, 0.5, "evaluation"))
    last.close()
    assert [step for step, _ in fake.rows] == [3, 4, 5, 5]
    event = steps_of(read_events(rundir.events))[3]
    assert fake.rows[0][1] == pytest.approx(row_of(event), nan_ok=True)
    again = tracker(rundir, fake, monkeypatch)
    fake.rows.clear()
    again.catch_up(5)
    again.close()
    assert fake.rows == []


def test_rows_on_the_server_are_not_sent_again(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb(starting_step=4)  # its newest row is 3
    attempt(rundir, 1, range(1, 6))
    own = tracker(rundir, fake, monkeypatch)
    own.catch_up(5)
    own.close()
    assert [step for step, _ in fake.rows] == [4, 5, 5]
    assert fake.rows[2][1]["eval/reward_mean/letters/test"] == 0.5


@pytest.mark.parametrize(("starting_step", "shown_at"), [(0, 3), (4, 4), (6, 3)])
def test_an_evaluation_of_the_step_at_which_the_last_attempt_was_stopped_is_kept(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, starting_step: int, shown_at: int
) -> None:
    """W&B refuses rows of a step that an earlier attempt has stored: here step 3, or steps done again."""
    fake = FakeWandb(starting_step=starting_step)
    log = EventLog(rundir.events, 1)
    for step in range(1, 4):
        log.write("step", step=step, steps=9, seconds=2.0, phases=PHASES, reward_mean=0.5)
    log.close()
    own = tracker(rundir, fake, monkeypatch)
    own.catch_up(3)
    own.log(step_event(3, 0.5, "evaluation"))
    own.log(step_event(4, 0.5))
    own.close()
    assert [step for step, row in fake.rows if "eval/reward_mean" in row] == [shown_at]


def test_rows_of_a_long_run_do_not_fill_the_driver_s_memory(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt looks for rows that a tracker lacks, in the driver; of 100,000 steps that took 2 GB."""
    line = step_event(1, 0.5) | {"attempt": 1, **{f"metric_{i}": i / 7 for i in range(100)}}
    rundir.events.write_text("".join(f"{json.dumps(line | {'step': step})}\n" for step in range(1, 1001)))
    fake = FakeWandb(starting_step=1000)
    own = tracker(rundir, fake, monkeypatch)
    tracemalloc.start()
    own.catch_up(1000)
    own.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [step for step, _ in fake.rows] == [1000]
    assert peak < rundir.events.stat().st_size / 2


def test_a_row_has_the_event_s_values(rundir: RunDir) -> None:
    attempt(rundir, 1, range(1, 2))
    step, evaluation = (row_of(event) for event in read_events(rundir.events))
    assert math.isnan(step.pop("mismatch/rollout_kl"))
    assert step == {
        "reward/reward_mean": 0.1, "perf/seconds": 2.0, "phase/rollout": 1.0, "phase/update": 0.5,
    }  # fmt: skip
    assert evaluation == {"eval/reward_mean/letters/test": 0.5}


@pytest.mark.parametrize("failing", ["init", "log", "alert", "finish"])
def test_no_failure_of_wandb_reaches_the_caller(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    fake = FakeWandb(failing)
    attempt(rundir, 1, range(1, 3))
    problems: list[str] = []
    own = tracker(rundir, fake, monkeypatch, problems)
    own.catch_up(2)
    own.log(step_event(3, 1.0))
    own.alert("rollout_kl is high")
    own.close(10)
    assert failing in fake.calls
    (output,) = problems
    assert "network is unreachable" in output and "\n" not in output
    if failing == "alert":
        assert [step for step, _ in fake.rows] == [1, 2, 2, 3]
    if failing == "log":
        assert fake.alerts == ["rollout_kl is high"]


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["init hangs", "log hangs", "finish hangs"])
def test_an_unreachable_network_does_not_delay_the_run(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr("orhpc.tracking.tracker._QUEUE", 4)
    fake = FakeWandb(failing)
    own = tracker(rundir, fake, monkeypatch)
    began = time.monotonic()
    for step in range(1, 20):
        own.log(step_event(step, 1.0))
    assert time.monotonic() - began < 1.0
    if failing != "finish hangs":
        assert own.dropped > 0
    own.close(0.2)
    assert time.monotonic() - began < 3.0
    fake.gate.set()


def test_the_run_works_without_wandb_installed(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    problems: list[str] = []
    own = Tracker(load_config("configs/tiny.yaml", ["wandb.enabled=true"]), rundir, problems.append)
    own.log(step_event(1, 1.0))
    own.close(10)
    (line,) = problems
    assert line.startswith("W&B does not work: ")
    assert "orhpc sync" in line


def test_all_trackers_get_the_same_id(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks for it in its own thread; another id would continue another run in the next attempt."""
    write, delays = weights_and_biases.write_atomic, iter((0.1, 0.3))

    def slow(path: Path, text: str) -> None:
        time.sleep(next(delays))
        write(path, text)

    monkeypatch.setattr(weights_and_biases, "write_atomic", slow)
    ids: list[str] = []
    threads = [
        threading.Thread(target=lambda: ids.append(weights_and_biases.run_id(rundir))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 1


@pytest.mark.parametrize(
    ("mode", "started"),
    [("disabled", []), ("offline", ["offline"]), ("dryrun", ["offline"]), ("online", ["online"])],
)
def test_wandb_s_own_switch_counts(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, mode: str, started: list[str]
) -> None:
    fake, modes = FakeWandb(), list[str]()
    init = fake.init
    monkeypatch.setattr(fake, "init", lambda **words: (modes.append(words["mode"]), init())[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_MODE", mode)
    own = Tracker(load_config("configs/tiny.yaml", ["wandb.enabled=true"]), rundir)
    own.log(step_event(1, 0.5))
    own.close()
    assert modes == started
    assert len(fake.rows) == len(started)


@pytest.mark.slow
def test_an_unreachable_server_leaves_the_data_in_the_run_directory(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real W&B, with a key and a server that refuses connections."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("orhpc.tracking.weights_and_biases._START_S", 5.0)
    problems: list[str] = []
    own = Tracker(load_config("configs/tiny.yaml", ["wandb.enabled=true"]), rundir, problems.append)
    own.log(step_event(1, 0.25))
    own.close(60)
    (data,) = rundir.path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"reward_mean" in data.read_bytes()
    (line,) = problems
    assert line.startswith("W&B does not answer")
    assert "orhpc sync" in line
