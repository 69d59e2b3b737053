"""Attempts, lineage and commits: only intact commits of the lineage count."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.errors import CheckpointError, RunDirBusy, StopRequested
from orhpc.rundir import CommitName, RunDir, commits
from orhpc.rundir.commits import Manifest, ShardFile
from orhpc.rundir.events import EventLog, read_events, steps_of


def make_run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def start(run: RunDir, source: CommitName | None = None) -> int:
    attempt = run.begin_attempt()
    run.record_start(attempt, source)
    return attempt


def commit(run: RunDir, step: int, attempt: int, content: bytes = b"weights") -> CommitName:
    name = CommitName(step, attempt)
    folder = commits.begin(run, name)
    (folder / "rank_0.bin").write_bytes(content)
    shard = ShardFile("rank_0.bin", len(content), hashlib.sha256(content).hexdigest())
    commits.finalize(folder, Manifest(step, attempt, None, (shard,), {"next_group": step}))
    return name


def test_folders_are_accessible_only_to_the_owner(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start(run)
    for path in (run.path, run.checkpoints, run.attempt(attempt)):
        assert path.stat().st_mode & 0o077 == 0
    assert (run.attempts / "latest").resolve() == run.attempt(attempt)


def test_commits_of_a_stale_attempt_are_ignored(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = start(run)
    ten = commit(run, 10, first)
    second = start(run, ten)
    commit(run, 20, first)  # the lost node is still writing
    assert run.lineage() == [ten]
    fifteen = commit(run, 15, second)
    assert run.lineage() == [fifteen, ten]
    third = start(run, fifteen)
    commit(run, 30, first)
    commit(run, 40, second)
    sixteen = commit(run, 16, third)
    assert run.lineage() == [sixteen, fifteen, ten]
    assert commits.newest_intact(run)[0] == sixteen


def test_an_attempt_that_never_chose_a_start_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    ten = commit(run, 10, start(run))
    run.begin_attempt()
    assert run.lineage() == [ten]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=8))
def test_lineage_is_a_descending_chain_of_what_each_attempt_could_see(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, int]]
) -> None:
    """Attempts start from the newest intact commit and commit some steps, while a stale one interferes."""
    run = make_run(tmp_path_factory.mktemp("lineage"))
    expected: list[CommitName] = []
    previous = 0
    for own, stale in plan:
        attempt = start(run, expected[0] if expected else None)
        if previous:
            commit(run, (expected[0].step if expected else 0) + 100 * stale, previous)
        for _ in range(own):
            expected.insert(0, commit(run, (expected[0].step if expected else 0) + 1, attempt))
        previous = attempt
        assert run.lineage() == expected


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no manifest"])
def test_a_damaged_commit_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path)
    attempt = start(run)
    good = commit(run, 1, attempt)
    bad = commit(run, 2, attempt)
    shard = run.checkpoints / str(bad) / "rank_0.bin"
    manifest = run.checkpoints / str(bad) / "manifest.json"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[3] ^= 1
        shard.write_bytes(data)
    elif damage == "truncate":
        os.truncate(shard, 3)
    elif damage == "remove":
        shard.unlink()
    elif damage == "manifest":
        os.truncate(manifest, 10)
    else:
        manifest.unlink()
    name, found, passed_over = commits.newest_intact(run)
    assert name == good
    assert found is not None
    assert found.state == {"next_group": 1}
    assert len(passed_over) == 1
    assert str(bad) in passed_over[0]


def test_verifying_a_commit_ends_when_the_run_is_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    name = commit(run, 1, start(run))
    with pytest.raises(StopRequested):
        commits.newest_intact(run, lambda: True)
    assert commits.newest_intact(run)[0] == name


def test_having_no_intact_commit_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    bad = commit(run, 2, start(run))
    (run.checkpoints / str(bad) / "rank_0.bin").unlink()
    with pytest.raises(CheckpointError, match="no commit"):
        commits.newest_intact(run)


def test_a_save_killed_between_shards_never_counts_as_a_commit(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start(run)
    one = commit(run, 1, attempt)
    torn = commits.begin(run, CommitName(2, attempt))
    (torn / "rank_0.bin").write_bytes(b"half")
    assert commits.newest_intact(run)[0] == one
    later = start(run, one)
    assert torn.name in commits.sweep(run, later, keep=2, keep_every=None)
    assert not torn.exists()


def test_finalize_refuses_a_truncated_shard(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    name = CommitName(1, start(run))
    folder = commits.begin(run, name)
    (folder / "rank_0.bin").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="3 bytes"):
        commits.finalize(folder, Manifest(1, name.attempt, None, (ShardFile("rank_0.bin", 4, "0"),)))
    assert run.lineage() == []


def test_sweep_keeps_the_newest_and_the_milestones(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start(run)
    for step in range(1, 8):
        commit(run, step, attempt)
    commits.sweep(run, attempt, keep=2, keep_every=3)
    assert [c.step for c in run.lineage()] == [7, 6, 3]


def test_a_stale_attempt_cannot_sweep(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    old = start(run)
    one = commit(run, 1, old)
    new = start(run, one)
    two = commit(run, 2, new)
    assert commits.sweep(run, old, keep=1, keep_every=None) == []
    assert run.lineage() == [two, one]


def test_a_stale_attempt_that_does_not_see_the_newer_one_keeps_its_commits(tmp_path: Path) -> None:
    """A node that SLURM considers dead may have an old listing of one folder and a new one of another."""
    run = make_run(tmp_path)
    old = start(run)
    one = commit(run, 1, old)
    new = start(run, one)
    two = commit(run, 2, new)
    folder = run.attempt(new)
    folder.rename(tmp_path / "hidden")
    commits.sweep(run, old, keep=1, keep_every=None)
    (tmp_path / "hidden").rename(folder)
    assert run.lineage() == [two, one]


@pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
def test_an_incomplete_start_file_loses_no_commit(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path)
    first = start(run)
    four, six = commit(run, 4, first), commit(run, 6, first)
    second = start(run, four)
    five = commit(run, 5, second)
    (run.attempt(second) / "start.json").write_text(content)
    assert run.lineage() == [five, four]
    assert six not in run.lineage()


@pytest.mark.parametrize("folder", ["attempts", "checkpoints"])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """A run whose file server does not answer must not restart from the base model."""
    run = make_run(tmp_path)
    commit(run, 4, start(run))
    real = os.listdir

    def listdir(path: Path) -> list[str]:
        if Path(path).name == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os, "scandir", listdir)
    with pytest.raises(PermissionError):
        run.lineage()


@pytest.mark.slow
def test_two_processes_cannot_lock_one_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    code = f"from orhpc.rundir import RunDir\nwith RunDir({str(run.path)!r}).locked(): print('held')"
    with run.locked():
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "RunDirBusy" in result.stderr
        assert f"process {os.getpid()}" in result.stderr
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "held\n"
    with run.locked(), pytest.raises(RunDirBusy), RunDir(run.path).locked():
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_a_filesystem_without_locks_is_not_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """There ``holder.json`` and SLURM say which job holds the run."""
    run = make_run(tmp_path)

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)), run.locked():
            pass
    else:
        with run.locked():
            assert run.lock_holder() is None


def test_events_refused_by_a_full_filesystem_are_written_later_complete_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, 1 << 20

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        taken = real(descriptor, data[:room])
        room -= taken
        return taken

    log = EventLog(tmp_path / "events.jsonl", 1)
    monkeypatch.setattr(os, "write", limited)
    steps = itertools.count(1)
    log.write("step", step=next(steps))
    for free in (20, 0, 1, 0, 500):  # free bytes end in the middle of a line, then none, then more
        room = free
        for _ in range(3):
            log.write("step", step=next(steps))
    room = 0
    log.write("step", step=next(steps))
    room = 1 << 20
    log.close()
    assert [e["step"] for e in read_events(tmp_path / "events.jsonl")] == list(range(1, 18))


def test_beginning_a_commit_removes_incomplete_saves_of_older_attempts(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    old = start(run)
    one = commit(run, 1, old)
    torn = commits.begin(run, CommitName(2, old))
    (torn / "rank_0.bin").write_bytes(b"half")
    new = start(run, one)
    assert commits.begin(run, CommitName(2, new)).is_dir()
    assert not torn.exists()
    again = commits.begin(run, CommitName(3, old))  # a stale attempt removes nothing of a newer one
    assert again.is_dir()
    assert (run.checkpoints / f".{CommitName(2, new)}.partial").is_dir()


def test_readers_skip_incomplete_lines_and_stale_attempts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    old = EventLog(path, 1)
    old.write("step", step=1, loss=float("nan"))
    with path.open("a") as stream:
        stream.write('{"event": "step", "step": 2, "att')  # killed while writing
    new = EventLog(path, 2)
    new.write("step", step=1, reward_mean=0.5)
    old.write("step", step=3)  # written late by a lost node
    events = read_events(path)
    assert [(e["attempt"], e["step"]) for e in events] == [(1, 1), (2, 1)]
    assert events[0]["loss"] == "nan"
    assert steps_of(events)[1]["reward_mean"] == 0.5
    for line in path.read_text().splitlines()[:1]:
        assert set(json.loads(line)) >= {"event", "time", "attempt", "step"}


def test_load_takes_a_commit_or_a_run_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(CheckpointError, match="has not committed anything"):
        commits.source(run.path)
    name = commit(run, 3, start(run))
    assert commits.source(run.path) == commits.source(run.checkpoints / str(name))
    with pytest.raises(CheckpointError):
        commits.source(tmp_path)


def test_a_restart_in_place_continues_from_its_own_commits(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt = start(run)
    two = commit(run, 2, attempt)
    run.record_start(attempt, two)
    assert run.lineage() == [two]
    four = commit(run, 4, attempt, b"damaged later")
    assert commit(run, 4, attempt, b"done again") == four
    assert commits.newest_intact(run)[0] == four


def test_a_command_that_looks_for_the_holder_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    """``orhpc status`` and ``orhpc runs`` hold a shared lock for an instant."""
    rundir = RunDir(tmp_path)
    with rundir.locked():
        pass
    reader = (tmp_path / "lock").open()
    fcntl.flock(reader, fcntl.LOCK_SH)
    threading.Timer(0.05, reader.close).start()
    with rundir.locked():
        assert rundir.lock_holder() is not None
