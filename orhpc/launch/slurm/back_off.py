"""Exponential back-off for a job that is ended repeatedly by external causes.

External causes (kills, unavailable storage) never use up a run's failure budgets: the job is always requeued.
To avoid a hard loop that occupies nodes without progress, each requeue is delayed longer than the last, until
the job has made a new step.
"""

from __future__ import annotations

from collections.abc import Sequence

from orhpc.errors import EndedFromOutside, PreflightError
from orhpc.launch.slurm import scheduler
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Outcome, Reason, since_progress

FIRST_S = 120
"""SLURM's own default delay of a requeued job."""
LONGEST_S = 3600
OUTSIDE = (Reason.KILLED, Reason.STORAGE)
_DELAY = "delay"


def due(outcomes: Sequence[Outcome], chain: str) -> EndedFromOutside | None:
    """Why and how long the job's requeue must be delayed after these attempts; None for no delay.

    The first external end causes no delay, because most occur only once.
    """
    ended = [o for o in since_progress(outcomes, chain) if o.reason in OUTSIDE]
    if len(ended) < 2 or outcomes[-1].reason not in OUTSIDE:
        return None
    wait_s = min(LONGEST_S, FIRST_S * 2 ** min(len(ended) - 2, 16))
    reasons = " and ".join(sorted({f"{o.reason}" for o in ended}))
    return EndedFromOutside(
        f"{len(ended)} attempts in a row were ended from outside ({reasons}) and made no new step", wait_s
    )


def require(outcomes: Sequence[Outcome], chain: str) -> None:
    """Raise EndedFromOutside if the job's requeue must be delayed."""
    if why := due(outcomes, chain):
        raise why


def before_any_attempt(job: Job) -> EndedFromOutside:
    """The delay after a start that could not use the run directory, so earlier outcomes cannot be read.

    It is twice the last delay, which SLURM shows for a requeued job as EligibleTime minus SubmitTime.
    """
    try:
        info = scheduler.job_info(job.id)
    except PreflightError:
        info = None
    submitted = info.time_of("SubmitTime") if info is not None else None
    eligible = info.time_of("EligibleTime") if info is not None else None
    waited_s = eligible - submitted if submitted is not None and eligible is not None else 0.0
    wait_s = min(LONGEST_S, max(FIRST_S, round(2 * waited_s)))
    return EndedFromOutside("no attempt could begin", wait_s)


def request(job: Job, why: EndedFromOutside) -> str:
    """Make the batch script delay the requeue; return a log line about it."""
    (job.folder / _DELAY).write_text(str(why.wait_s))
    return (
        f"{why}: the job comes back in {why.wait_s} s at the earliest; "
        f"scontrol update JobId={job.id} StartTime=now starts it sooner"
    )
