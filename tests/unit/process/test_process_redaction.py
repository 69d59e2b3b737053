"""No process of a run prints a secret: actors and servers redact logs and output."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.launch.node.ray_cluster import RayNode
from orhpc.process.ports import free_ports
from orhpc.process.secrets import REDACTED
from orhpc.process.terminal import to_server
from orhpc.rollout.engines.process import EngineProcess
from tests.ray_head import running_head

HOST = "127.0.0.1"
ALL, OWN, ACCOUNT, KEY = "hunter2-of-all", "hunter2-of-one", "hunter2-of-an-account", "hunter2-of-the-engine"
CONFIG = """
extends: {tiny}
secrets: {{all: env:ALL_SECRET}}
environments:
  orhpc/letters: {{serve: letters, secrets: {{own: "file:{file}"}}}}
"""
LEAK = f"""
import logging, sys, warnings
def leak(*_):
    for text in ("{ALL}", "{OWN}", "{ACCOUNT}"):
        print("printed", text)
        print("to standard error", text, file=sys.stderr)
        logging.getLogger("some.library").warning("logged %s", text)
    sys.stdout.flush()
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config with secrets from all kinds of sources."""
    (tmp_path / "own").write_text(OWN)
    (tmp_path / "own").chmod(0o600)
    path = tmp_path / "leaky.yaml"
    path.write_text(CONFIG.format(tiny=Path("configs/tiny.yaml").absolute(), file=tmp_path / "own"))
    monkeypatch.setenv("ALL_SECRET", ALL)
    monkeypatch.setenv("OPENREWARD_API_KEY", ACCOUNT)
    return path


# --- actors ---------------------------------------------------------------------------------------

DRIVER = (
    LEAK
    + """
import asyncio, os
from pathlib import Path
import ray
from orhpc.models.bundled import ensure
from orhpc.config.files import load_config
from orhpc.driver.fleet import Engines, Trainers, node_ids
from orhpc.plan.placement import Node, plan
from orhpc.driver.bring_up import ray_connect
from dataclasses import replace

config = load_config(sys.argv[1])
placement = replace(plan(config, (Node("n0", "127.0.0.1", 1),)), ray_address=sys.argv[2])
ray_connect(placement, Path(sys.argv[3]))
ids, model, logs = node_ids(placement.nodes), str(ensure("tiny")), Path(sys.argv[4])

async def main():
    trainers = await Trainers.start(config, placement, ids, model, print)
    engines = await Engines.start(config, placement, ids, model, logs, "hunter2-of-the-engine")
    (host,) = engines._engines[0].hosts
    for actor in (trainers.ranks[0], host):
        await actor.__ray_call__.remote(leak)

asyncio.run(main())
# In one call: Ray's threads print the actors' output to the same pipe at the same time.
os.write(1, b"\\ndone\\n")
sys.stdin.readline()
os._exit(0)
"""
)


@pytest.fixture
def head(tmp_path: Path, config: Path) -> Iterator[tuple[RayNode, str, Path]]:
    """Ray, with the secrets in its environment, as in a run."""
    with running_head(tmp_path, cpus=4) as running:
        yield running


@pytest.mark.slow
def test_actors_reveal_no_secret(head: tuple[RayNode, str, Path], config: Path, tmp_path: Path) -> None:
    node, address, token = head
    command = [sys.executable, "-c", DRIVER, str(config), address, str(token), str(tmp_path)]
    environment = {**os.environ, **node.environment()}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        # On a busy machine Ray shows the actors' output before the last line.
        output = list(itertools.takewhile(lambda line: line != "done\n", iter(driver.stdout.readline, "")))
        logs = node._scratch.ray / "session_latest" / "logs"
        found = "".join(p.read_text(errors="replace") for p in logs.glob("worker-*"))
        driver.communicate("\n", timeout=60)
    assert driver.returncode == 0
    assert "hunter2" not in "".join(output)
    for how in ("printed", "to standard error", "logged"):
        assert found.count(f"{how} {REDACTED}") == 6, (
            how
        )  # three from the trainer's actor, three from the engine's
    assert "hunter2" not in found


# --- servers --------------------------------------------------------------------------------------


def log_after_exit(process: EngineProcess, log: Path) -> str:
    process.start()
    end = time.monotonic() + 60
    while process.alive():
        assert time.monotonic() < end
        time.sleep(0.1)
    process.stop()
    return log.read_text()


@pytest.mark.slow
def test_a_cpu_engine_reveals_no_secret(config: Path, tmp_path: Path) -> None:
    """The name of the model folder contains all secrets, and the error message repeats that name."""
    folder, (port,) = f"/nowhere/{ALL}/{OWN}/{ACCOUNT}/{KEY}", free_ports(1, HOST)
    process = EngineProcess(load_config(config), folder, HOST, port, KEY, str(tmp_path / "log"), 0, threads=1)
    output = log_after_exit(process, tmp_path / "log")
    assert re.search("/nowhere" + f"/{re.escape(REDACTED)}" * 4, output)
    assert "hunter2" not in output


@pytest.mark.slow
@pytest.mark.parametrize("module", ["sglang_server", "sglang_router"])
def test_wrapped_servers_reveal_no_secret(config: Path, module: str) -> None:
    command = [
        sys.executable,
        "-m",
        f"orhpc.rollout.engines.{module}",
        "--api-key-file",
        f"/nowhere/{OWN}/{ACCOUNT}",
    ]
    command += ["--host", HOST, "--port", "1", "--request-timeout", "1"]
    command += ["--worker-urls", "http://127.0.0.1:1"]
    environment = {**os.environ, **to_server(load_config(config).secret_sources)}
    errors = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stderr
    assert f"/nowhere/{REDACTED}/{REDACTED}" in errors
    assert "hunter2" not in errors


@pytest.mark.slow
def test_sglangs_subprocesses_reveal_no_secret(config: Path) -> None:
    """A process that multiprocessing spawns imports its parent's program under another name."""
    code = (
        "import runpy\n"
        "runpy.run_module('orhpc.rollout.engines.sglang_server', run_name='__mp_main__')\n" + LEAK
    )
    code += f"logging.basicConfig()\nleak()\nraise SystemError('{OWN}')"
    environment = {**os.environ, **to_server(load_config(config).secret_sources)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.count(REDACTED) == 3
    assert done.stderr.count(REDACTED) == 7
    assert "SystemError" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_a_server_command_contains_no_secret_values(config: Path) -> None:
    (sources,) = to_server(load_config(config).secret_sources).values()
    assert "hunter2" not in sources
    assert json.loads(sources)[0] == {"all": "env:ALL_SECRET"}
