"""Check that the run directory's filesystem has enough space for the run's commits."""

from __future__ import annotations

import shutil
from pathlib import Path

from orhpc.config import Config
from orhpc.errors import ModelError, PreflightError
from orhpc.plan.run_plan import DEFAULT_DEVICE_GIB, commits_on_disk, make_plan, state_bytes
from orhpc.rundir import RunDir


def check(config: Config, rundir: RunDir) -> str:
    """Return a line with the free space and the space that commits need.

    Quotas are not visible: the filesystem's free space is an upper bound.  A run that already has commits is
    not refused, because space may be freed later and a failed commit does not end the run.

    Raises:
        PreflightError: the free space is less than the run needs.
    """
    free = free_bytes(rundir.path)
    has = f"{rundir.path}: {free / 1e9:.1f} GB free"
    if config.checkpoint.save_interval is None:
        return has
    try:
        one = state_bytes(make_plan(config, DEFAULT_DEVICE_GIB))
    except ModelError:  # the model is not here yet, or the planner does not support its family
        return has
    existing = min(len(rundir.lineage()), config.checkpoint.keep)
    wanted = (commits_on_disk(config) - existing) * one
    line = f"{has}, commits take {wanted / 1e9:.1f} GB"
    if free >= wanted:
        return line
    line += f" ({commits_on_disk(config)} of {one / 1e9:.1f} GB at once, {existing} of them there)"
    if existing:
        return f"{line}: they will fail"
    raise PreflightError(f"{line}: free space, set run.root to a larger filesystem, or lower checkpoint.keep")


def free_bytes(path: Path) -> int:
    """Free bytes of the filesystem of a folder, which need not exist yet."""
    return shutil.disk_usage(next(p for p in [path, *path.parents] if p.exists())).free
