"""The display of a local run."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from orhpc.launch.display import Display
from orhpc.rundir.events import EventLog


def test_a_failure_is_the_reason_of_an_end_only_if_no_step_followed_it(tmp_path: Path) -> None:
    log, output = EventLog(tmp_path / "events.jsonl", 1), io.StringIO()
    display = Display(tmp_path / "events.jsonl", 1, Console(file=output, width=200))

    def failure_after(event: str, **fields: object) -> str | None:
        log.write(event, **fields)
        display.tick()
        return display.failure

    steps = {"steps": 9, "seconds": 1.0, "phases": {"rollout": 0.5}}
    assert failure_after("restart", kind="RayLost", error="gone") == "RayLost: gone"
    assert failure_after("step", step=1, **steps) is None
    assert failure_after("storage_refused", error="no room") == "storage refused: no room"
    assert failure_after("step", step=2, **steps) is None
    assert failure_after("commit_failed", step=2, error="no room") == "commit failed: no room"
    text = output.getvalue().splitlines()
    assert [line for line in text if "room" in line or "gone" in line] == [
        "restart: RayLost: gone", "storage refused: no room", "commit failed: no room",
    ]  # fmt: skip


def steps_shown(width: int, height: int, count: int, folder: Path) -> list[int]:
    """Steps of the panel that are visible on a terminal of this size, which cuts it at its height."""
    output = io.StringIO()
    console = Console(file=output, width=width, height=height, force_terminal=True, color_system=None)
    log = EventLog(folder / "events.jsonl", 1)
    display = Display(folder / "events.jsonl", 1, console)
    for step in range(1, count + 1):
        log.write(
            "step", step=step, steps=200, seconds=12.3, reward_mean=0.125, response_length_mean=1234.5,
            tokens_per_s=98765.0, loss=-0.0123, rollout_kl=1.2e-4, entropy=1.25, grad_norm=12.34,
            phases={"rollout": 5.1, "update": 4.2, "sync": 1.3, "record": 0.9, "checkpoint": 0.8},
        )  # fmt: skip
    display.tick()
    output.seek(0)
    output.truncate()
    console.print(display.panel())
    lines = output.getvalue().splitlines()
    assert len(lines) <= height - 1
    assert all(len(line) <= width for line in lines)
    assert all("-0.0123" in line and "12.34" in line for line in lines if "/200" in line)
    return [int(found[1]) for line in lines if (found := re.search(r"(\d+)/200", line))]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize(("height", "rows"), [(24, 8), (12, 6), (9, 3)])
def test_the_newest_steps_stay_visible(tmp_path: Path, width: int, height: int, rows: int) -> None:
    assert steps_shown(width, height, 20, tmp_path) == list(range(21 - rows, 21))


@pytest.mark.parametrize(("loss", "shown"), [(-3.7e-9, False), (0.0, False), (None, False), (-0.0123, True)])
def test_the_loss_is_shown_only_if_it_is_not_zero(tmp_path: Path, loss: float | None, shown: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, height=24, force_terminal=True, color_system=None)
    log = EventLog(tmp_path / "events.jsonl", 1)
    display = Display(tmp_path / "events.jsonl", 1, console)
    numbers = {} if loss is None else {"loss": loss}
    log.write("step", step=1, steps=2, seconds=1.0, phases={}, **numbers)
    display.tick()
    console.print(display.panel())
    assert ("loss" in output.getvalue()) is shown


def test_the_display_describes_the_start_correctly(tmp_path: Path) -> None:
    log, output = EventLog(tmp_path / "events.jsonl", 1), io.StringIO()
    display = Display(tmp_path / "events.jsonl", 1, Console(file=output, width=200))
    log.write("bring_up", step=0, commit=None)
    log.write("bring_up", step=0, commit=None, load="/runs/other/checkpoints/step_4.a001")
    log.write("bring_up", step=2, commit="step_2.a001")
    display.tick()
    assert output.getvalue().splitlines() == [
        "starting from the base model",
        "starting from the weights of /runs/other/checkpoints/step_4.a001",
        "starting from commit step_2.a001",
    ]
