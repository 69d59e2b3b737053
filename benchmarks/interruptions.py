"""Interrupt one run repeatedly on a real four-node SLURM on this machine, and check that it recovers.

    python -m benchmarks.interruptions [--seed 7] [--count 30] [--out TABLE.md]

A job of two nodes trains the tiny model and commits every five steps.  It is interrupted ``--count`` times at
random moments, a few steps after the previous recovery. A seeded generator draws the kinds of
:mod:`benchmarks.slurm_faults`; each is drawn once before any is repeated.

A run has recovered ("back") when it has made a step newer than any made before the fault, without help from a
person. Repairs by the site (restarting a node, slurmd or slurmctld, freeing space) do not count as help;
nodes and slurmd are restarted only after the run has recovered. "Reached" is the newest step before the run
stopped, "from" the step from which it continued. The time is from the fault to the first newer step (if
nothing had to be started, to the step that ended the longest pause since). SLURM's share is from the end of
the old attempt, or from the fault if the job received no signal, to the first line of the batch script.

At the end every step must have been trained exactly once in the run's lineage, no process or file may be left
on any node, and there must be one W&B run. The exit code is 1 otherwise, or if the run failed to recover at
least once.

Needs root and Debian's slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.slurm_faults import KINDS, Kind, Scene, drawn, environment
from benchmarks.slurm_job import cluster
from orhpc.launch.slurm import ledger
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.kit import (
    assert_nothing_left,
    assert_one_wandb_run,
    assert_whole,
    sbatch,
)

Events = list[dict[str, Any]]
WORDS = ("train.steps=1000000", "checkpoint.save_interval=5")
OPTIONS = ("--partition=low", "--nodes=2", "--signal=B:USR2@100")
STORAGE_MB = 400
BACK_S = 300.0
"""Seconds; a run that needs longer has not recovered."""
QUIET_S = 20.0
"""Seconds to watch a fault that needs no new attempt: its effect may be delayed."""
GONE_S = 90.0
"""Seconds after the return within which all processes of earlier attempts must have ended."""
_WORKING = {"idle", "allocated", "mixed"}


@dataclass(frozen=True)
class Row:
    """The cost of one interruption."""

    kind: str
    reached: int
    resumed: int
    attempts: int
    restarts: int
    trainers: int
    """Restarts of the trainers alone."""
    to_step_s: float
    slurm_s: float | None
    problem: str = ""
    """Why the run did not recover; empty if it did."""

    @property
    def lost(self) -> int:
        return self.reached - self.resumed

    @property
    def needed(self) -> str:
        if self.attempts:
            return "new attempt" if self.attempts == 1 else f"{self.attempts} new attempts"
        if self.restarts:
            return "restart in place" if self.restarts == 1 else f"{self.restarts} restarts in place"
        return "trainers restarted" if self.trainers else "neither"

    def cells(self) -> list[str]:
        slurm = "-" if self.slurm_s is None else f"{self.slurm_s:.1f}"
        back = "**no**" if self.problem else "yes"
        numbers = [str(self.reached), str(self.resumed), str(self.lost)]
        return [self.kind, *numbers, self.needed, f"{self.to_step_s:.1f}", slurm, back]


# --- reading the events ----------------------------------------------------------------------------


def steps(events: Events) -> list[int]:
    return [e["step"] for e in events if e["event"] == "step"]


@dataclass(frozen=True)
class Return:
    """How a run continued after a fault, according to its events so far."""

    reached: int
    resumed: int
    first: float | None
    """When the first step newer than all before was made; None: not yet."""
    in_attempt: int
    """The attempt that made it."""
    made: int
    """Number of steps since, including this one."""


def look(events: Events, fault: float) -> Return:
    """Find the first new step after a fault, the newest step before it, and the step resumed from."""
    before = [e for e in events if e["time"] <= fault]
    after = [e for e in events if e["time"] > fault]
    ups = [i for i, e in enumerate(after) if e["event"] == "bring_up"]
    begin = ups[0] if ups else 0
    reached = max(steps(before) + steps(after[:begin]))
    made = [i for i in range(begin, len(after)) if after[i]["event"] == "step"]
    newer = [i for i in made if after[i]["step"] > reached]
    if not newer:
        return Return(reached, reached, None, 0, 0)
    if not ups:
        return longest_pause(before, [after[i] for i in made])
    own = [i for i in ups if i < newer[0]]
    resumed = int(after[own[-1]]["step"]) if own else reached
    first = after[newer[0]]
    return Return(reached, resumed, first["time"], first["attempt"], len(newer))


def longest_pause(before: Events, made: Events) -> Return:
    """For a run that continues without a new attempt: the fault may take effect some steps later."""
    last = max((e["time"] for e in before if e["event"] == "step"), default=made[0]["time"])
    pauses = [e["time"] - p for e, p in zip(made, [last, *(e["time"] for e in made)], strict=False)]
    i = pauses.index(max(pauses))
    reached = made[i]["step"] - 1
    return Return(reached, reached, made[i]["time"], made[i]["attempt"], len(made) - i)


def attempts_since(run: RunDir, fault: float) -> list[tuple[int, float]]:
    """Number and start time of every attempt whose batch script began after a fault."""
    found = []
    for number in range(1, run.newest_attempt() + 1):
        began = run.attempt_metadata(number).get("script_started")
        if began is not None and began > fault:
            found.append((number, float(began)))
    return found


def restarts_since(events: Events, fault: float, kind: str = "restart") -> int:
    return sum(e["event"] == kind and e["time"] > fault for e in events)


def slurm_share(run: RunDir, fault: float) -> float | None:
    """SLURM's share of the recovery time, over all new attempts; None if there were none."""
    share = None
    for number, began in attempts_since(run, fault):
        old = ledger.outcome_of(run, number - 1)
        reports = old is not None and fault < old.ended < began
        share = (share or 0.0) + began - (old.ended if reports and old is not None else fault)
    return share


