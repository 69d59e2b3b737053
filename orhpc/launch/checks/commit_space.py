"""Whether the run directory's filesystem holds what the run commits; where not, commits would fail."""

from __future__ import annotations

import shutil
from pathlib import Path

from orhpc.config import Config
from orhpc.errors import ModelError, PreflightError
from orhpc.plan.run_plan import DEFAULT_DEVICE_GIB, commits_on_disk, make_plan, state_bytes
from orhpc.rundir import RunDir


def check(config: Config, rundir: RunDir) -> str:
    """Say how much there is and how much commits take.

    Quotas are not seen: what the filesystem says is the most that there can be.  A run that has committed
    is not kept from going on, since room may come, and a commit that fails costs nothing else.

    Raises:
        PreflightError: there is less than the run takes.
    """
    free = free_bytes(rundir.path)
    has = f"{rundir.path}: {free / 1e9:.1f} GB free"
    if config.checkpoint.save_interval is None:
        return has
    try:
        one = state_bytes(make_plan(config, DEFAULT_DEVICE_GIB))
    except ModelError:  # not here yet, or of a family that nothing is planned of
        return has
    there = min(len(rundir.lineage()), config.checkpoint.keep)
    wanted = (commits_on_disk(config) - there) * one
    said = f"{has}, commits take {wanted / 1e9:.1f} GB"
    if free >= wanted:
        return said
    said += f" ({commits_on_disk(config)} of {one / 1e9:.1f} GB at once, {there} of them there)"
    if there:
        return f"{said}: they will fail"
    raise PreflightError(f"{said}: make room, set run.root to a larger filesystem, or lower checkpoint.keep")


def free_bytes(path: Path) -> int:
    """Free bytes of the filesystem of a folder, which need not be there yet."""
    return shutil.disk_usage(next(p for p in [path, *path.parents] if p.exists())).free
