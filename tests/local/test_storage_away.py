"""A run whose file server is temporarily unavailable: it waits, loses nothing, and reports it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import read_step
from tests.local import kit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 14


def test_a_run_continues_after_its_file_server_was_unavailable(tmp_path: Path) -> None:
    """Three times in one run: I/O error, stale file handle, permission denied."""
    root, sign = tmp_path / "runs", tmp_path / "away"
    rundir = RunDir(root / "tiny")
    env = {"ORHPC_TEST_AWAY": str(sign), "PYTHONPATH": str(Path(__file__).parent / "away")}
    arguments = (
        f"train.steps={STEPS}",
        "checkpoint.save_interval=3",
        "run.storage_wait_s=120",
        kit.ONE_DEVICE,
    )
    with kit.started(root, *arguments, env=env) as process:
        for step, error in ((3, errno.EIO), (6, errno.ESTALE), (9, errno.EACCES)):
            kit.wait_for(process, rundir, lambda e, s=step: e["event"] == "step" and e["step"] >= s)
            sign.write_text(str(error))
            time.sleep(6)
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            sign.unlink()
        code = process.wait(600)
        output = process.stdout.read() if process.stdout else ""
    assert code == 0, output
    events = read_events(rundir.events)
    assert sorted(steps_of(events)) == list(range(1, STEPS + 1))
    assert [e["error"] for e in events if e["event"] in ("failed", "restart")] == []
    refused = " ".join(e["error"] for e in events if e["event"] == "storage_refused")
    assert any(os.strerror(error) in output + refused for error in (errno.EIO, errno.ESTALE, errno.EACCES))
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, STEPS + 1))  # none repeated
    for step in range(1, STEPS + 1):
        assert len(read_step(rundir.rollouts_of(step))) == 16
    assert rundir.lineage()[0].step == STEPS
    assert rundir.newest_attempt() == 1
