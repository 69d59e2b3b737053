"""The report: what it computes from a run directory, and the page that shows it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.commands.cli import main
from orhpc.commands.goodput import account_of
from orhpc.commands.report import charts
from orhpc.commands.report.findings import RULES, Evidence, findings
from orhpc.commands.report.overview import attempts_of, environments_of
from orhpc.commands.report.page import page, run_data
from orhpc.commands.report.series import MOST_POINTS, Series, compact, curve
from orhpc.commands.report.settings import differences
from orhpc.commands.run_state import seconds_left
from orhpc.config.alarms import AlarmSettings, raised_alarms
from orhpc.config.files import load_config
from orhpc.launch.slurm import ledger
from orhpc.rundir import RunDir
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import EventLog
from orhpc.rundir.origin import PROVENANCE
from orhpc.rundir.sealed import write_sealed
from tests.unit.rundir.test_record import make_rollout


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
        log.write("restart", kind="RayLost", error="</script><script>alert(1)</script>", exit_code=75)
        log.close()
    ledger.write(run, ledger.Outcome(1, ledger.Reason.PREEMPTED, 0))
    return run


def data_of(text: str) -> dict[str, Any]:
    """The JSON block of a page."""
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    return json.loads(block[1])


def test_the_page_has_steps_attempts_and_alarms(run: RunDir) -> None:
    (about,) = data_of(page([run]))["runs"]
    assert about["name"] == "my run"
    assert dict(about["facts"])["step"] == "3 of 3"
    assert about["metrics"]["reward_mean"] == [[1, 2, 3], [0.1, 0.2, 0.3]]
    assert about["metrics"]["rollout_kl"][0] == [2, 3]  # step 1 has none
    assert about["phases"]["update"] == [[1, 2, 3], [0.5, 0.5, 0.5]]
    assert about["attempts"][0]["end"] == "preempted"
    assert [a["steps"] for a in about["attempts"]] == ["1 to 2", "2 to 3"]
    assert {m["text"] for m in about["marks"]} == {
        "rollout_kl 0.2 is above 0.01", "RayLost: </script><script>alert(1)</script>",
    }  # fmt: skip
    assert about["settings"] == {"run.name": "<b>x</b>"}


def test_nothing_that_a_run_wrote_is_markup_and_nothing_is_loaded(run: RunDir) -> None:
    text = page([run])
    script = (Path(charts.__file__).parent / "assets" / "echarts.min.js").read_text()
    own = text.replace(script, "")
    assert len(own) < len(text) - 1_000_000
    assert own.count("</script>") == 4  # the data, the library and two scripts
    assert "<b>x</b>" not in own
    assert not re.search(r"(src|href)\s*=|https?://", own)
    assert ".innerHTML" not in own


def test_the_command_writes_the_page_and_refuses_other_folders(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run.path)]) == 0
    written = Path(capsys.readouterr().out.strip())
    assert written == run.path / "report.html"
    assert [one["name"] for one in data_of(written.read_text())["runs"]] == ["my run"]
    assert main(["report", str(run.path), str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    other = RunDir(tmp_path / "elsewhere" / "my run")
    other.path.mkdir(parents=True)
    other.config.write_text("run: {name: y}\ntrain: {lr: 1}\n")
    both = tmp_path / "both.html"
    assert main(["report", str(run.path), str(other.path), "-o", str(both)]) == 0
    data = data_of(both.read_text())
    assert [one["name"] for one in data["runs"]] == [f"{tmp_path.name}/my run", "elsewhere/my run"]
    assert data["differences"] == [["run.name", ["<b>x</b>", "y"]], ["train.lr", ["-", "1"]]]


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("{}\n")
    (about,) = data_of(page([run]))["runs"]
    assert dict(about["facts"])["steps"] == "No step is done yet."
    assert about["metrics"] == {}


def test_rollouts_are_counted_over_the_run_and_shown_as_samples(run: RunDir) -> None:
    from orhpc.rundir.record import write_rollouts

    for step in (1, 2, 3):
        rollouts = [make_rollout(4 * step + i, 0, 12, reward=i / 4) for i in range(4)]
        write_rollouts(run.rollouts_of(step) / "a001.worker_000.h5", rollouts)
    (run.rollouts_of(4)).mkdir()  # a step that is being recorded
    about = run_data(run)
    assert about["histograms"]["steps"] == [1, 2, 3]
    assert [sum(counts) for counts in about["histograms"]["rewards"]["counts"]] == [4, 4, 4]
    assert about["samples"][0]["title"].startswith("step 3, highest reward")
    assert about["samples"][0]["text"]


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=3 * MOST_POINTS))
def test_a_thinned_curve_keeps_its_extremes_and_its_order(values: list[float]) -> None:
    y = np.array(values, dtype=np.float64)
    x = np.arange(len(y), dtype=np.float64)
    xs, ys = curve(x, y)
    known = y[~np.isnan(y)]
    assert len(xs) == len(ys) <= MOST_POINTS
    assert xs == sorted(set(xs))
    if len(known):
        assert min(ys) == pytest.approx(known.min(), rel=1e-5)
        assert max(ys) == pytest.approx(known.max(), rel=1e-5)
    else:
        assert ys == []


@pytest.mark.slow
def test_ten_thousand_steps_make_a_small_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("{}\n")
    numbers = {f"metric_{i}": 0.123456789 * i for i in range(60)}
    lines = [
        json.dumps({"event": "step", "time": 1e9 + s, "attempt": 1, "step": s, "steps": 10_000,
                    "seconds": 1.0, "phases": {"update": 1.0}, **numbers}) + "\n"
        for s in range(1, 10_001)
    ]  # fmt: skip
    run.events.write_text("".join(lines))
    assert len(page([run])) < 6e6


def test_every_metric_is_in_one_panel() -> None:
    metrics = [
        "step",
        "time",
        "reward_mean",
        "reward_mean/a",
        "reward_mean/b",
        "success_rate",
        "memory_trainer_peak_gb",
        "mine",
    ]
    for apart in (False, True):
        panels = [p for s in charts.sections_of(metrics, apart=apart) for p in s.panels]
        shown = [m for p in panels for m in p.metrics]
        assert sorted(shown) == sorted(set(metrics) - {"step", "time"})
        assert not apart or all(len(p.metrics) == 1 for p in panels)
    # When every reward is 0 or 1 both curves coincide, so each has a chart of its own.
    assert not any({"reward_mean", "success_rate"} <= set(p.metrics) for p in panels)


def test_the_curve_of_a_single_environment_is_that_of_all() -> None:
    panels = [p for s in charts.sections_of(["reward_mean", "reward_mean/a"]) for p in s.panels]
    assert [p.metrics for p in panels] == [("reward_mean",)]


def test_the_time_left_is_at_the_pace_of_the_newest_steps() -> None:
    steps = [{"step": i, "steps": 100, "seconds": 100.0 if i < 30 else 2.0} for i in range(1, 61)]
    assert seconds_left(steps) == pytest.approx(80.0)
    assert seconds_left([]) is None


def evidence(tmp_path: Path, **metrics: list[float]) -> Evidence:
    """A run of as many steps as the metrics have values; ``restarts`` are the first steps of attempts."""
    restarts = [int(step) for step in metrics.pop("restarts", [])]
    count = len(next(iter(metrics.values())))
    steps, attempt = [], 1
    for i in range(count):
        attempt += i + 1 in restarts
        numbers = {name.replace("__", "/"): values[i] for name, values in metrics.items()}
        phases = {"rollout": 8.0, "update": 2.0}
        steps.append({"event": "step", "time": 10.0 * i, "attempt": attempt, "step": i + 1, "steps": count,
                      "seconds": 10.0, "phases": phases, **numbers})  # fmt: skip
    run = RunDir(tmp_path)
    for number in range(1, attempt + 1):
        run.attempt(number).mkdir(parents=True)
    return Evidence(Series.of(steps), steps, attempts_of(run, steps), account_of(run, steps))


@pytest.mark.parametrize(
    ("metrics", "title"),
    [
        ({"rollout_kl": [0.001] * 20 + [0.05] * 20}, "Engine and trainer disagree"),
        ({"effective_sample_size": [0.99] * 20 + [0.5] * 20}, "Importance weights are uneven"),
        ({"entropy": [1.0] * 20 + [0.05] * 20}, "Entropy collapses"),
        (
            {
                "reward_mean": [i / 40 for i in range(40)],
                "response_length_mean": [10.0 * (i + 1) for i in range(40)],
            },
            "Responses grow with the reward",
        ),
        ({"equal_reward_groups": [0.9] * 40}, "Most groups train nothing"),
        ({"explained_variance": [-0.1] * 40}, "The critic foresees nothing"),
        (
            {"reward_mean__code": [0.8, 0.82] * 10 + [0.4, 0.42] * 10, "restarts": [21]},
            "code got worse after the restart at step 21",
        ),
        (  # the first step after the restart trains on rollouts from before it
            {"reward_mean__code": [0.8, 0.82] * 5 + [1.6] + [0.4, 0.42] * 3, "restarts": [11]},
            "code got worse after the restart at step 11",
        ),
        ({"failed_share": [0.2] * 40}, "Rollouts fail"),
        ({"truncated": [0.6] * 40}, "Many rollouts are cut off"),
        ({"grad_norm": [1.0] * 39 + [50.0]}, "Gradient norm spikes"),
        (
            {"rollout_seconds_max": [40.0] * 40, "rollout_seconds_mean": [4.0] * 40},
            "Steps wait for the longest rollouts",
        ),
        ({"staleness_mean": [9.0] * 40}, "Rollouts come from old policies"),
    ],
)
def test_a_rule_names_its_problem_and_no_other(
    tmp_path: Path, metrics: dict[str, list[float]], title: str
) -> None:
    assert [f.title for f in findings(evidence(tmp_path, **metrics))] == [title]


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    rising = [0.2 + i / 100 for i in range(40)]
    healthy = {
        "reward_mean": rising, "reward_mean__a": rising, "restarts": [21.0], "rollout_kl": [1e-4] * 40,
        "entropy": [1.0 - i / 100 for i in range(40)], "grad_norm": [0.5, 0.7] * 20, "truncated": [0.01] * 40,
        "equal_reward_groups": [0.1] * 40, "response_length_mean": [100.0 + i for i in range(40)],
        "rollout_seconds_max": [6.0] * 40, "rollout_seconds_mean": [4.0] * 40, "staleness_mean": [0.0] * 40,
    }  # fmt: skip
    assert findings(evidence(tmp_path, **healthy)) == []
    critic = {"equal_reward_groups": [0.9] * 40, "value_loss": [0.1] * 40, "explained_variance": [0.5] * 40}
    assert findings(replace(evidence(tmp_path / "critic", **critic), advantage="ppo")) == []
    assert findings(Evidence(Series.of([]), [], [], None)) == []


@pytest.mark.parametrize("advantage", ["group", "group_then_batch", "batch", "ppo", "mine:function"])
def test_equal_rewards_train_nothing_only_where_groups_are_compared(tmp_path: Path, advantage: str) -> None:
    """REINFORCE++ and PPO train on groups of one rollout, whose rewards are always equal."""
    run = RunDir(tmp_path)
    steps = evidence(tmp_path, equal_reward_groups=[1.0] * 40).events
    run.config.write_text(f"algorithm: {{advantage: '{advantage}'}}\n")
    run.events.write_text("".join(json.dumps(step) + "\n" for step in steps))
    found = [finding["title"] for finding in run_data(run)["findings"]]
    assert found == ["Most groups train nothing"] * ("group" in advantage)


def test_findings_advise_settings_that_exist() -> None:
    """Every dotted word of an advice is a setting."""
    source = Path(charts.__file__).with_name("findings.py").read_text()
    named = set(re.findall(r"\b(?:train|rollout|algorithm|checkpoint|engine)\.[a-z_]+", source))
    config = load_config(Path("configs/tiny.yaml"), []).model_dump()
    assert len(named) > 5
    for name in named:
        section, _, setting = name.partition(".")
        assert setting in config[section], name
    assert len(RULES) == len(set(RULES))


def test_environments_have_their_rewards_and_failures() -> None:
    steps = [
        {"step": 1, "reward_mean/a": 0.5, "failed_rollouts/a": 2.0, "failed_share": 0.1},
        {"step": 2, "reward_mean/a": 0.75, "failed_rollouts/a": 1.0, "failed_rollouts/b": 8.0,
         "failed_groups/b": 2.0},
    ]  # fmt: skip
    assert environments_of(steps) == [
        ("a", "0.750", "3", "0", "0"),
        ("b", "none was trained", "8", "0", "2"),
    ]
    assert environments_of([]) == []


def test_a_mean_that_is_not_a_number_ends_no_reader(run: RunDir) -> None:
    """Events have NaN and infinity as text."""
    log = EventLog(run.events, 2)
    log.write(
        "step", step=4, steps=9, seconds=1.0, phases={}, **{"reward_mean/a": math.nan, "failed_groups/a": 2}
    )
    means = {"reward_mean/a": math.nan, "failed/a": 1.0, "rollouts/a": 8.0, "reward_mean/b": math.inf}
    event = log.write("evaluation", step=4, seconds=1.0, **means)
    log.close()
    assert run_data(run)["environments"] == [("a", "-", "0", "0", "2")]
    assert line_of(event) == "evaluation after step 4: a - (1 of 8 rollouts failed), b -"


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
            log.write("stopped", step=3, reason="stopped while it evaluated")
        log.close()
    about = run_data(run)
    assert dict(about["facts"])["attempts"] == "4"
    assert [(a["number"], a["steps"], a["end"].split(",")[0]) for a in about["attempts"]] == [
        (1, "1 to 1", "killed: its last event is step of step 1"),
        (2, "none", "killed: it wrote no event"),
        (3, "3 to 3", "stopped while it evaluated"),
        (4, "none", ["not yet", " or killed: its last event is bring_up of step 4"][0]),
    ]


def test_an_attempt_shows_what_changed_since_the_one_before(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("{}\n")
    code = {"folder": "/me/task", "commit": "1234", "changed": True}
    records = [
        {"packages": {"torch": "2.11.0", "ray": "2.60.0"}, "host": "node1", "code": code},
        {"packages": {"torch": "2.13.0", "ray": "2.60.0"}, "host": "node2", "code": code},
        {"packages": {"torch": "2.13.0", "ray": "2.60.0"}, "host": "node2", "code": code},
        {"packages": {"torch": "2.13.0"}, "host": "node2", "code": {**code, "commit": "5678"}},
    ]
    for number, record in enumerate(records, 1):
        attempt = run.attempt(number)
        attempt.mkdir(parents=True)
        write_sealed(attempt / PROVENANCE, record)
        (attempt / "config.yaml").write_text(f"train: {{steps: {10 if number == 1 else 20}}}\n")
        (attempt / "code.diff").write_text("-a\n" if number < 3 else "-b\n")
    assert [a["changed"] for a in run_data(run)["attempts"]] == [
        "",
        "train.steps: 10 -> 20, torch 2.11.0 -> 2.13.0, host node1 -> node2",
        "files of /me/task (attempts/003/code.diff)",
        "the commit of /me/task",
    ]


def test_differences_are_settings_that_are_not_equal() -> None:
    assert differences([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]) == [
        ("b", ["2", "3"]),
        ("c", ["-", "4"]),
    ]


# --- alarms -----------------------------------------------------------------------------------------


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


@given(st.lists(st.one_of(st.floats(-1e9, 1e9), st.integers(-5, 5).map(float)), min_size=1, max_size=50))
def test_many_numbers_are_rounded_like_one(values: list[float]) -> None:
    _, shown = curve(np.arange(float(len(values))), np.array(values))
    assert shown == pytest.approx([compact(value) for value in values], rel=1.1e-6)
    assert all(len(repr(value)) < 15 or value == int(value) for value in shown)
