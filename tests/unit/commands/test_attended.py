"""A command that waits for its job and prints the events of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.commands import attended
from orhpc.commands.jobs import Standing
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog


def test_each_event_is_read_and_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    polls = iter([False, False, True])
    monkeypatch.setattr(Standing, "of", lambda _: Standing({}, None, ended=next(polls)))
    log = EventLog(run.events, 1)
    log.write("notice", reason="first")

    def between(_: float) -> None:
        """Write one more event, and make what was there unreadable: it must not be read again."""
        size = run.events.stat().st_size
        with run.events.open("r+b") as stream:
            stream.write(b"x" * (size - 1))
        log.write("notice", reason=f"after {size} bytes")

    monkeypatch.setattr(attended.time, "sleep", between)
    attended.wait(run)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "first"
    assert len(shown) == 3
    assert len(set(shown)) == 3


def test_events_of_a_replaced_attempt_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    polls = iter([False, True])
    monkeypatch.setattr(Standing, "of", lambda _: Standing({}, None, ended=next(polls)))
    EventLog(run.events, 2).write("notice", reason="of the newest")
    monkeypatch.setattr(
        attended.time, "sleep", lambda _: EventLog(run.events, 1).write("notice", reason="of a killed one")
    )
    attended.wait(run)
    assert capsys.readouterr().out == "of the newest\n"
