"""Folders that only this user can change, for files that are executed, loaded or trusted later."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from orhpc.errors import PreflightError


def require_own(folder: Path, what: str) -> Path:
    """Require that no other user can write into a folder, or replace it.

    Args:
        folder: it must exist; links are followed.
        what: its name in the error.

    Returns the resolved folder.

    Raises:
        PreflightError: it belongs to another user, others may write to it, or any user may replace a
            folder above it.
    """
    found = folder.resolve()
    problem = problem_of(found)
    open_above = next((p for p in found.parents if _is_open(p.stat().st_mode)), None)
    if problem is None and open_above is not None:
        problem = f"any user may replace what is in {open_above}, and so {found}; choose another folder"
    if problem is not None:
        raise PreflightError(f"{what}: {problem}")
    return found


def problem_of(folder: Path) -> str | None:
    """Return why others could put files into a folder, and what to do; None if they cannot."""
    about = folder.stat()
    if about.st_uid != os.geteuid():
        return f"{folder} belongs to another user (uid {about.st_uid}): choose a folder of your own"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(about.st_mode)
        return f"other users can write to {folder} (mode {mode:04o}): chmod go-w {folder}, or choose another"
    return None


def _is_open(mode: int) -> bool:
    """Whether any user may rename and remove entries of a folder with this mode."""
    return bool(mode & stat.S_IWOTH and not mode & stat.S_ISVTX)
