"""Small files of a run directory: changes are detected, links not followed, other users' access refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orhpc.errors import CheckpointError, ConfigError
from orhpc.launch.slurm import holder, ledger
from orhpc.rundir import CommitName, RunDir, commits
from orhpc.rundir.commits import Manifest, ShardFile
from orhpc.rundir.sealed import Damaged, read_sealed, write_atomic, write_sealed

DAMAGED = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b'{"started_from": 3, "job": 3}', b'{"x": 1}']


def commit(run: RunDir, step: int, attempt: int, parent: str | None) -> CommitName:
    name = CommitName(step, attempt)
    folder = commits.begin(run, name)
    commits.finalize(folder, Manifest(step, attempt, parent, (), {"next_group": 7}))
    return name


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Attempt 1 committed steps 1 and 2; attempt 2 started from step 1 and committed 2 and 3."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.begin_attempt(kind="slurm", job="7", chain="7")
    run.record_start(1, None)
    one = commit(run, 1, 1, None)
    commit(run, 2, 1, str(one))
    run.begin_attempt(kind="slurm", job="8", chain="8")
    run.record_start(2, one)
    two = commit(run, 2, 2, str(one))
    commit(run, 3, 2, str(two))
    ledger.write(run, ledger.Outcome(1, ledger.Reason.CRASH, 2, "x", 1, "7"))
    return run


LINEAGE = ["step_3.a002", "step_2.a002", "step_1.a001"]


@pytest.mark.slow
@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_of_a_manifest_is_detected(run: RunDir, data: st.DataObject) -> None:
    folder = run.checkpoints / "step_3.a002"
    path, before = folder / commits.MANIFEST, commits.read_manifest(folder)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        assert commits.read_manifest(folder) == before
    except CheckpointError as error:
        assert str(folder) in str(error)
    finally:
        path.write_bytes(whole)


def test_a_commit_with_a_damaged_manifest_is_skipped(run: RunDir) -> None:
    path = run.checkpoints / "step_3.a002" / commits.MANIFEST
    path.write_text(path.read_text().replace('"next_group": 7', '"next_group": 8'))
    name, _, passed_over = commits.newest_intact(run)
    assert str(name) == "step_2.a002"
    assert "step_3.a002" in passed_over[0]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_start_file_is_replaced_by_the_commits_parents(run: RunDir, content: bytes) -> None:
    assert [str(c) for c in run.lineage()] == LINEAGE
    (run.attempt(2) / "start.json").write_bytes(content)
    assert [str(c) for c in run.lineage()] == LINEAGE
    (run.attempt(1) / "start.json").write_bytes(content)
    assert [str(c) for c in run.lineage()] == LINEAGE


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_start_file_without_commits_is_skipped(run: RunDir, content: bytes) -> None:
    run.begin_attempt()
    (run.attempt(3) / "start.json").write_bytes(content)
    assert [str(c) for c in run.lineage()] == LINEAGE


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_outcome_is_judged_again(
    run: RunDir, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (run.attempt(1) / "outcome.json").write_bytes(content)
    assert [o.attempt for o in ledger.read(run)] == [1, 2]
    assert "attempts/001/outcome.json" in caplog.text
    outcome = ledger.outcome_of(run, 1)
    assert outcome is not None


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_holder_file_is_replaced_by_the_newest_attempt_s_job(
    run: RunDir,
    content: bytes,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (run.path / "holder.json").write_bytes(content)
    (run.path / "submitted.json").write_bytes(content)
    assert holder.holder_of(run) == "8"
    assert holder.known_jobs(run) == ["8"]
    assert "holder.json is damaged" in caplog.text
    holder.claim(run, "9")
    assert holder.holder_of(run) == "9"


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_attempt_file_is_ignored(run: RunDir, content: bytes) -> None:
    (run.attempt(1) / "attempt.json").write_bytes(content)
    assert [o.attempt for o in ledger.read(run)] == [2]
    assert ledger.jobs(run) == {"8"}


def test_records_of_an_earlier_release_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"job": "7"}')
    assert read_sealed(path, ("job", "time")) == {"job": "7"}
    with pytest.raises(Damaged, match=r"a\.json"):
        read_sealed(path, ("time",))
    write_sealed(path, {"job": "7", "of": (1, 2)})
    assert read_sealed(path, ()) == {"job": "7", "of": [1, 2]}


def test_a_shard_file_is_read_back(tmp_path: Path) -> None:
    manifest = Manifest(1, 1, None, (ShardFile("a", 1, "b"),), {})
    path = tmp_path / commits.MANIFEST
    commits.write_sealed(path, json.loads(json.dumps(commits.asdict(manifest))))
    assert commits.read_manifest(tmp_path) == manifest


def test_writing_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "a.json"
    path.symlink_to(precious)
    (tmp_path / f".a.json.{os.getpid()}").symlink_to(precious)
    write_atomic(path, "new")
    assert precious.read_text() == "mine"
    assert path.read_text() == "new"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def _mode(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o777)


def _group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "buffer").chmod(0o770)


def _owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


@pytest.mark.parametrize(
    ("change", "output"), [(_mode, "chmod go-w"), (_group, "chmod go-w"), (_owner, "another user")]
)
def test_a_run_directory_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Any], None], output: str
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    change(run.path, monkeypatch)
    with pytest.raises(ConfigError, match=rf"{output}"):
        run.create()
