"""A file server that is temporarily unavailable: callers wait, and report it once."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.errors import (
    EXIT_CONFIG,
    EXIT_REQUEUE,
    CheckpointError,
    ConfigError,
    StopRequested,
    StorageRefused,
)
from orhpc.launch.node import launcher, outcome_recorder
from orhpc.launch.slurm import ledger
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir import RunDir, commits, storage
from orhpc.rundir.storage import StorageRetry, ToleratedOutages, retry_write
from tests.unit.rundir.test_rundir import commit, make_run, start

AWAY = [errno.EIO, errno.ESTALE, errno.EACCES]


class Server:
    """Makes opening, listing and creating files below a folder fail with an error, a number of times."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.error, self.left = folder, 0, 0
        for module, name in ((os, "listdir"), (os, "mkdir"), (os, "open"), (builtins, "open")):
            real: Callable[..., Any] = getattr(module, name)
            monkeypatch.setattr(module, name, partial(self._call, real))
        monkeypatch.setattr("io.open", builtins.open)
        monkeypatch.setattr(storage, "_PAUSE_S", 0.01)

    def away(self, error: int, times: int) -> None:
        self.error, self.left = error, times

    def _call(self, real: Callable[..., Any], path: Any = ".", *args: Any, **more: Any) -> Any:
        if self.left and isinstance(path, str | Path) and Path(path).is_relative_to(self.folder):
            self.left -= 1
            raise OSError(self.error, os.strerror(self.error), str(path))
        return real(path, *args, **more)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield Server(tmp_path, monkeypatch)


@pytest.mark.parametrize("error", AWAY)
def test_a_refused_poll_does_not_count(server: Server, tmp_path: Path, error: int) -> None:
    run = make_run(tmp_path)
    run.begin_attempt()
    reports: list[str] = []
    outages = ToleratedOutages(reports.append)
    server.away(error, 3)
    assert [outages.run(run.newest_attempt, -1) for _ in range(5)] == [-1, -1, -1, 1, 1]
    begun, over = reports
    assert os.strerror(error) in begun
    assert "waiting until it answers again" in begun
    assert over == "the run directory answers again after 0 s"
    with pytest.raises(ZeroDivisionError):
        outages.run(lambda: 1 // 0, 0)


@pytest.mark.slow
def test_a_write_without_an_event_loop_is_retried_until_the_limit(server: Server, tmp_path: Path) -> None:
    reports: list[str] = []
    server.away(errno.ESTALE, 2)
    retry_write(lambda: (tmp_path / "x").write_text("y"), 5.0, reports.append)
    assert len(reports) == 1
    server.away(errno.ESTALE, 1000)
    with pytest.raises(StorageRefused, match="Stale file handle"):
        retry_write(lambda: (tmp_path / "x").write_text("y"), 0.0, reports.append)


def first_node(tmp_path: Path, restart: int = 0) -> launcher.FirstNode:
    config = load_config(Path("configs/tiny.yaml"), [f"run.root={tmp_path}/runs", "run.storage_wait_s=5"])
    return launcher.FirstNode(Job("7", restart, 0, 1, "n0", "7", tmp_path), config)


@pytest.mark.slow
@pytest.mark.parametrize("error", AWAY)
def test_the_first_node_waits_for_an_unavailable_run_directory_and_writes_its_outcome_later(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    first = first_node(tmp_path)
    first.rundir.create()
    attempt = first.rundir.begin_attempt(kind="slurm", job="7", chain="7")
    server.folder = first.rundir.path
    server.away(error, 2)
    first.recorder.record(attempt, EXIT_REQUEUE)
    (outcome,) = ledger.read(first.rundir)
    assert outcome.reason is Reason.INFRASTRUCTURE
    server.away(error, 10_000)
    monkeypatch.setattr(
        outcome_recorder, "retry_write", lambda write, wait_s, report: retry_write(write, 0.1, report)
    )
    first.recorder.record(attempt, EXIT_REQUEUE)
    assert first.recorder.exit_code == EXIT_REQUEUE


@pytest.mark.slow
@pytest.mark.parametrize("error", AWAY)
def test_a_requeued_job_waits_for_its_run_directory(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """If the very first start cannot write, the path is wrong; a later start has written there before."""
    monkeypatch.setattr(launcher, "StorageRetry", partial(StorageRetry, pause_s=0.01))
    monkeypatch.setattr(launcher.FirstNode, "_prepare", lambda self: True)
    first = first_node(tmp_path, restart=1)
    server.folder = first.rundir.path.parent
    server.away(error, 3)
    assert first.run() == 0


def test_a_stop_of_the_batch_shell_alone_ends_the_wait(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM's signal ahead of the time limit does not reach the launcher's process."""
    monkeypatch.setattr(launcher, "StorageRetry", partial(StorageRetry, pause_s=0.01))
    first = first_node(tmp_path, restart=1)
    server.folder = first.rundir.path.parent
    server.away(errno.ESTALE, 10_000)
    first.job.stop_file.touch()
    with pytest.raises(StopRequested):
        first.run()


def test_a_run_root_without_write_permission_gives_one_error_line(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "1", "SLURMD_NODENAME": "n0"}
    for name, value in {**variables, "ORHPC_JOB_FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    root = tmp_path / "runs"
    server.folder = root
    server.away(errno.EACCES, 1000)
    assert launcher.main(["configs/tiny.yaml", f"run.root={root}"]) == EXIT_CONFIG
    assert (tmp_path / "code").read_text() == str(EXIT_CONFIG)
    output = capsys.readouterr().err.splitlines()
    assert output == [f"orhpc: n0: ConfigError: run.root: {root}/tiny cannot be created: Permission denied"]
    with pytest.raises(ConfigError):
        RunDir(root / "other").create()
    with pytest.raises(StorageRefused):
        RunDir(root / "other").create(known=True)


@pytest.mark.slow
@pytest.mark.parametrize("error", AWAY)
def test_a_temporarily_unreadable_commit_is_not_skipped(server: Server, tmp_path: Path, error: int) -> None:
    """Skipping it would cost the steps since the previous commit."""
    run = make_run(tmp_path)
    attempt = start(run)
    four, six = commit(run, 4, attempt), commit(run, 6, attempt)
    reports: list[str] = []
    server.folder = run.checkpoints / str(six)
    server.away(error, 1)
    with pytest.raises(StorageRefused):
        commits.verify(server.folder)
    server.away(error, 1)
    name, manifest, passed_over = commits.newest_intact(run, wait_s=30.0, report=reports.append)
    assert (name, passed_over) == (six, [])
    assert manifest is not None
    assert os.strerror(error) in reports[0]
    server.away(error, 1000)  # permanently, like a broken disk
    name, _, passed_over = commits.newest_intact(run, wait_s=0.0)
    assert name == four
    assert os.strerror(error) in passed_over[0]
    (run.checkpoints / str(four) / commits.MANIFEST).unlink()
    with pytest.raises(CheckpointError):
        commits.newest_intact(run)
