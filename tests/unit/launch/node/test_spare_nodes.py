"""What the first node, a spare and the attempt do when a node is lost, and at the start."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_REQUEUE, NodeLost, PreflightError
from orhpc.launch.node import rendezvous, spare_nodes
from orhpc.launch.node.beacon import Cause, Loss, NodeWatch
from orhpc.launch.node.job_attempt import JobAttempt, Superseded
from orhpc.launch.node.other_node import Head, _wait_for_place
from orhpc.launch.node.outcome_recorder import OutcomeRecorder
from orhpc.launch.node.rendezvous import NodeReady
from orhpc.launch.node.spare_nodes import PlaceLost, SpareNodes
from orhpc.launch.slurm import ledger
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Reason
from orhpc.launch.slurm.preempt import Signals
from orhpc.plan.placement import Node, Placement
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.event_lines import spares_of
from orhpc.rundir.events import EventLog, read_events
from tests.unit.launch.node.nodes import names, ready

HOST = "127.0.0.1"


# --- what the first node does about it ----------------------------------------------------------


class Watched(NodeWatch):
    """Nodes are lost when the test says so."""

    def __init__(self) -> None:
        super().__init__(list)
        self.losses: list[Loss] = []
        self.watched: list[str] = []

    def start(self) -> None: ...

    def look_now(self) -> None: ...

    def watch(self, nodes: list[NodeReady]) -> None:  # type: ignore[override]
        self.watched = names(nodes)

    def lost(self) -> list[Loss]:
        return [loss for loss in self.losses if loss.name in self.watched]


class Kit:
    """The spare nodes of an attempt: three nodes and two spares, if they all join."""

    def __init__(self, folder: Path) -> None:
        self.config: Config = load_config(
            Path("configs/tiny.yaml"),
            [f"run.root={folder}", "run.name=run", "placement.nodes=3", "slurm.spares=2"],
        )
        self.rundir = RunDir(folder / "run")
        self.rundir.create()
        self.attempt = self.rundir.begin_attempt(kind="slurm", job="7", chain="7")
        (self.rundir.attempt(self.attempt) / "nodes").mkdir()
        self.output = folder / "slurm-7.out"
        self.output.write_text("")
        self.job = Job("7", 0, 0, 5, "n0", "7", folder, output=self.output)
        self.recorder = OutcomeRecorder(self.job, self.config, self.rundir)
        self.watch = Watched()
        self.spares = SpareNodes(self.rundir, self.attempt, self.config, self.recorder, self.watch)

    def events(self, kind: str) -> list[dict[str, object]]:
        return [e for e in read_events(self.rundir.events) if e["event"] == kind]

    def lose(self, name: str, cause: Cause = Cause.SILENT, since_s: float = 7.0) -> None:
        self.watch.losses.append(Loss(name, cause, since_s))


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def test_a_lost_node_is_replaced_recorded_and_told(kit: Kit) -> None:
    kit.spares.begin([ready(rank) for rank in (1, 2, 3, 4)])
    kit.spares.require()
    kit.lose("n2")
    with pytest.raises(PlaceLost, match="n2: does not answer") as lost:
        kit.spares.require()
    assert kit.spares.replace(lost.value)
    kit.spares.require()
    assert names(kit.spares.roster.placed) == ["n1", "n3"]
    assert kit.watch.watched == ["n1", "n3", "n4"]
    assert [node.name for node in kit.recorder.others] == ["n1", "n3"]
    assert rendezvous.is_replaced(kit.rundir, kit.attempt, 2)
    assert not rendezvous.is_replaced(kit.rundir, kit.attempt, 3)
    (event,) = kit.events("node_replaced")
    told = {key: event[key] for key in ("lost", "spare", "seconds", "step", "spares_left")}
    assert told == {"lost": "n2", "spare": "n3", "seconds": 7.0, "step": 0, "spares_left": 1}
    assert spares_of(read_events(kit.rundir.events)) == (1, 1)
    kit.recorder.record(kit.attempt, EXIT_REQUEUE)
    (outcome,) = ledger.read(kit.rundir)
    assert (outcome.excluded, outcome.replaced) == (["n2"], ["n2"])


def test_a_replaced_node_is_readmitted_once_slurm_knows_about_it_and_a_bad_one_is_not(kit: Kit) -> None:
    kit.spares.begin([ready(1, "its GPU fell off the bus"), *(ready(rank) for rank in (2, 3, 4))])
    kit.lose("n2")
    with pytest.raises(PlaceLost) as lost:
        kit.spares.require()
    assert kit.spares.replace(lost.value)
    kit.recorder.record(kit.attempt, EXIT_REQUEUE)
    (outcome,) = ledger.read(kit.rundir)
    assert (outcome.excluded, outcome.replaced, outcome.bad) == (["n1", "n2"], ["n2"], ["n1"])
    later = ledger.Outcome(2, Reason.PREEMPTED, 3, chain="7")
    assert ledger.to_readmit([outcome], "7") == []
    assert ledger.to_readmit([outcome, later], "7") == ["n2"]


def test_a_loss_that_ends_the_attempt_readmits_no_bad_node() -> None:
    ended = ledger.Outcome(
        1, Reason.NODE_LOST, 3, chain="7", excluded=["n1", "n2", "n3"], replaced=["n2"], bad=["n1"]
    )
    later = ledger.Outcome(2, Reason.PREEMPTED, 3, chain="7")
    assert ledger.to_readmit([ended, later], "7") == ["n2", "n3"]


def test_a_bad_node_at_the_start_is_replaced_by_a_spare(kit: Kit) -> None:
    kit.spares.begin([ready(1, "n1: gpus: found 7, need 8"), *(ready(rank) for rank in (2, 3, 4))])
    assert names(kit.spares.roster.placed) == ["n2", "n3"]
    (event,) = kit.events("node_replaced")
    assert (event["lost"], event["spare"], event["seconds"]) == ("n1", "n3", 0)
    assert "found 7, need 8" in str(event["error"])
    kit.recorder.record(kit.attempt, EXIT_REQUEUE)
    (outcome,) = ledger.read(kit.rundir)
    assert outcome.reason is not Reason.BAD_NODE
    assert outcome.excluded == ["n1"]


def test_a_bad_spare_is_noticed_and_replaces_nobody(kit: Kit) -> None:
    kit.spares.begin([ready(1), ready(2), ready(3), ready(4, "n4: gpus: found 7, need 8")])
    assert kit.events("node_replaced") == []
    (notice,) = kit.events("notice")
    assert "found 7, need 8" in str(notice["reason"])
    assert spares_of(read_events(kit.rundir.events)) == (0, 1)


def test_without_a_spare_left_the_attempt_ends_and_the_next_start_excludes_the_node(kit: Kit) -> None:
    kit.spares.begin([ready(1), ready(2)])
    kit.lose("n1", since_s=spare_nodes.PATIENCE_S + 1)
    with pytest.raises(PlaceLost) as lost:
        kit.spares.require()
    assert not kit.spares.replace(lost.value)
    kit.recorder.record(kit.attempt, EXIT_REQUEUE, lost.value)
    (outcome,) = ledger.read(kit.rundir)
    assert (outcome.reason, outcome.exit_code, outcome.excluded) == (Reason.NODE_LOST, EXIT_REQUEUE, ["n1"])


def test_silence_of_more_nodes_than_there_are_spares_may_be_the_network(kit: Kit) -> None:
    kit.spares.begin([ready(rank) for rank in (1, 2, 3)])
    for name in ("n1", "n2", "n3"):
        kit.lose(name, since_s=20)
    kit.spares.require()
    kit.watch.losses = [Loss(loss.name, loss.cause, 61.0) for loss in kit.watch.losses]
    with pytest.raises(PlaceLost):
        kit.spares.require()


def test_a_launcher_that_keeps_ending_counts_against_the_budget(kit: Kit) -> None:
    """A failing environment server ends launchers too; a requeue without a budget would repeat it forever."""
    kit.spares.begin([ready(1), ready(2)])
    with kit.output.open("a") as output:
        output.write("srun: error: n1: task 1: Exited with exit code 75\n")
    kit.lose("n1", Cause.ENDED)
    with pytest.raises(PlaceLost) as lost:
        kit.spares.require()
    assert not kit.spares.replace(lost.value)
    kit.recorder.record(kit.attempt, EXIT_REQUEUE, lost.value)
    (outcome,) = ledger.read(kit.rundir)
    assert (outcome.reason, outcome.excluded) == (Reason.INFRASTRUCTURE, [])


def test_a_launcher_that_refuses_is_not_replaced_by_one_that_would_refuse_too(kit: Kit) -> None:
    kit.spares.begin([ready(rank) for rank in (1, 2, 3)])
    with kit.output.open("a") as output:
        output.write("srun: error: n1: task 1: Exited with exit code 2\n")
    kit.lose("n1", Cause.ENDED)
    with pytest.raises(PlaceLost) as lost:
        kit.spares.require()
    assert not kit.spares.replace(lost.value)
    kit.recorder.record(kit.attempt, EXIT_REQUEUE, lost.value)
    assert [(o.reason, o.exit_code) for o in ledger.read(kit.rundir)] == [(Reason.REFUSED, 2)]


def test_a_lost_spare_is_dropped_and_told(kit: Kit) -> None:
    kit.spares.begin([ready(rank) for rank in (1, 2, 3, 4)])
    kit.lose("n3", Cause.ENDED)
    kit.spares.require()
    assert names(kit.spares.roster.spares) == ["n4"]
    assert spares_of(read_events(kit.rundir.events)) == (0, 1)
    assert "n3: its launcher ended" in str(kit.events("notice")[0]["reason"])
    assert kit.recorder.replaced == ["n3"]


def test_a_node_that_joins_late_is_a_spare(kit: Kit) -> None:
    kit.spares.begin([ready(1), ready(2)])
    rendezvous.join(kit.rundir, kit.attempt, ready(4))
    kit.spares._late_at = 0.0
    kit.spares.require()
    assert names(kit.spares.roster.spares) == ["n4"]
    assert kit.watch.watched == ["n1", "n2", "n4"]


# --- the attempt --------------------------------------------------------------------------------


def attempt_of(kit: Kit) -> JobAttempt:
    node = Node("n0", HOST, 1)
    made = JobAttempt(
        kit.rundir, kit.attempt, kit.config, node, kit.job, Signals(kit.job.stop_file), kit.recorder
    )
    made._spares = kit.spares
    return made


def test_the_attempt_goes_on_with_the_spare_in_the_placement(kit: Kit) -> None:
    for rank in (1, 2, 3, 4):
        rendezvous.join(kit.rundir, kit.attempt, ready(rank))
    attempt = attempt_of(kit)
    attempt.place(*attempt.gather({"e": ["http://own:1"]}))
    kit.lose("n1")
    with pytest.raises(PlaceLost) as lost:
        attempt.require_nodes()
    assert attempt.continues_after(lost.value)
    placement = attempt._placement
    assert placement is not None
    assert [node.name for node in placement.nodes] == ["n0", "n3", "n2"]
    assert placement.environments["e"][1:] == ["http://10.0.0.3:1", "http://10.0.0.2:1"]
    assert not attempt.continues_after(Superseded("a newer attempt has begun"))


def test_an_attempt_that_was_asked_to_stop_replaces_nothing(kit: Kit) -> None:
    for rank in (1, 2, 3, 4):
        rendezvous.join(kit.rundir, kit.attempt, ready(rank))
    attempt = attempt_of(kit)
    attempt.gather({})
    kit.lose("n1")
    kit.job.stop_file.touch()
    attempt.require_nodes()
    assert not attempt.continues_after(PlaceLost(kit.watch.lost()))


def test_too_many_bad_nodes_still_end_the_attempt(kit: Kit) -> None:
    rendezvous.join(kit.rundir, kit.attempt, ready(1))
    for rank in (2, 3, 4):
        rendezvous.join(kit.rundir, kit.attempt, ready(rank, f"n{rank}: disk: full"))
    with pytest.raises(NodeLost, match="n2: disk: full"):
        attempt_of(kit).gather({})
    assert kit.recorder.lost == ["n2", "n3", "n4"]


# --- the rendezvous -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_node_does_not_wait_long_for_spares(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SPARES_S", 0.3)
    for rank in (1, 4):
        rendezvous.join(kit.rundir, kit.attempt, ready(rank))
    began = time.monotonic()
    found = rendezvous.gather(kit.rundir, kit.attempt, 5, 60, lambda: None, spares=2)
    assert names(found) == ["n1", "n4"]
    assert 0.3 <= time.monotonic() - began < 20


@pytest.mark.slow
def test_without_enough_nodes_the_rendezvous_fails_as_without_spares(kit: Kit) -> None:
    rendezvous.join(kit.rundir, kit.attempt, ready(1))
    rendezvous.join(kit.rundir, kit.attempt, ready(2, "n2: disk: full"))
    with pytest.raises(NodeLost, match="node 3, 4 of 5 did not join"):
        rendezvous.gather(kit.rundir, kit.attempt, 5, 0.3, lambda: None, spares=2)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["named", "ended", "dropped"])
def test_a_spare_waits_until_the_placement_names_it_or_does_without_it(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("orhpc.launch.node.other_node._LOOK_S", 0.0)
    placed = kit.rundir.attempt(kit.attempt) / "placement.yaml"

    def write(*nodes: str) -> None:
        listed = tuple(Node(name, HOST, 1) for name in nodes)
        write_atomic(placed, Placement(listed, (), (), (), {}, ray_address=f"{HOST}:1").to_yaml())

    write("n0", "n1")
    job = Job("7", 0, 2, 3, "n2", "7", kit.rundir.path)
    signals = Signals.__new__(Signals)
    signals.received = []
    found: list[bool] = []
    head = Head(placed)
    work = threading.Thread(
        target=lambda: found.append(_wait_for_place(job, kit.rundir, kit.attempt, head, signals))
    )
    work.start()
    time.sleep(0.5)
    assert work.is_alive()
    if end == "named":
        write("n0", "n2")
    elif end == "ended":
        rendezvous.end(kit.rundir, kit.attempt, 0)
    else:
        rendezvous.mark_replaced(kit.rundir, kit.attempt, 2)
    work.join(10)
    assert found == [end == "named"]


def test_status_counts_the_spares_of_the_newest_attempt_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog(path, 1)
    first.write("spares", names=["n3", "n4"])
    first.write("node_replaced", error="n1: does not answer", spares_left=1)
    assert spares_of(read_events(path)) == (1, 1)
    second = EventLog(path, 2)
    second.write("bring_up", step=1)
    assert spares_of(read_events(path)) is None
    first.close()
    second.close()


def test_a_refusal_at_the_start_ends_the_job_with_spares_too(kit: Kit) -> None:
    for rank in (1, 2, 3):
        rendezvous.join(kit.rundir, kit.attempt, ready(rank))
    refused = NodeReady(4, "n4", problem="no such model", refused=True)
    rendezvous.join(kit.rundir, kit.attempt, refused)
    with pytest.raises(PreflightError, match="n4: no such model"):
        attempt_of(kit).gather({})
