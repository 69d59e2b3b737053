"""What a failed call to an actor of a real Ray becomes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from orhpc.driver.fleet import actors
from orhpc.errors import InfraError, OrhpcError, OutOfMemory, RayLost
from tests.ray_head import running_head

DRIVER = """
import asyncio, os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from orhpc.config.files import load_config
from orhpc.driver.bring_up import ray_connect
from orhpc.driver.fleet.actors import call, node_ids, spawn
from orhpc.errors import RayLost
from orhpc.plan.placement import Node, plan

config = load_config("configs/tiny.yaml")
placement = replace(plan(config, (Node("n0", "127.0.0.1", 1),)), ray_address=sys.argv[1])
ray_connect(placement, Path(sys.argv[2]))
(node,) = node_ids(placement.nodes)

class Maker:
    def pid(self):
        return os.getpid()
    def make(self):
        time.sleep(600)
    def fail(self):
        raise ValueError("a fault of the program")

class Taker:
    def take(self, made):
        return made

async def main():
    maker, taker = (spawn(kind, node, config.secret_sources) for kind in (Maker, Taker))
    try:
        await call(taker.take.remote(maker.fail.remote()), "take")
    except ValueError as error:
        print("ValueError", "a fault of the program" in str(error))
    pid = await call(maker.pid.remote(), "pid")
    taking = asyncio.ensure_future(call(taker.take.remote(maker.make.remote()), "take"))
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    try:
        await taking
    except RayLost as error:
        print("RayLost", error)

asyncio.run(main())
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_an_argument_of_a_dead_actor_is_a_lost_actor(tmp_path: Path) -> None:
    """As if the called actor itself had died; what an actor raises stays a fault of the program."""
    with running_head(tmp_path, cpus=2) as (node, address, token):
        driver = subprocess.run(
            [sys.executable, "-c", DRIVER, address, str(token)], env={**os.environ, **node.environment()},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert driver.returncode == 0, driver.stderr[-3000:]
    raised, lost = (line for line in driver.stdout.splitlines() if line.startswith(("ValueError", "RayLost")))
    assert raised == "ValueError True"
    assert lost.startswith("RayLost take: an argument was lost: ")


def test_a_lack_of_memory_outside_a_step_has_its_class() -> None:
    """As of an export or a copy of the state, in which a rank converts no errors."""

    async def fails() -> None:
        raise RayTaskError("export_hf", "", cast(Any, RuntimeError("CUDA error: out of memory")))

    with pytest.raises(OutOfMemory, match="trainer export_hf: CUDA error: out of memory"):
        asyncio.run(actors.call(fails(), "trainer export_hf"))


async def ends(error: OrhpcError, after_s: float) -> None:
    await asyncio.sleep(after_s)
    raise error


def raised_by(*calls: tuple[OrhpcError, float]) -> tuple[str, float]:
    """The class of what is raised for calls that end so, and the seconds until then."""

    async def wait() -> None:
        await actors.call_all([ends(error, after_s) for error, after_s in calls], "trainer step")

    began = time.monotonic()
    with pytest.raises(OrhpcError) as failure:
        asyncio.run(wait())
    return type(failure.value).__name__, time.monotonic() - began


@pytest.mark.slow
def test_a_rank_without_memory_is_the_cause_of_the_collectives_that_fail_with_it() -> None:
    """Its peers may report first that it has closed its connections: the step has to be made smaller."""
    peer, cause = InfraError("step 1: gloo: connection closed by peer"), OutOfMemory("step 1: out of memory")
    assert raised_by((peer, 0.0), (peer, 0.1), (cause, 0.3))[0] == "OutOfMemory"
    assert raised_by((cause, 0.0), (peer, 0.0), (peer, 0.0))[0] == "OutOfMemory"


@pytest.mark.slow
def test_a_rank_that_died_is_the_cause_of_the_collectives_that_fail_with_it() -> None:
    peer, cause = InfraError("step 1: gloo: connection reset by peer"), RayLost("trainer step 1: it died")
    kind, seconds = raised_by((peer, 0.0), (cause, 0.3), (OutOfMemory("late"), 30.0))
    assert (kind, seconds < 2.0) == ("RayLost", True)


@pytest.mark.slow
def test_other_failures_wait_for_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, hangs = InfraError("step 1: gloo: connection closed by peer"), (OutOfMemory("late"), 30.0)
    kind, seconds = raised_by((RayLost("trainer step 0: the actor died"), 0.0), hangs)
    assert (kind, seconds < 1.0) == ("RayLost", True)
    kind, seconds = raised_by((peer, 0.0), (peer, 0.2))
    assert (kind, seconds < 2.0) == ("InfraError", True)
    monkeypatch.setattr(actors, "CAUSE_S", 0.3)
    kind, seconds = raised_by((peer, 0.0), (peer, 0.1), hangs)
    assert (kind, seconds < 2.0) == ("InfraError", True)
