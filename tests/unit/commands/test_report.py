"""The report page and the alarms, computed from events alone."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orhpc.commands.cli import main
from orhpc.commands.report import CHARTS, Chart, draw, goodput, page
from orhpc.config.alarms import AlarmSettings, raised_alarms
from orhpc.launch.slurm import ledger
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two attempts: three steps, one of them twice, an alarm and a restart."""
    run = RunDir(tmp_path / "my run")
    run.path.mkdir()
    run.config.write_text("run: {name: <b>x</b>}\n")
    for attempt, steps in ((1, (1, 2)), (2, (2, 3))):
        run.attempt(attempt).mkdir(parents=True)
        log = EventLog(run.events, attempt)
        for step in steps:
            log.write("step", step=step, steps=3, seconds=1.5, phases={"rollout": 1.0, "update": 0.5},
                      reward_mean=0.1 * step, rollout_kl=math.nan if step == 1 else 1e-4)  # fmt: skip
        log.write("alarm", step=steps[-1], reason="rollout_kl 0.2 is above 0.01")
        log.write("restart", kind="RayLost", error="<script>alert(1)</script>", exit_code=75)
        log.close()
    ledger.write(run, ledger.Outcome(1, ledger.Reason.PREEMPTED, 0))
    return run


def test_the_page_shows_steps_attempts_alarms_and_escapes_what_others_wrote(run: RunDir) -> None:
    text = page(run)
    assert "<script>" not in text
    assert "<b>x</b>" not in text
    assert "3 of 3" in text
    assert "preempted" in text
    assert "rollout_kl 0.2 is above 0.01" in text
    assert "my run" in text
    for svg in re.findall(r"<svg.*?</svg>", text):
        ET.fromstring(svg)
    assert text.count("<svg") == sum(bool(draw(c, read_events(run.events))) for c in CHARTS)
    assert not re.search(r"(src|href)=", text)  # nothing is loaded from anywhere


def test_the_command_writes_the_page_and_refuses_other_folders(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run.path)]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text() == page(run)
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("{}\n")
    assert "No step is done yet" in page(run)


@example([3.8e293], True)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20), st.booleans())
def test_every_point_lies_inside_the_chart(values: list[float], log_scale: bool) -> None:
    steps = [
        {"step": i, "loss": v if math.isfinite(v) and abs(v) < 1e300 else str(v)}
        for i, v in enumerate(values)
    ]
    figure = draw(Chart("Loss", ("loss",), log_scale), steps)
    for points in re.findall(r'points="([^"]*)"', figure):
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 460
            assert 0 <= y <= 170


def test_goodput_counts_a_step_done_twice_once() -> None:
    events = [
        {"event": "bring_up", "time": 0.0},
        {"event": "step", "time": 4.0, "step": 1, "seconds": 4.0},
        {"event": "step", "time": 8.0, "step": 1, "seconds": 4.0},
        {"event": "finished", "time": 10.0},
    ]
    assert goodput(events) == pytest.approx(0.4)
    assert goodput(events[:1]) is None


@given(st.floats(0, 1), st.floats(1e-6, 1))
def test_alarms_are_raised_beyond_the_threshold_only(value: float, threshold: float) -> None:
    settings = AlarmSettings(
        rollout_kl=threshold, effective_sample_size=threshold, extreme_token_fraction=None
    )
    metrics = {"rollout_kl": value, "effective_sample_size": value, "extreme_token_fraction": 1.0}
    names = {alarm.metric for alarm in raised_alarms(settings, metrics)}
    assert ("rollout_kl" in names) == (value > threshold)
    assert ("effective_sample_size" in names) == (value < threshold)
    assert "extreme_token_fraction" not in names


def test_a_metric_that_is_not_a_number_raises_its_alarm_and_a_missing_one_does_not() -> None:
    assert [str(a) for a in raised_alarms(AlarmSettings(), {"rollout_kl": math.nan})] == [
        "rollout_kl nan is above 0.01"
    ]
    assert not list(raised_alarms(AlarmSettings(), {"reward_mean": 1.0}))


def test_every_attempt_is_counted_and_a_killed_one_is_called_so(tmp_path: Path) -> None:
    """One attempt is killed after a step, one before any event, one stops and one is running."""
    run = RunDir(tmp_path)
    run.config.write_text("{}\n")
    for attempt in range(1, 5):
        run.attempt(attempt).mkdir(parents=True)
        if attempt == 2:
            continue
        log = EventLog(run.events, attempt)
        log.write("bring_up", step=attempt, commit=None)
        if attempt < 4:
            log.write("step", step=attempt, steps=9, seconds=1.0, phases={"update": 1.0}, reward_mean=0.5)
        if attempt == 3:
            log.write("stopped", step=3, reason="asked to stop")
        log.close()
    text = page(run)
    assert "<td>attempts</td><td>4</td>" in text
    ends = re.findall(r"<td>(\d)</td><td>[^<]*</td><td>([^<]*)</td><td>([^<]*)</td>", text)
    assert [(number, steps, end.split(",")[0]) for number, steps, end in ends] == [
        ("1", "1 to 1", "killed: its last event is step of step 1"),
        ("2", "none", "killed: it wrote no event"),
        ("3", "3 to 3", "stopped asked to stop"),
        ("4", "none", "not yet"),
    ]


def test_rewards_and_successes_do_not_hide_each_other(tmp_path: Path) -> None:
    """When every reward is 0 or 1 both lines coincide, so each has a separate chart."""
    steps = [{"step": i, "reward_mean": i / 10, "success_rate": i / 10} for i in range(1, 5)]
    both = [chart for chart in CHARTS if {"reward_mean", "success_rate"} & set(chart.metrics)]
    assert sorted(metric for chart in both for metric in chart.metrics) == ["reward_mean", "success_rate"]
    assert len([figure for chart in both if (figure := draw(chart, steps))]) == 2


def test_failures_stand_beside_each_environments_rewards() -> None:
    from orhpc.commands.report import _environments

    steps = [
        {"step": 1, "reward_mean/a": 0.5, "failed_rollouts/a": 2.0, "failed_share": 0.1},
        {
            "step": 2,
            "reward_mean/a": 0.75,
            "failed_rollouts/a": 1.0,
            "failed_rollouts/b": 8.0,
            "failed_groups/b": 2.0,
        },
    ]
    _, table = _environments(steps)
    assert "<td>a</td><td>0.750</td><td>3</td><td>0</td><td>0</td>" in table
    assert "<td>b</td><td>none was trained</td><td>8</td><td>0</td><td>2</td>" in table
    assert _environments([]) == []