def assert_one_lineage(events: Events) -> None:
    """Check that every attempt resumed from a completed step and made each later step once."""
    at = newest = 0
    for event in events:
        if event["event"] == "bring_up":
            assert event["step"] <= newest, event
            at = event["step"]
        elif event["event"] == "step":
            assert event["step"] == at + 1, (at, event)
            at = event["step"]
            newest = max(newest, at)


# --- one interruption -------------------------------------------------------------------------------


def is_quiet(scene: Scene, kind: Kind, fault: float, found: Return) -> bool:
    """Whether the run has recovered and no effect of the fault is still to come."""
    run = scene.run.run
    if found.first is None or found.made < 3:
        return False
    if kind.ends_attempt:
        return any(number == found.in_attempt for number, _ in attempts_since(run, fault))
    if time.time() < fault + QUIET_S or ledger.outcome_of(run, run.newest_attempt()) is not None:
        return False
    last = [e["event"] for e in read_events(run.events) if e["event"] in ("restart", "bring_up", "step")]
    return last[-1] == "step"


def await_return(scene: Scene, kind: Kind, fault: float) -> Return:
    def back() -> Return | None:
        found = look(read_events(scene.run.run.events), fault)
        return found if is_quiet(scene, kind, fault, found) else None

    left_s = max(1.0, fault + BACK_S - time.time())
    found = wait_until(back, left_s, f"the return after: {kind.name}", scene.run.report)
    assert isinstance(found, Return)
    return found


def await_calm(scene: Scene) -> None:
    """Wait until every node works, earlier attempts have left no processes, and some steps are made."""
    cluster, run = scene.cluster, scene.run
    wait_until(lambda: _WORKING.issuperset(cluster.node_states()), 150, "working nodes", cluster.report)
    began = run.run.attempt_metadata(run.run.newest_attempt())["script_started"] - 2.0
    wait_until(
        lambda: not cluster.processes(began), GONE_S, "the end of older attempts",
        lambda: "\n".join(cluster.processes(began)),
    )  # fmt: skip
    start = max(steps(read_events(run.run.events)), default=0)
    more = scene.draw.randint(2, 12)
    run.wait_event(lambda e: e["event"] == "step" and e["step"] >= start + more)
    time.sleep(scene.draw.random())


def repair(scene: Scene) -> None:
    while scene.repairs:
        scene.repairs.pop(0)()


def interrupt(scene: Scene, kind: Kind) -> Row:
    """Inject one fault, wait for recovery, and return its cost."""
    begun, problem = time.time(), ""
    fault = begun
    try:
        fault = kind.inject(scene)
        await_return(scene, kind, fault)
        repair(scene)
        await_calm(scene)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}"
    events, run = read_events(scene.run.run.events), scene.run.run
    found = look(events, fault)
    return Row(
        kind.name, found.reached, found.resumed, len(attempts_since(run, fault)),
        restarts_since(events, fault), restarts_since(events, fault, "trainers_restarted"),
        (found.first or time.time()) - fault, slurm_share(run, fault), problem,
    )  # fmt: skip


