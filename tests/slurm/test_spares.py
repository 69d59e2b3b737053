"""Spare nodes replace lost ones: the job goes on, and is requeued only when none is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orhpc.launch.slurm.ledger import Reason
from orhpc.plan.placement import Placement
from orhpc.rundir.events import read_events, steps_of
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.kit import (
    Cost,
    JobRun,
    assert_back,
    assert_nothing_left,
    assert_whole,
    launch,
    note_replacement,
    orhpc,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_node_without_power_and_the_job_is_requeued_only_after_the_second(
    cluster: Cluster, root: Path
) -> None:
    often = ("train.steps=1000", "checkpoint.save_interval=2")
    run = launch(cluster, root, 2, *often, spares=1)
    run.wait_step(1, 2)
    first, second, spare = run.nodes()
    assert placed(run) == [first, second]

    cost = lose(run, second)
    assert cost.steps_lost <= 2
    assert placed(run) == [first, spare]
    assert run.run.newest_attempt() == 1
    assert restarts(run) == 0
    shown = json.loads(orhpc(cluster, "status", str(run.run.path), "--json").stdout)
    assert shown["spares"] == {"used": 1, "left": 0}
    cluster.power_on(int(second.removeprefix("n")))

    before, fault = run.committed(), time.time()
    cluster.power_off(int(spare.removeprefix("n")))
    outcome = run.wait_outcome(1)
    assert outcome.reason is Reason.NODE_LOST
    assert (outcome.replaced, outcome.excluded) == ([second], sorted([second, spare]))
    cluster.power_on(int(spare.removeprefix("n")))
    # Both are excluded from the next start, which needs three of the four nodes.
    wait_until(lambda: excluded(run) not in ("(null)", ""), 60, "the exclusion", run.report)
    assert cluster.run("scontrol", "show", "hostnames", excluded(run)).stdout.split() == outcome.excluded
    cluster.run("scontrol", "update", f"JobId={run.job}", "ExcNodeList=")
    run.comes_back(2)
    assert run.wait_step(2) > before
    assert restarts(run) == 1
    assert_back(run, 1, "power failure, no spare left", fault=fault, lost=2)
    cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    run.wait_outcome(2)
    for name in (second, spare):
        cluster.clear_files(int(name.removeprefix("n")))
    assert_nothing_left(run)
    assert orhpc(cluster, "status", str(run.run.path), "--ledger").returncode == 0  # each prompt once
    assert_whole(run.run, max(steps_of(read_events(run.run.events))))


def test_spares_replace_a_bad_node_at_the_start_and_then_one_whose_launcher_was_killed(
    cluster: Cluster, root: Path
) -> None:
    """The second holds an engine alone, so the run goes on from the trainer's copy in memory."""
    split = ("placement.mode=split", "placement.trainer_devices=1")
    health = """slurm.health_command='[ "$SLURMD_NODENAME" != n1 ]'"""
    run = launch(
        cluster, root, 2, "train.steps=1000", "checkpoint.save_interval=1000", *split, health, spares=2
    )
    run.wait_step(1, 4)
    assert run.nodes() == ["n0", "n1", "n2", "n3"]
    assert placed(run) == ["n0", "n2"]
    (bad,) = [e for e in read_events(run.run.events) if e["event"] == "node_replaced"]
    assert (bad["lost"], bad["spare"], bad["spares_left"]) == ("n1", "n2", 1)

    kill = ("pkill", "-KILL", "-f", "--", "-m orhpc.launch.node ")
    cost = lose(run, "n2", lambda: cluster.on_node(2, *kill), "a killed launcher, a spare")
    assert cost.steps_lost <= 1
    assert placed(run) == ["n0", "n3"]
    assert [e for e in read_events(run.run.events) if e["event"] == "bring_up"][-1]["copied"]
    assert (run.run.newest_attempt(), restarts(run)) == (1, 0)
    cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    outcome = run.wait_outcome(1)
    assert outcome.reason is Reason.CANCELLED
    assert (outcome.excluded, outcome.replaced) == (["n1", "n2"], ["n2"])
    # What a killed launcher leaves, the next start on that node would remove; first its processes must end.
    wait_until(lambda: not cluster.processes(), 45, "the end of all processes", run.report)
    cluster.clear_files(2)
    assert_nothing_left(run)
    assert orhpc(cluster, "status", str(run.run.path), "--ledger").returncode == 0  # each prompt once
    assert_whole(run.run, max(steps_of(read_events(run.run.events))))


def lose(
    run: JobRun,
    node: str,
    how: Callable[[], object] | None = None,
    what: str = "power failure, a spare",
) -> Cost:
    """Lose a node, by default by cutting its power; wait for the first new step, and return the cost."""
    fault = time.time()
    if how is None:
        run.cluster.power_off(int(node.removeprefix("n")))
    else:
        how()
    replaced = run.wait_event(lambda e: e["event"] == "node_replaced" and e["lost"] == node)
    run.wait_event(
        lambda e: e["event"] == "step" and e["time"] > replaced["time"] and e["step"] > replaced["step"]
    )
    return note_replacement(run, node, fault, what)


def placed(run: JobRun) -> list[str]:
    """Names of the nodes that take part, by index."""
    text = (run.run.attempt(run.run.newest_attempt()) / "placement.yaml").read_text()
    return [node.name for node in Placement.from_yaml(text).nodes]


def restarts(run: JobRun) -> int:
    return int(field(run, "Restarts"))


def excluded(run: JobRun) -> str:
    return field(run, "ExcNodeList")


def field(run: JobRun, name: str) -> str:
    shown = run.cluster.run("scontrol", "show", "job", "-o", run.job).stdout
    return shown.split(f" {name}=")[1].split(" ")[0]
