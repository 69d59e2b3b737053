"""Why every attempt ended, and when coming back has no more use.

Each attempt leaves ``attempts/NNN/outcome.json``.  One that died without a word is judged at the
next start by what is left of it: the batch script's note of srun's exit status, or its absence,
which means that the batch host itself was lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from orhpc.launch.prepare import committed_step
from orhpc.rundir import RunDir
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed

log = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why an attempt ended."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    CANCELLED = "cancelled"
    REQUEUED = "requeued by hand"
    SIGNALLED = "signalled by hand"
    KILLED = "killed"
    """By SIGKILL or SIGTERM from outside of the run: the step, srun, a launcher or the driver."""
    STORAGE = "storage refused"
    NODE_LOST = "node lost"
    BAD_NODE = "bad node"
    OUT_OF_MEMORY = "out of memory"
    INFRASTRUCTURE = "infrastructure"
    CRASH = "crash"
    REFUSED = "refused"


BUDGETS = {Reason.TIME_LIMIT: 2, Reason.CRASH: 3, Reason.INFRASTRUCTURE: 3, Reason.OUT_OF_MEMORY: 2}
"""Attempts of a job that may end so without a new step: what the run itself did.

What others did to it never counts: preemptions, lost nodes, storage that is away, signals by hand.
"""

_KILLED = (137, 143)
"""SIGKILL and SIGTERM: someone killed srun, the step or the first node's launcher."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    attempt: int
    reason: Reason
    step: int
    """Newest step committed when it ended."""
    detail: str = ""
    exit_code: int | None = None
    chain: str | None = None
    """The job, or the first of its successors; None: not a SLURM job."""
    signalled: float | None = None
    """When it was told to stop, in seconds since the epoch; None: it was not."""
    ended: float = field(default_factory=time.time)
    """When this was written."""
    given_up: str | None = None
    """Why the job does not come back though nothing else forbids it: its budget is used up."""
    excluded: list[str] = field(default_factory=list)
    """Nodes that the next start does without."""


def write(rundir: RunDir, outcome: Outcome) -> None:
    """Leave an attempt's outcome in its folder."""
    write_sealed(rundir.attempt(outcome.attempt) / "outcome.json", asdict(outcome))


def outcome_of(rundir: RunDir, attempt: int) -> Outcome | None:
    """An attempt's outcome; None while it runs, when it died without a word, or when the file is damaged."""
    path = rundir.attempt(attempt) / "outcome.json"
    try:
        record = read_sealed(path, [f.name for f in fields(Outcome)])
        return Outcome(**{**record, "reason": Reason(record["reason"])})
    except FileNotFoundError:
        return None
    except (Damaged, TypeError, ValueError, KeyError) as error:
        log.warning("%s is passed over: %s", path, error)
        return None


def known(rundir: RunDir) -> list[Outcome]:
    """The outcomes that have been written down, oldest first; nothing is judged."""
    numbers = range(1, rundir.newest_attempt() + 1)
    return [outcome for number in numbers if (outcome := outcome_of(rundir, number))]


def read(rundir: RunDir, up_to: int | None = None) -> list[Outcome]:
    """Every SLURM attempt's outcome, oldest first; the silent ones are judged and written down.

    ``up_to``: the last attempt to look at.  Whoever is in an attempt gives its own: a newer one, if
    there is any, is alive, and silent for that reason.
    """
    found: list[Outcome] = []
    for number in range(1, (rundir.newest_attempt() if up_to is None else up_to) + 1):
        facts = rundir.attempt_facts(number)
        if facts.get("kind") != "slurm":
            continue
        if outcome := outcome_of(rundir, number):
            found.append(outcome)
        else:
            before = found[-1].step if found else 0
            found.append(_judge(rundir, number, facts, before))
            write(rundir, found[-1])
    return found


def _judge(rundir: RunDir, number: int, facts: dict[str, Any], before: int) -> Outcome:
    own = [c.step for c in rundir.lineage() if c.attempt == number]
    step = max([before, *own])
    try:
        code = int((rundir.attempt(number) / "srun_exit").read_text())
    except (FileNotFoundError, ValueError):
        reason, code = Reason.NODE_LOST, None
        detail = "it ended without a word, and its batch script too: the first node was lost or killed"
    else:
        killed = code in _KILLED
        reason = Reason.KILLED if killed else Reason.CRASH
        detail = f"it ended without a word; srun returned {code}"
        detail += ": it, the step or the first node's launcher was killed" if killed else ""
    return Outcome(number, reason, step, detail, code, facts.get("chain"))


def since_progress(outcomes: Sequence[Outcome], chain: str) -> list[Outcome]:
    """The job's attempts since the last one that made a new step, newest first."""
    found: list[Outcome] = []
    for i in range(len(outcomes) - 1, -1, -1):
        before = outcomes[i - 1].step if i else 0
        if outcomes[i].chain != chain or outcomes[i].step > before:
            break
        found.append(outcomes[i])
    return found


def to_readmit(outcomes: Sequence[Outcome], chain: str) -> list[str]:
    """Nodes that the job did without because they were lost: a start later, SLURM itself knows which work.

    Excluded for good, they would be too few one day, though all were repaired.  Bad nodes work for all that
    SLURM knows, and stay out.  ``outcomes``: up to that of the start that is about to end.
    """
    own = [o for o in outcomes if o.chain == chain]
    lost = {name for o in own[:-1] if o.reason is Reason.NODE_LOST for name in o.excluded}
    bad = {name for o in own if o.reason is not Reason.NODE_LOST for name in o.excluded}
    return sorted(lost - bad - set(own[-1].excluded if own else ()))


def exhausted(outcomes: Sequence[Outcome], chain: str) -> str | None:
    """One line when the job's budgets are used up, else None.

    Counted are the job's attempts since the last one that made a new step.  A job submitted anew
    begins with full budgets.
    """
    counted: dict[Reason, Outcome] = {}
    numbers: dict[Reason, int] = {}
    for outcome in since_progress(outcomes, chain):
        counted.setdefault(outcome.reason, outcome)
        numbers[outcome.reason] = numbers.get(outcome.reason, 0) + 1
    for reason, budget in BUDGETS.items():
        if numbers.get(reason, 0) >= budget:
            last = counted[reason]
            return (
                f"{numbers[reason]} attempts in a row ended with {reason} and no step after {last.step} was "
                f"committed; the last: {last.detail or reason} (attempts/{last.attempt:03d})"
            )
    return None


def jobs(rundir: RunDir) -> set[str]:
    """Ids of all jobs that have made attempts at the run."""
    found: set[str] = set()
    for number in range(1, rundir.newest_attempt() + 1):
        facts = rundir.attempt_facts(number)
        if "job" in facts:
            found.add(str(facts["job"]))
    return found


def newest_job(rundir: RunDir) -> str | None:
    """Id of the job that made the newest attempt; None where that is not known."""
    job = rundir.attempt_facts(rundir.newest_attempt()).get("job")
    return None if job is None else str(job)


def last_committed(rundir: RunDir) -> int:
    """Newest committed step, for an outcome."""
    return committed_step(rundir)
