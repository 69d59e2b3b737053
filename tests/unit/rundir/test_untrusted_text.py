"""Secrets and control characters: neither reaches a log, a file, an event or a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.errors import ConfigError
from orhpc.process.terminal import guarded_output
from orhpc.rollout.transcript import RolloutBuilder, RolloutRequest
from orhpc.rundir.events import EventLog, read_events
from orhpc.rundir.record import RolloutFile, write_rollouts
from orhpc.types import Rollout, RolloutEnd, Task
from tests.hostile import CANARY


def test_secrets_and_control_characters_reach_no_event_log_or_terminal(
    known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver's side: any text in an exception from a worker."""
    dirty = f"\x1b]0;renamed\x07{CANARY}\x9b2J \u202eabc"
    events_file = EventLog(tmp_path / "events.jsonl", 1)
    events_file.write("failed", kind="X", error=dirty, more=[{"a": dirty}])
    events_file.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    made = replace(nothing_rolled_out(), error=dirty, messages=[{"role": "tool", "content": dirty}])
    write_rollouts(tmp_path / "a.h5", [made])
    with RolloutFile(tmp_path / "a.h5") as record:
        stored = record.rollout(0)
    with guarded_output():
        print(dirty)
        print(dirty, file=sys.stderr)
        sys.stdout.writelines([dirty])
    shown = capsys.readouterr()
    for seen in (event["error"], event["more"][0]["a"], str(stored.error), shown.out, shown.err):
        assert CANARY not in seen
        assert not any(c in seen for c in "\x1b\x07\x9b\u202e")
        assert "[secret]" in seen
    assert CANARY not in str(stored.messages)


def nothing_rolled_out() -> Rollout:
    request = RolloutRequest("0.0", 0, 0, Task("main", "train", 0), seed=1)
    return RolloutBuilder().rollout(request, RolloutEnd.FAILED, reward=None, error=None, seconds=0.0, limit=1)


@pytest.mark.slow
def test_a_served_environment_keeps_its_secrets_out_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "import os, sys, logging\n"
        "print('key', os.environ['MY_KEY'], chr(27) + '[31m')\n"
        "logging.getLogger('x').warning('key %s', os.environ['MY_KEY'])\n"
        "raise RuntimeError(os.environ['MY_KEY'])\n"
    )
    command = [sys.executable, "-m", "orhpc.environments.server", "--environment", "chatty:A"]
    command += ["--port", "1", "--secrets-json", '{"my_key": null}']
    env = {**os.environ, "MY_KEY": CANARY, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 2
    assert "[secret]" in done.stdout
    assert "RuntimeError" in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "url", [f"http://u:{CANARY}@host:80", f"http://{CANARY}@host", f"ftp://u:{CANARY}@h"]
)
def test_a_password_in_a_url_is_refused_before_it_is_written(tmp_path: Path, url: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"extends: tiny.yaml\nenvironments: {{e: {{url: '{url}'}}}}\n")
    with pytest.raises(ConfigError, match="user name or a password") as caught:
        load_config(config)
    assert CANARY not in str(caught.value)