def submit_again(scene: Scene) -> None:
    """After a fault that the run did not survive, submit a new job for the rest of the sequence."""
    cluster = scene.cluster
    cluster.run("scancel", scene.run.job)
    repair(scene)
    wait_until(lambda: not cluster.processes(), 120, f"an end: {cluster.processes()}", cluster.report)
    scene.run = sbatch(cluster, scene.storage, *WORDS, options=OPTIONS)
    attempt = scene.run.run.newest_attempt()
    scene.run.comes_back(attempt + 1)
    await_calm(scene)


# --- the sequence -----------------------------------------------------------------------------------


@contextlib.contextmanager
def filesystem() -> Iterator[Path]:
    """A small filesystem that the nodes see: it is mounted before they boot, and not under /tmp."""
    with tempfile.TemporaryDirectory(prefix="orhpc-runs-", dir="/var/tmp") as name:
        options = f"size={STORAGE_MB}m,mode=0755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "orhpc-runs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


def sequence(on: Cluster, storage: Path, seed: int, kinds: list[Kind]) -> tuple[list[Row], list[str]]:
    """Interrupt one run by all these kinds; returns the rows, and the problems found at the end."""
    sign = on.shared / "away"
    on.environment = {**on.environment, **environment(storage, sign)}
    run = sbatch(on, storage, *WORDS, options=OPTIONS)
    scene = Scene(on, run, random.Random(seed), storage, sign)
    run.wait_step(1)
    await_calm(scene)
    rows: list[Row] = []
    for number, kind in enumerate(kinds, 1):
        rows.append(interrupt(scene, kind))
        print(f"{number}: {' | '.join(rows[-1].cells())} (load {os.getloadavg()[0]:.1f})", flush=True)
        if rows[-1].problem:
            print(rows[-1].problem, flush=True)
            submit_again(scene)
    return rows, at_end(scene, rows)


def at_end(scene: Scene, rows: list[Row]) -> list[str]:
    """Cancel the run, and list the problems found."""
    run, wrong = scene.run, []
    scene.cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    run.wait_outcome(run.run.newest_attempt())
    events = read_events(run.run.events)
    last = max(steps(events))
    checks = {
        "every step once": lambda: (assert_whole(run.run, last), assert_one_lineage(events)),
        "nothing left": lambda: assert_nothing_left(run),
        "one W&B run": lambda: assert_one_wandb_run(run),
        "the newest commit is whole": run.committed,
    }
    for name, check in checks.items():
        try:
            check()
            print(f"{name}: yes", flush=True)
        except AssertionError as error:
            wrong.append(f"{name}: NO: {error}")
    seen = (run.run.newest_attempt() - 1, restarts_since(events, 0.0))
    counted = (sum(r.attempts for r in rows), sum(r.restarts for r in rows))
    print(
        f"last step {last}, {seen[0] + 1} attempts, {len(steps(events)) - last} steps made again; "
        f"new attempts {seen[0]} and restarts in place {seen[1]}, of which the rows have {counted[0]} and "
        f"{counted[1]}"
    )
    return wrong


def table(rows: list[Row]) -> str:
    names = ["#", "interruption", "reached", "from", "steps lost", "needed", "to the first new step, s"]
    names += ["SLURM's share, s", "came back"]
    lines = [names, ["---"] * len(names)]
    lines += [[str(i), *row.cells()] for i, row in enumerate(rows, 1)]
    back = [r for r in rows if not r.problem]
    lost, took = [r.lost for r in rows], [r.to_step_s for r in rows]
    needed = [
        sum(bool(r.attempts) for r in rows),
        sum(bool(r.restarts) and not r.attempts for r in rows),
        sum(bool(r.trainers) and not r.attempts and not r.restarts for r in rows),
        sum(not r.attempts and not r.restarts and not r.trainers for r in rows),
    ]
    lines.append(
        [
            "", f"**all {len(rows)}**", "", "", f"{sum(lost)}, at most {max(lost)}",
            f"new attempt {needed[0]}, in place {needed[1]}, trainers {needed[2]}, neither {needed[3]}",
            f"median {statistics.median(took):.1f}, at most {max(took):.1f}", "",
            f"**{len(back)} of {len(rows)}**",
        ]
    )  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--only", default="", help="a regular expression that finds the kinds to draw from")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    kinds = tuple(k for k in KINDS if re.search(options.only, k.name))
    chosen = drawn(random.Random(options.seed), options.count, kinds)
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the filesystem and the network are taken away
    with filesystem() as storage, cluster() as on:
        rows, wrong = sequence(on, storage, options.seed, chosen)
    text = table(rows)
    print(f"{time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f}\n\n{text}")
    if options.out is not None:
        options.out.write_text(text + "\n")
    for line in wrong:
        print(line)
    return 1 if wrong or any(r.problem for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
