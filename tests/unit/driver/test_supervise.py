"""The supervisor handles failed attempts according to the policy table, until the budget is used up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orhpc.driver import __main__ as driver
from orhpc.driver.__main__ import supervise
from orhpc.driver.metrics import Phases
from orhpc.driver.resume import choose_start
from orhpc.driver.run import Run
from orhpc.driver.state import State
from orhpc.driver.step_report import CompletedStep
from orhpc.errors import (
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_REQUEUE,
    CheckpointError,
    ModelError,
    NonFinite,
    OrhpcError,
    OutOfMemory,
    StopRequested,
)
from orhpc.rollout.producer import StepGroups
from orhpc.rundir import RunDir, commits
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import read_events
from tests.unit.driver.kit import committed, make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


Outcome = OrhpcError | int | None


@pytest.fixture
def attempts(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int | None]]:
    """Let attempts end as listed: each with the steps that it reaches and an error, or None for success.

    Returns the token budgets with which they were started.
    """
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def script(*outcomes: Any) -> list[int | None]:
        lowered: list[int | None] = []
        left = list(outcomes)

        async def attempt_once(_: Run, tokens: int | None) -> None:
            lowered.append(tokens)
            steps, error = left.pop(0)
            for step in steps:
                run.events.write("step", step=step, steps=9, seconds=1.0, phases={})
                run.last_step = step
            if error is not None:
                raise error

        monkeypatch.setattr(driver, "attempt_once", attempt_once)
        monkeypatch.setattr(driver.asyncio, "sleep", sleep)
        return lowered

    return script


def reports(run: Run) -> list[tuple[str, str | None]]:
    events = read_events(run.rundir.events)
    return [(e["event"], e.get("kind")) for e in events if e["event"] != "step"]


def test_out_of_memory_halves_the_budget_until_the_run_gives_up(run: Run, attempts: Any) -> None:
    lowered = attempts(*[([], OutOfMemory("step 1: out of memory"))] * 4)
    assert asyncio.run(supervise(run)) == EXIT_REQUEUE
    assert lowered == [None, 500, 250, 125]
    assert reports(run) == [("restart", "OutOfMemory")] * 3 + [("failed", "OutOfMemory")]


def test_a_new_step_restores_the_whole_failure_budget(run: Run, attempts: Any) -> None:
    failure = OutOfMemory("out of memory")
    lowered = attempts(*[([step], failure) for step in range(1, 7)], ([7], None))
    assert asyncio.run(supervise(run)) == EXIT_OK
    assert lowered == [None, 500, 250, 125, 62, 31, 15]
    assert reports(run)[-1] == ("finished", None)


def test_the_token_budget_never_reaches_zero(run: Run, attempts: Any) -> None:
    lowered = attempts(*[([step], OutOfMemory("x")) for step in range(1, 13)], ([], None))
    asyncio.run(supervise(run))
    assert lowered[-3:] == [1, 1, 1]


def test_non_finite_steps_are_rolled_back_once_without_a_new_step(run: Run, attempts: Any) -> None:
    """A failure after the roll-back is the second one, unless a newer step was reached before it."""
    failure = NonFinite("optimiser step 4: loss nan")
    lowered = attempts(([1, 2], failure), ([2], failure))
    assert asyncio.run(supervise(run)) == EXIT_REQUEUE
    assert reports(run) == [("restart", "NonFinite"), ("failed", "NonFinite")]
    assert lowered == [None, None]  # a smaller micro-batch would not help


def test_a_step_without_anything_to_train_on_is_no_first_failure(run: Run) -> None:
    """Only two steps in a row that are not finite go back to a commit, not one after an empty step."""
    for metrics, expected in (({"skipped": 1.0}, False), ({"skipped": 1.0, "non_finite": 1.0}, True)):
        phases = Phases()
        phases.seconds["update"] = 1.0
        run.unreported = CompletedStep(State(1), StepGroups([]), metrics, phases)
        run.report_step()
        assert run.last_step_non_finite is expected


def test_non_finite_steps_far_apart_are_each_rolled_back(run: Run, attempts: Any) -> None:
    failure = NonFinite("optimiser step 4: loss nan")
    attempts(([1, 2], failure), ([3, 4], failure), ([5, 6], None))
    assert asyncio.run(supervise(run)) == EXIT_OK
    assert reports(run) == [("restart", "NonFinite")] * 2 + [("finished", None)]


@pytest.mark.parametrize(("error", "code", "output"), [
    (ModelError("no such model"), EXIT_CONFIG, ("failed", "ModelError")),
    (StopRequested("asked to stop"), EXIT_REQUEUE, ("stopped", None)),
])  # fmt: skip
def test_permanent_failures_and_stops_are_not_retried(
    run: Run, attempts: Any, error: OrhpcError, code: int, output: tuple[str, str | None]
) -> None:
    assert len(attempts(([], error))) == 0
    assert asyncio.run(supervise(run)) == code
    assert reports(run) == [output]


def test_nothing_is_retried_after_a_stop_request(run: Run, attempts: Any, tmp_path: Path) -> None:
    attempts(([], OutOfMemory("out of memory")))
    (tmp_path / "stop").touch()
    assert asyncio.run(supervise(run)) == EXIT_REQUEUE
    assert reports(run) == [("failed", "OutOfMemory")]


# --- the initial state of an attempt --------------------------------------------------------------------


def test_the_event_names_the_loaded_weights(run: Run, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.create()
    number = other.begin_attempt(kind="local")
    other.record_start(number, None)
    source = committed(other, 4, number)
    load = run.config.checkpoint.model_copy(update={"load": str(other.path)})
    run.config = run.config.model_copy(update={"checkpoint": load})
    start = asyncio.run(choose_start(run, None))
    name, folder, state = start.commit, start.folder, start.state
    assert (name, folder, state.step) == (None, source, 0)
    (event,) = read_events(run.rundir.events)
    assert (event["event"], event["commit"], event["load"]) == ("bring_up", None, str(source))
    assert line_of(event) == f"starting from the weights of {source}"


def test_the_run_s_own_commit_takes_precedence_over_checkpoint_load(run: Run) -> None:
    own = committed(run.rundir, 2, run.attempt)
    run.rundir.record_start(run.attempt, None)
    load = run.config.checkpoint.model_copy(update={"load": "/nowhere"})
    run.config = run.config.model_copy(update={"checkpoint": load})
    start = asyncio.run(choose_start(run, None))
    name, folder, state = start.commit, start.folder, start.state
    assert (str(name), folder, state.step) == (own.name, own, 2)
    (event,) = read_events(run.rundir.events)
    assert "load" not in event
    assert line_of(event) == f"starting from commit {own.name}"
    assert (event["max_tokens"], event["max_tokens_per_gpu"]) == (1000, 1000)


@pytest.mark.parametrize(
    ("recorded", "lowered", "tokens"),
    [
        ({"max_tokens": 500, "max_tokens_per_gpu": 1000}, None, 500),  # lowered after running out of memory
        ({"max_tokens": 500, "max_tokens_per_gpu": 2000}, None, 1000),  # the setting has been changed since
        ({"max_tokens": 500, "max_tokens_per_gpu": 200}, None, 1000),
        ({"max_tokens": 500, "max_tokens_per_gpu": 2000}, 300, 300),
        ({"max_tokens": 500}, None, 500),  # a commit of an earlier release
        ({"max_tokens": 4000}, None, 1000),
    ],
)
def test_the_token_budget_is_the_lowered_one_or_a_new_setting(
    run: Run, recorded: dict[str, int], lowered: int | None, tokens: int
) -> None:
    folder = committed(run.rundir, 2, run.attempt)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]  # as a commit of a release without it
    del manifest["state"]["max_tokens_per_gpu"]
    manifest["state"] |= recorded
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run.rundir.record_start(run.attempt, None)
    state = asyncio.run(choose_start(run, lowered)).state
    assert (state.max_tokens, state.setting, run.max_tokens) == (tokens, 1000, tokens)
    (event,) = read_events(run.rundir.events)
    output = (
        f"; out of memory before: {tokens} tokens per micro-batch instead of train.max_tokens_per_gpu 1000"
    )
    assert line_of(event) == f"starting from commit {folder.name}" + (output if tokens < 1000 else "")
    assert State.from_manifest(commits.Manifest(2, 1, None, (), state.to_manifest())) == state


def test_running_out_of_memory_halves_the_attempt_s_token_budget(run: Run, attempts: Any) -> None:
    run.max_tokens = 300  # as set by a start from a commit
    lowered = attempts(([], OutOfMemory("out of memory")), ([], None))
    asyncio.run(supervise(run))
    assert lowered == [None, 150]


def test_damaged_weights_are_not_loaded(run: Run, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.create()
    source = committed(other, 4, other.begin_attempt(kind="local"))
    next(source.glob("*.safetensors")).write_bytes(b"changed")
    load = run.config.checkpoint.model_copy(update={"load": str(source)})
    run.config = run.config.model_copy(update={"checkpoint": load})
    with pytest.raises(CheckpointError, match="its content changed"):
        asyncio.run(choose_start(run, None))
    assert read_events(run.rundir.events) == []
