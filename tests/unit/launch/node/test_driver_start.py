"""The driver of a single node imports its libraries while Ray starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.errors import EXIT_FAILED
from orhpc.launch.node import first_node
from orhpc.launch.node.first_node import Attempt
from orhpc.plan.placement import Node
from orhpc.rundir import RunDir

NODE = Node("n0", "127.0.0.1", cpus=8)


class StartingRay:
    """Ray's head of a single node, which starts when it is waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.folder = "first"

    def begin_head(self) -> None: ...

    def await_head(self) -> str:
        return "127.0.0.1:1"

    def joined(self) -> bool:
        return True

    def environment(self) -> dict[str, str]:
        return {"TMPDIR": self.folder}

    def stop(self) -> None: ...


class RestartedRay(StartingRay):
    """Its head ends once, and is started again with other folders."""

    def await_head(self) -> str:
        self.folder = "second"
        return super().await_head()


@pytest.mark.parametrize(("ray", "begun"), [(StartingRay, ["first"]), (RestartedRay, ["second"])])
def test_a_driver_loads_while_ray_starts_and_begins_once_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: type[StartingRay], begun: list[str]
) -> None:
    stand_in = 'read line && echo "$line $TMPDIR" >> "$1"'
    out, rundir = tmp_path / "out", RunDir(tmp_path / "run")
    rundir.create()
    monkeypatch.setattr(first_node, "RayNode", ray)
    spawn, loaded = first_node.processes.spawn, []

    def spawned(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-m", "orhpc.driver"]
        assert "--on-line" in command
        loaded.append(options["env"]["TMPDIR"])
        return spawn(["bash", "-c", stand_in, "bash", str(out)], **options)

    monkeypatch.setattr(first_node.processes, "spawn", spawned)
    config = load_config(Path("configs/tiny.yaml"), [f"run.root={tmp_path}", "run.name=run"])
    number = rundir.begin_attempt(kind="local")
    attempt = Attempt(rundir, number, config, NODE, tmp_path / "stop")
    begins = attempt._begin_ray()
    assert loaded == ["first"]
    assert attempt._driver is not None
    assert attempt._driver.poll() is None
    assert not out.exists()
    attempt.place((NODE,), {})
    attempt._start_driver(begins)
    assert attempt._driver.wait(10) == 0
    assert out.read_text().split("\n")[:-1] == [f"begin {folder}" for folder in begun]
    assert loaded == list(dict.fromkeys(["first", *begun]))


@pytest.mark.slow
def test_a_driver_that_waits_to_begin_ends_with_its_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orhpc.driver", str(tmp_path), "1", "--stop-file", "s", "--on-line"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert done.returncode == EXIT_FAILED
    assert list(tmp_path.iterdir()) == []
