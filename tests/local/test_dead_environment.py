"""A run with two environments; the server of one ends permanently during the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from openreward.environments import TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from tests.local import kit
from tests.served import TrainSplit, serve

pytestmark = pytest.mark.slow


class Text(BaseModel):
    text: str


class Away(TrainSplit):
    """A single-turn environment whose server is not started by the job."""

    TASKS: ClassVar[list[dict[str, Any]]] = [{"a": i} for i in range(9)]

    @terminal
    @tool
    async def submit(self, text: Text) -> ToolOutput:
        """Take it."""
        return ToolOutput(blocks=[TextBlock(text="ok")], reward=float(len(text.text)), finished=True)


def test_a_run_continues_without_an_unreachable_environment_and_reports_it(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "tiny")
    with serve(Away) as server:
        overrides = [f"environments.away={{url: '{server.url}'}}", "rollout.failing_environment=leave_out"]
        overrides += [
            kit.ONE_DEVICE,
            "rollout.failing_environment_after=8",
            "rollout.session_timeout_s=5",
            "train.steps=200",
        ]
        with kit.started(tmp_path, *overrides, "wandb.enabled=false", "rollout.retries=0") as process:
            kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 1)
            server.stop()
            notice = kit.wait_for(process, rundir, lambda e: e["event"] == "notice")
            left_out_at = max(steps_of(read_events(rundir.events)))
            kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= left_out_at + 3)
    assert notice["reason"].startswith("environment 'away': the last 8 rollouts failed")
    assert "the run continues without it" in notice["reason"]
    steps = steps_of(read_events(rundir.events))
    assert sum(e.get("failed_rollouts/away", 0) for e in steps.values()) >= 8
    assert steps[left_out_at + 3]["failed_rollouts"] == 0
    assert steps[left_out_at + 3]["groups"] == 4
