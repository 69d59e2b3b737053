"""TensorBoard shows each step once, whatever happened to the attempts that wrote it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from orhpc.config.files import load_config
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from orhpc.tracking import Tracker
from tests.unit.tracking.kit import reward_of, run_directory, write_steps

OVERRIDES = ["wandb.enabled=false", "tensorboard.enabled=true"]


def tracker(rundir: RunDir, problems: list[str] | None = None) -> Tracker:
    found: list[str] = [] if problems is None else problems
    return Tracker(load_config("configs/tiny.yaml", OVERRIDES), rundir, found.append)


def shown(rundir: RunDir) -> EventAccumulator:
    """What TensorBoard itself reads."""
    return EventAccumulator(str(rundir.path / "tensorboard")).Reload()


def rewards(rundir: RunDir) -> dict[int, float]:
    points = shown(rundir).Tensors("reward/reward_mean")
    values = {p.step: float(tensor_util.make_ndarray(p.tensor_proto)) for p in points}
    assert len(values) == len(points)
    return values


def attempt(rundir: RunDir, number: int, steps: range) -> None:
    """One attempt, as the driver drives its tracker."""
    own = tracker(rundir)
    own.catch_up(steps.start - 1)
    write_steps(rundir, number, steps, evaluated=True)
    for event in read_events(rundir.events):
        if event["attempt"] == number:
            own.log(event)
    own.close()


def test_rows_tables_and_histograms_are_shown(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path)
    attempt(rundir, 1, range(1, 4))
    assert rewards(rundir) == pytest.approx({s: reward_of(1, s) for s in (1, 2, 3)})
    found = shown(rundir)
    tags = set(found.Tags()["tensors"])
    assert {"eval/reward_mean/letters/test", "phase/update", "perf/seconds", "samples"} <= tags
    histograms = {"reward/rewards", "train/advantages", "rollout/response_lengths", "mismatch/logprob_diffs"}
    assert histograms <= tags
    text = tensor_util.make_ndarray(found.Tensors("samples")[0].tensor_proto).item()
    lines = text.decode().splitlines()
    assert len(lines) == 2 + 4
    assert "| 0 | -3.5 |" in lines[2]  # the lowest reward first
    assert "user: question \\| 0 | assistant: answer 0<br>in two lines |" in lines[2]
    counts = tensor_util.make_ndarray(found.Tensors("mismatch/logprob_diffs")[0].tensor_proto)
    assert counts[:, 2].sum() == 8 * 3  # the sampled tokens of all rollouts
    assert counts[0, 0] <= 0.5 <= counts[-1, 1]
    assert found.Tensors("reward/reward_mean")[0].wall_time == read_events(rundir.events)[0]["time"]


@pytest.mark.slow
def test_steps_that_were_lost_and_done_again_are_shown_once(tmp_path: Path) -> None:
    """The first attempt is killed after step 5; the second one resumes from step 3."""
    rundir = run_directory(tmp_path)
    attempt(rundir, 1, range(1, 6))
    attempt(rundir, 2, range(4, 7))
    expected = {s: reward_of(1 if s <= 3 else 2, s) for s in range(1, 7)}
    assert rewards(rundir) == pytest.approx(expected)


@pytest.mark.slow
def test_a_killed_attempt_s_rows_are_written_by_the_next(tmp_path: Path) -> None:
    """A real SIGKILL after two rows; the events of steps 3 and 4 never reached the tracker."""
    rundir = run_directory(tmp_path)
    write_steps(rundir, 1, range(1, 5))
    program = f"""
        import os, signal, time
        from tests.unit.tracking.test_tensorboard import *
        rundir = RunDir({str(rundir.path)!r})
        marks = rundir.path / "trackers/tensorboard.json"
        own = tracker(rundir)
        own.catch_up(0)
        for event in read_events(rundir.events)[:2]:
            own.log(event)
        while not marks.exists() or '"step": 2' not in marks.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=Path.cwd(), timeout=60)
    assert ended.returncode == -9
    assert sorted(rewards(rundir)) == [1, 2]
    attempt(rundir, 2, range(5, 6))
    assert sorted(rewards(rundir)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_folder_that_was_removed_is_filled_again(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path)
    attempt(rundir, 1, range(1, 4))
    for path in (rundir.path / "tensorboard").iterdir():
        path.unlink()
    attempt(rundir, 2, range(4, 5))
    assert sorted(rewards(rundir)) == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_is_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place is taken by a file at first; the rows are written once it is gone."""
    monkeypatch.setattr("orhpc.tracking.tracker._RETRY_S", 0.2)
    rundir = run_directory(tmp_path)
    (rundir.path / "tensorboard").write_text("")
    problems: list[str] = []
    own = tracker(rundir, problems)
    own.catch_up(0)
    write_steps(rundir, 1, range(1, 3))
    events = read_events(rundir.events)
    own.log(events[0])
    while not problems:
        pass
    (rundir.path / "tensorboard").unlink()
    own.log(events[1])
    own.close()
    (line,) = problems
    assert line.startswith("TensorBoard does not work: ")
    assert sorted(rewards(rundir)) == [1, 2]


def test_details_can_be_switched_off_or_thinned_out(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path)
    write_steps(rundir, 1, range(1, 7))
    config = load_config("configs/tiny.yaml", [*OVERRIDES, "tracking.interval=3", "tracking.samples=0"])
    own = Tracker(config, rundir)
    own.catch_up(6)
    own.close()
    found = shown(rundir)
    assert "samples" not in found.Tags()["tensors"]
    assert [p.step for p in found.Tensors("reward/rewards")] == [3, 6]
    assert len(found.Tensors("reward/reward_mean")) == 6
