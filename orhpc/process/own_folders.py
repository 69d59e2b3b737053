"""Folders that only this user can change: for files that are run, loaded or trusted later."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from orhpc.errors import PreflightError


def require_own(folder: Path, what: str) -> Path:
    """Require that no other user can write into a folder, or replace it.

    Args:
        folder: it must exist; links are followed.
        what: names it in the error.

    Returns the folder that links lead to.

    Raises:
        PreflightError: it is another user's, others may write to it, or anybody may replace a folder
            above it.
    """
    found = folder.resolve()
    problem = problem_of(found)
    open_above = next((p for p in found.parents if _is_open(p.stat().st_mode)), None)
    if problem is None and open_above is not None:
        problem = f"anybody may replace what is in {open_above}, and so {found}; choose another folder"
    if problem is not None:
        raise PreflightError(f"{what}: {problem}")
    return found


def problem_of(folder: Path) -> str | None:
    """Return why others could put files into a folder, and what to do; None where they cannot."""
    about = folder.stat()
    if about.st_uid != os.geteuid():
        return f"{folder} belongs to another user (uid {about.st_uid}): choose a folder of your own"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(about.st_mode)
        return f"other users can write to {folder} (mode {mode:04o}): chmod go-w {folder}, or choose another"
    return None


def _is_open(mode: int) -> bool:
    """Whether anybody may rename and remove what is in a folder of that mode."""
    return bool(mode & stat.S_IWOTH and not mode & stat.S_ISVTX)
