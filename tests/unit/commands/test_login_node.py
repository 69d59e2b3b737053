"""Where only ``pip install orhpc`` was run: no package of ``orhpc[run]`` can be imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog

PROGRAM = """
import importlib.abc, json, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in {blocked} else found(name, *more)
from orhpc.commands.cli import main
print(json.dumps([main(line.split()) for line in sys.argv[1:]]))
"""


def modules_of(extra: str) -> set[str]:
    """Names to import of the packages that an extra adds."""
    lines = requires("orhpc") or []
    names = {re.split(r"[\[><=!~; ]", line)[0].lower() for line in lines if f'extra == "{extra}"' in line}
    return {module for module, packages in packages_distributions().items()
            if names & {package.lower() for package in packages}}  # fmt: skip


def codes_of(*lines: str) -> list[int]:
    """Exit codes of commands, in one process without the packages of ``orhpc[run]``."""
    blocked = modules_of("run")
    assert {"h5py", "numpy", "ray", "torch"} <= blocked
    program = [sys.executable, "-c", PROGRAM.format(blocked=sorted(blocked)), *lines]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "mine")
    run.create()
    run.config.write_text(dump_config(load_config("tiny.yaml")))
    log = EventLog(run.events, run.begin_attempt(kind="local"))
    log.write("step", step=1, steps=1, seconds=1.0, phases={"update": 1.0}, reward_mean=0.5)
    log.write("finished", step=1)
    log.close()
    (run.attempt(1) / "driver.log").write_text("2026-11-24 21:43:18,071 INFO orhpc.driver: finished\n")
    return run


@pytest.mark.slow
def test_commands_for_jobs_and_runs_need_no_package_of_the_nodes(run: RunDir) -> None:
    runs = (f"status {run.path}", f"runs {run.path.parent}", f"logs {run.path}", f"clean {run.path}")
    configs = ("files", "plan tiny.yaml", "launch tiny.yaml --dry-run", "completion bash", "doctor")
    lines = [*runs, *configs, f"init {run.path.parent / 'task'}"]
    assert codes_of(*lines) == [EXIT_OK] * len(lines)


@pytest.mark.slow
def test_commands_that_need_more_say_what_to_install(run: RunDir) -> None:
    lines = [f"{command} {run.path}" for command in ("report", "view", "chat")]
    assert codes_of(*lines, "try-env tiny.yaml") == [EXIT_PREFLIGHT] * 4
