"""The outcomes of all attempts, and the failure budgets that end a crash loop.

Each attempt writes ``attempts/NNN/outcome.json``.  The outcome of an attempt that died before writing it is
inferred at the next start from srun's exit status, as recorded by the batch script; if that is missing too,
the batch host itself was lost.
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
    """The step, srun, a launcher or the driver got SIGKILL or SIGTERM from outside the run."""
    STORAGE = "storage refused"
    NODE_LOST = "node lost"
    BAD_NODE = "bad node"
    OUT_OF_MEMORY = "out of memory"
    INFRASTRUCTURE = "infrastructure"
    CRASH = "crash"
    REFUSED = "refused"


BUDGETS = {Reason.TIME_LIMIT: 2, Reason.CRASH: 3, Reason.INFRASTRUCTURE: 3, Reason.OUT_OF_MEMORY: 2}
"""How many attempts in a row may end for each reason without a new step.

External causes have no budget: preemptions, lost nodes, unavailable storage, signals by hand.
"""

_KILLED = (137, 143)
"""Exit codes for SIGKILL and SIGTERM: srun, the step or the first node's launcher was killed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    attempt: int
    reason: Reason
    step: int
    """Newest committed step when the attempt ended."""
    detail: str = ""
    exit_code: int | None = None
    chain: str | None = None
    """Id of the first job of the chain; None: not a SLURM job."""
    signalled: float | None = None
    """Time of the signal to stop, in seconds since the epoch; None: no signal."""
    ended: float = field(default_factory=time.time)
    """Time when the outcome was written, in seconds since the epoch."""
    given_up: str | None = None
    """The used-up budget, if this prevents a requeue; None otherwise."""
    excluded: list[str] = field(default_factory=list)
    """Nodes that the next start must not use."""
    replaced: list[str] = field(default_factory=list)
    """Those of them that were lost during the attempt, which went on with a spare."""
    bad: list[str] = field(default_factory=list)
    """Those of them that failed their health check while the attempt began without them, or were slow."""

    def lost(self) -> set[str]:
        """Those of the excluded nodes that were lost; the others failed their health check."""
        ended_it = set(self.excluded) - set(self.bad) if self.reason is Reason.NODE_LOST else set[str]()
        return ended_it | set(self.replaced)


def write(rundir: RunDir, outcome: Outcome) -> None:
    """Write an attempt's outcome to its folder."""
    write_sealed(rundir.attempt(outcome.attempt) / "outcome.json", asdict(outcome))


def outcome_of(rundir: RunDir, attempt: int) -> Outcome | None:
    """An attempt's outcome; None if it runs, died without writing one, or the file is damaged."""
    path = rundir.attempt(attempt) / "outcome.json"
    try:
        record = read_sealed(path, [f.name for f in fields(Outcome)])
        return Outcome(**{**record, "reason": Reason(record["reason"])})
    except FileNotFoundError:
        return None
    except (Damaged, TypeError, ValueError, KeyError) as error:
        log.warning("%s is ignored: %s", path, error)
        return None


def known(rundir: RunDir) -> list[Outcome]:
    """The outcomes that have been written, oldest first; missing ones are not inferred."""
    numbers = range(1, rundir.newest_attempt() + 1)
    return [outcome for number in numbers if (outcome := outcome_of(rundir, number))]


def read(rundir: RunDir, up_to: int | None = None) -> list[Outcome]:
    """Every SLURM attempt's outcome, oldest first; missing ones are inferred and written.

    ``up_to``: the last attempt to read.  A running attempt passes its own number, because a newer attempt may
    be running and have no outcome for that reason.
    """
    found: list[Outcome] = []
    for number in range(1, (rundir.newest_attempt() if up_to is None else up_to) + 1):
        facts = rundir.attempt_metadata(number)
        if facts.get("kind") != "slurm":
            continue
        if outcome := outcome_of(rundir, number):
            found.append(outcome)
        else:
            before = found[-1].step if found else 0
            found.append(_infer(rundir, number, facts, before))
            write(rundir, found[-1])
    return found


def _infer(rundir: RunDir, number: int, facts: dict[str, Any], before: int) -> Outcome:
    own = [c.step for c in rundir.lineage() if c.attempt == number]
    step = max([before, *own])
    try:
        code = int((rundir.attempt(number) / "srun_exit").read_text())
    except (FileNotFoundError, ValueError):
        reason, code = Reason.NODE_LOST, None
        detail = "neither it nor its batch script reported its end: the first node was lost or killed"
    else:
        killed = code in _KILLED
        reason = Reason.KILLED if killed else Reason.CRASH
        detail = f"it did not report its end; srun returned {code}"
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
    """Lost nodes whose exclusion ends, because by the next start SLURM itself knows whether they work.

    Permanent exclusion would use up the nodes over time, although lost nodes are repaired.  Bad nodes stay
    excluded, because SLURM does not detect their fault.  ``outcomes``: up to that of the current start.
    """
    own = [o for o in outcomes if o.chain == chain]
    lost = {name for o in own[:-1] for name in o.lost()}
    bad = {name for o in own for name in set(o.excluded) - o.lost()}
    return sorted(lost - bad - set(own[-1].excluded if own else ()))


def exhausted(outcomes: Sequence[Outcome], chain: str) -> str | None:
    """One line if one of the job's budgets is used up, else None.

    Only the job's attempts since the last one that made a new step count.  A newly submitted job has full
    budgets.
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
    """Ids of all jobs that have made attempts in the run."""
    found: set[str] = set()
    for number in range(1, rundir.newest_attempt() + 1):
        facts = rundir.attempt_metadata(number)
        if "job" in facts:
            found.add(str(facts["job"]))
    return found


def newest_job(rundir: RunDir) -> str | None:
    """Id of the job that made the newest attempt; None if not known."""
    job = rundir.attempt_metadata(rundir.newest_attempt()).get("job")
    return None if job is None else str(job)


def last_committed(rundir: RunDir) -> int:
    """Newest committed step, for an outcome."""
    return committed_step(rundir)
