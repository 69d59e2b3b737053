"""What newer releases of SLURM add to a submission, as far as the cluster has it.

Of SLURM 25.11 (release notes and changelog): ``sbatch --requeue=expedite``, which a site allows with
``SlurmctldParameters=enable_expedited_requeue``, and ``%r`` in the name of a job's output, its restart count.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

from orhpc.config import Config
from orhpc.errors import PreflightError
from orhpc.launch.slurm import scheduler

SINCE = (25, 11)
"""The first release that has both."""
_ALLOWED = "enable_expedited_requeue"


def version() -> tuple[int, int] | None:
    """Release of the installed ``sbatch``, such as (25, 11); None if it cannot be found out."""
    if shutil.which("sbatch") is None:
        return None
    try:
        answer = scheduler.query("sbatch", "--version").stdout
    except PreflightError:
        return None
    return parse_version(answer)


def parse_version(answer: str) -> tuple[int, int] | None:
    """Release in what SLURM's programs print as their version, such as ``slurm 25.11.2``; None if absent."""
    found = re.match(r"slurm\S* (\d+)\.(\d+)", answer)
    return (int(found[1]), int(found[2])) if found else None


def output_name() -> str:
    """sbatch's pattern for a job's output: a file per start where SLURM can count them, else one per job."""
    found = version()
    return "slurm-%j-%r.out" if found is not None and found >= SINCE else "slurm-%j.out"


def requeue_options(config: Config, say: Callable[[str], object]) -> list[str]:
    """sbatch's options for ``slurm.expedited_requeue``; ``say`` receives a line if the cluster lacks it."""
    if not config.slurm.expedited_requeue:
        return []
    if (problem := _why_not()) is None:
        return ["--requeue=expedite"]
    say(f"slurm.expedited_requeue: {problem}; the job is requeued through the queue")
    return []


def _why_not() -> str | None:
    """Why jobs cannot be requeued ahead of the queue; None if they can."""
    found = version()
    if found is None:
        return "the release of SLURM is not known here"
    if found < SINCE:
        return f"needs SLURM {SINCE[0]}.{SINCE[1]}, and this is {found[0]}.{found[1]:02d}"
    try:
        answer = scheduler.query("scontrol", "show", "config")
    except PreflightError as error:
        return str(error)
    setting = re.search(r"^SlurmctldParameters\s*=\s*(.*)$", answer.stdout, re.MULTILINE)
    if setting is None or _ALLOWED not in setting[1].strip().split(","):
        return f"the site does not allow it (SlurmctldParameters={_ALLOWED})"
    return None
