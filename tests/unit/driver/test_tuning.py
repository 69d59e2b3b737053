"""What a run with ``tuning.candidates`` does when some of them fail, or when it is restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.commands.made_up_rollouts import write_made_up
from orhpc.config import Config
from orhpc.config.files import dump_config, load_config
from orhpc.driver import tuning
from orhpc.errors import OutOfMemory, StopRequested
from orhpc.models import shape_of
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events
from tests.model_configs import REAL

SMALLER, LARGER, WRONG, SLOW = "train.lr=0.1", "train.lr=0.2", "train.lr=-1", "train.lr=0.3"


class OneRun:
    """A run of the driver as far as :func:`orhpc.driver.tuning.tune` knows it."""

    def __init__(self, folder: Path, candidates: Sequence[Sequence[str]]) -> None:
        tree = {
            "train": {"global_batch_size": 8, "replay_rollouts": str(folder / "made-up")},
            "rollout": {"batch_size": 2, "n_samples": 4, "max_total_tokens": 64, "max_response_tokens": 32},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
            "tuning": {"candidates": [list(each) for each in candidates], "candidate_timeout_s": 0.5},
        }
        self.rundir, self.folder = RunDir(folder), folder
        (folder / "config.yaml").write_text(dump_config(Config.model_validate(tree)))
        self.config = load_config(folder / "config.yaml")
        write_made_up(folder / "made-up", self.config, shape_of(REAL["Llama-3.1-8B"][0]), 8)
        self.events = EventLog(self.rundir.events, 1)
        self.stopped = False

    def raise_if_stopped(self) -> None:
        if self.stopped:
            raise StopRequested("asked to stop")

    async def unless_stopped(self, work: Any) -> Any:
        return await work

    def tune(self) -> list[dict[str, Any]]:
        asyncio.run(tuning.tune(self))  # type: ignore[arg-type]
        return self.found()

    def found(self) -> list[dict[str, Any]]:
        return [e for e in read_events(self.rundir.events) if e["event"] == "candidate"]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rates that were measured; some fail."""
    rates: list[float] = []

    async def measure(run: object, config: Config, groups: Sequence[Any], advantages: Sequence[Any]) -> Any:
        assert [len(group.trainable) for group in groups] == [4, 4]
        assert [len(each) for each in advantages] == [4, 4]
        rates.append(config.train.lr)
        if config.train.lr == 0.2:
            raise OutOfMemory("no room\nfor it")
        if config.train.lr == 0.3:
            await asyncio.sleep(10)
        return {"seconds": config.train.lr}

    monkeypatch.setattr(tuning, "_measure", measure)
    return rates


@pytest.mark.slow
def test_a_candidate_that_fails_does_not_end_the_others(tmp_path: Path, tried: list[float]) -> None:
    found = OneRun(tmp_path, [[WRONG], [LARGER], [SLOW], [SMALLER]]).tune()
    assert tried == [0.2, 0.3, 0.1]
    assert "ConfigError" in found[0]["error"]
    assert found[1]["error"] == "OutOfMemory: no room for it"
    assert found[2]["error"] == "it took more than 0.5 s"
    assert found[3]["seconds"] == 0.1
    assert [e["settings"] for e in found] == [[WRONG], [LARGER], [SLOW], [SMALLER]]


def test_a_restart_goes_on_and_leaves_out_what_ended_the_run(tmp_path: Path, tried: list[float]) -> None:
    run = OneRun(tmp_path, [[], [LARGER], [SMALLER]])
    run.events.write("candidate_begun", index=0, settings=[])
    run.events.write("candidate", index=0, settings=[], seconds=1.0)
    run.events.write("candidate_begun", index=1, settings=[LARGER])
    found = run.tune()
    assert tried == [0.1]
    assert [e["index"] for e in found] == [0, 1, 2]
    assert found[1]["error"] == "it ended the run"


def test_a_stop_ends_it_between_candidates(tmp_path: Path, tried: list[float]) -> None:
    run = OneRun(tmp_path, [[], [SMALLER]])
    run.stopped = True
    with pytest.raises(StopRequested):
        run.tune()
    assert tried == []
    assert run.found() == []


def test_a_candidate_during_which_the_run_was_stopped_is_measured_later(
    tmp_path: Path, tried: list[float]
) -> None:
    """A preemption, or Ctrl-C, is not its fault; what ends the run without a stop still is."""
    run = OneRun(tmp_path, [[SMALLER], [LARGER]])

    async def stopped(*_: Any) -> Any:
        raise StopRequested("asked to stop")

    with pytest.MonkeyPatch.context() as patched, pytest.raises(StopRequested):
        patched.setattr(tuning, "_measure", stopped)
        run.tune()
    assert (tried, run.found()) == ([], [])
    run.events.write("candidate_begun", index=1, settings=[LARGER])
    found = run.tune()
    assert tried == [0.1]
    assert [each.get("error") for each in found] == [None, "it ended the run"]


def test_the_summary_counts_what_the_timed_updates_took() -> None:
    minibatch = SimpleNamespace(n_samples=6, ranks=((1, 2), (3,)))
    batch = SimpleNamespace(minibatches=(minibatch,), tokens=1200)
    config = SimpleNamespace(placement=SimpleNamespace(trainer_ranks=2))
    measured = [
        tuning._Measured(s, {"seconds_optimiser": s / 10, "memory_trainer_peak_gb": 7 - s}) for s in (3, 1, 2)
    ]
    found = tuning._summary(measured, batch, config)  # type: ignore[arg-type]
    assert (found["seconds"], found["seconds_min"], found["seconds_max"]) == (2, 1, 3)
    assert (found["optimizer_seconds"], found["tokens_per_s_per_rank"]) == (0.2, 300)
    assert (found["memory_peak_gb"], found["micro_batches"], found["samples"]) == (6, 2, 6)
