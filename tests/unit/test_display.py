"""What a local run says of itself."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from orhpc.events import EventLog
from orhpc.launch.display import Display


def test_a_failure_is_the_reason_of_an_end_only_until_a_step_has_followed(tmp_path: Path) -> None:
    log, said = EventLog(tmp_path / "events.jsonl", 1), io.StringIO()
    display = Display(tmp_path / "events.jsonl", 1, Console(file=said, width=200))

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
    text = said.getvalue().splitlines()
    assert [line for line in text if "room" in line or "gone" in line] == [
        "restart: RayLost: gone", "storage refused: no room", "commit failed: no room",
    ]  # fmt: skip
