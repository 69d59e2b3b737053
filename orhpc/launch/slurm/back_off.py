"""How long a job stays away where others end it again and again.

What others do to a run never uses up its budgets: it comes back however often it is killed, or its storage
is away.  So that this is no hard loop, which takes nodes from others and helps nobody, it comes back later
each time, until it has made a new step.
"""

from __future__ import annotations

from collections.abc import Sequence

from orhpc.errors import EndedFromOutside, PreflightError
from orhpc.launch.slurm import scheduler
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Outcome, Reason, since_progress

FIRST_S = 120
"""As long as SLURM itself keeps a requeued job waiting where the site has not said otherwise."""
LONGEST_S = 3600
OUTSIDE = (Reason.KILLED, Reason.STORAGE)
_DELAY = "delay"


def due(outcomes: Sequence[Outcome], chain: str) -> EndedFromOutside | None:
    """What keeps the job away after these attempts of it; None where it may return at once.

    The first time it may: most who kill a run do so once.
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
    """Raises EndedFromOutside where the job has to stay away."""
    if why := due(outcomes, chain):
        raise why


def before_any_attempt(job: Job) -> EndedFromOutside:
    """Likewise of a start whose storage was refused, so that what happened before cannot be read there.

    How long it was kept waiting last, SLURM knows of a job that was requeued; twice that follows.
    """
    try:
        info = scheduler.job_info(job.id)
    except PreflightError:
        info = None
    begun = (info.time_of("SubmitTime"), info.time_of("EligibleTime")) if info is not None else (None, None)
    waited_s = begun[1] - begun[0] if begun[0] is not None and begun[1] is not None else 0.0
    wait_s = min(LONGEST_S, max(FIRST_S, round(2 * waited_s)))
    return EndedFromOutside("no attempt could begin", wait_s)


def request(job: Job, why: EndedFromOutside) -> str:
    """Have the batch script delay the job's return; returns the line that says so."""
    (job.folder / _DELAY).write_text(str(why.wait_s))
    return (
        f"{why}: the job comes back in {why.wait_s} s at the earliest; "
        f"scontrol update JobId={job.id} StartTime=now starts it sooner"
    )
