"""``run.access: group``: a colleague reads everything of a run but its keys, others nothing."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orhpc.process.access import apply_access
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import EventLog
from tests.local import kit
from tests.security.conftest import Stranger


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user of the machine may enter, unlike pytest's own."""
    before = os.umask(0o077)  # the run must not depend on the user's
    with tempfile.TemporaryDirectory(prefix="orhpc-test-") as name:
        Path(name).chmod(0o755)
        monkeypatch.setenv("ORHPC_ACCESS", "private")
        yield Path(name)
    os.umask(before)


@pytest.fixture
def colleague(stranger: Stranger) -> Iterator[Stranger]:
    """Another user, of the group of this user's files."""
    found = Stranger(group=os.getgid())
    yield found
    found.close()


def closed_to_group(folder: Path) -> set[str]:
    """Names below a folder, and its own, that the group cannot read."""
    closed = set()
    for path in [folder, *folder.rglob("*")]:
        wanted = 0o050 if path.is_dir() else 0o040
        if not path.is_symlink() and path.stat().st_mode & wanted != wanted:
            closed.add(path.name)
    return closed


@pytest.mark.slow
def test_a_colleague_reads_a_running_run_but_not_its_keys(
    shared: Path, colleague: Stranger, stranger: Stranger
) -> None:
    rundir = RunDir(shared / "tiny")
    settings = ["run.access=group", "train.steps=1000", "tensorboard.enabled=true", "train.profile_steps=[1]"]
    with kit.started(shared, *settings, env={"WANDB_MODE": "offline"}) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "commit" and e["step"] >= 2)
        attempt = rundir.attempt(1)
        keys = {"engine.key", "environment.key", "ray.token"}
        assert {path.name for path in attempt.iterdir() if path.suffix in (".key", ".token")} == keys
        for name in keys:
            assert stat.S_IMODE((attempt / name).stat().st_mode) == 0o600
            with pytest.raises(OSError, match="Permission"):
                colleague("opened", str(attempt / name))
        assert closed_to_group(rundir.path) - keys == set()
        for path in (rundir.events, rundir.config, attempt / "driver.log"):
            assert colleague("opened", str(path))
            with pytest.raises(OSError, match="Permission"):
                stranger("opened", str(path))
    open_to_others = [p for p in rundir.path.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o027]
    assert [p for p in open_to_others if p.stat().st_mode & 0o022] == []
    assert stat.S_IMODE(rundir.path.stat().st_mode) == 0o750


def test_access_can_change_between_starts(
    shared: Path, colleague: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(shared / "mine")
    rundir.create()
    EventLog(rundir.events, 1).close()
    write_atomic(rundir.path / "notes.json", "{}")
    attempt = rundir.attempt(rundir.begin_attempt())
    (attempt / "engine.key").write_text("k")
    (attempt / "engine.key").chmod(0o600)
    assert stat.S_IMODE(rundir.path.stat().st_mode) == 0o700
    apply_access(rundir.path, "group")
    assert closed_to_group(rundir.path) == {"engine.key"}
    assert colleague("opened", str(attempt / "attempt.json"))
    apply_access(rundir.path, "private")
    with pytest.raises(OSError, match="Permission"):
        colleague("opened", str(attempt / "attempt.json"))


def test_a_folder_that_others_can_write_to_is_still_refused(shared: Path) -> None:
    from orhpc.errors import ConfigError

    rundir = RunDir(shared / "mine")
    rundir.create()
    rundir.path.chmod(0o770)
    with pytest.raises(ConfigError, match="other users can write"):
        rundir.create(access="group")


def test_the_set_group_id_of_a_project_s_folder_is_kept(shared: Path) -> None:
    shared.chmod(0o2755)
    rundir = RunDir(shared / "mine")
    rundir.create(access="group")
    assert stat.S_IMODE(rundir.path.stat().st_mode) == 0o2750
    assert rundir.attempts.stat().st_mode & stat.S_ISGID
