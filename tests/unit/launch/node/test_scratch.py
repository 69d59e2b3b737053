"""Files of attempts that have ended are removed from a node; files of live processes are not."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orhpc.launch.node import processes, scratch
from orhpc.launch.node.scratch import Scratch, StateFolder, sweep, sweep_job_folders, sweep_shared_memory


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_shared_memory_is_removed_after_its_creator_ends_unless_it_is_mapped(
    tmp_path: Path, dead_pid: int
) -> None:
    names = {
        "left": f"torch_{dead_pid}_1_0",
        "mapped": f"torch_{dead_pid}_1_1",
        "of_a_living_process": f"torch_{os.getpid()}_1_0",
        "of_something_else": f"torch_{dead_pid}_x",
    }
    for name in names.values():
        (tmp_path / name).write_bytes(b"x" * 4096)
    with (tmp_path / names["mapped"]).open("r+b") as stream, mmap.mmap(stream.fileno(), 4096):
        assert sweep_shared_memory(tmp_path) == [tmp_path / names["left"]]
    assert {f.name for f in tmp_path.iterdir()} == set(names.values()) - {names["left"]}
    assert sweep_shared_memory(tmp_path) == [tmp_path / names["mapped"]]


def test_memory_of_a_restarted_part_is_removed_during_the_attempt(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (tmp_path / f"torch_{dead_pid}_1_{n}" for n in (0, 1))
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (time.time() - 60,) * 2)
    monkeypatch.setattr(scratch, "sweep_shared_memory", partial(sweep_shared_memory, tmp_path))
    sweeper = scratch.SharedMemorySweeper(every_s=60.0)
    sweeper.tick()
    assert list(tmp_path.iterdir()) == [new]  # a process may be about to map it
    os.utime(new, (time.time() - 60,) * 2)
    sweeper.tick()
    assert new.exists()  # the last sweep was a moment ago


def test_the_folder_of_a_killed_attempt_is_swept_and_that_of_a_live_one_is_not() -> None:
    living = Scratch()
    code = "from orhpc.launch.node.scratch import Scratch; import time; held = Scratch(); "
    code += "print(held.path, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = Path(process.stdout.readline().strip())
        assert other not in sweep(other.parent)
        process.kill()
        process.wait()
    assert other in sweep(other.parent)
    assert not other.exists()
    assert living.temporary.is_dir()
    living.remove()
    assert not living.path.exists()


def test_a_folder_that_is_being_made_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock
    swept: list[Path] = []

    def after_another_start(lock: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        swept.extend(sweep(tmp_path, "folder-"))
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", after_another_start)
    folder = scratch.LockedFolder(tmp_path, "folder-")
    assert swept == sweep(tmp_path, "folder-") == []
    folder.remove()


def test_copies_of_the_state_are_private_and_swept_once_their_launcher_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_SHARED_MEMORY", tmp_path)
    first = StateFolder()
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    (first.path / "rank_00000.0.state").write_bytes(b"x")
    second = StateFolder()
    assert first.path.is_dir()  # its launcher is alive
    first._lock.close()  # as the kernel does when the launcher is killed
    third = StateFolder()
    assert not first.path.exists()
    third.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_stopping_a_child_ends_its_descendants(tmp_path: Path) -> None:
    """One descendant ignores SIGTERM, in its own session."""
    script = tmp_path / "tree.sh"
    script.write_text(
        'setsid bash -c \'trap "" TERM; echo $$ >stubborn.part; mv stubborn.part stubborn; '
        "while :; do sleep 1; done' &\nwait\n"
    )
    child = processes.spawn(["bash", "-c", f"cd {tmp_path}; . ./tree.sh"], log=tmp_path / "log")
    assert processes.wait_until((tmp_path / "stubborn").exists, 10)
    stubborn = int((tmp_path / "stubborn").read_text())
    start = time.monotonic()
    processes.stop_all(child, grace_s=1.0)
    assert time.monotonic() - start < 10
    assert not processes.alive(stubborn)
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("leads_to", ["nowhere", "itself", "file", "folder"])
def test_links_under_orhpc_s_names_have_no_effect(tmp_path: Path, leads_to: str) -> None:
    """Any user can create links in /tmp and /dev/shm, also to files of this user."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("orhpc-ray-planted", "torch_1_1_1", "orhpc-77-planted"):
        link = tmp_path / name
        link.symlink_to(link if leads_to == "itself" else tmp_path / leads_to)
    os.utime(tmp_path / "folder", (0, 0))
    assert sweep(tmp_path) == []
    assert sweep_shared_memory(tmp_path) == []
    sweep_job_folders({"77"}, tmp_path / "orhpc-77-own")
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "folder").is_dir()
