"""Folders that only this user can change: for files that are run, loaded or trusted later."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from orhpc.errors import PreflightError


def require_own(folder: Path, what: str) -> None:
    """Require that nobody else can put something into a folder, or another folder in its place.

    Args:
        folder: it must exist.
        what: names it in the error.

    Raises:
        PreflightError: it is a link, another user's, or others may write to it; or others may replace a
            folder above it.
    """
    if problem := _problem(folder):
        raise PreflightError(f"{what}: {problem}")


def _problem(folder: Path) -> str | None:
    about = folder.lstat()
    if stat.S_ISLNK(about.st_mode):
        return f"{folder} is a link; name the folder itself"
    if not stat.S_ISDIR(about.st_mode):
        return f"{folder} is not a folder"
    if about.st_uid != os.getuid():
        return f"{folder} belongs to another user (uid {about.st_uid}); choose a folder of your own"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(about.st_mode)
        return f"others may write to {folder} (mode {mode:04o}); chmod go-w {folder}, or choose another"
    for parent in folder.resolve().parents:
        above = parent.stat()
        is_trusted = above.st_uid in (0, os.getuid())
        open_to_all = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
        if open_to_all or not is_trusted:
            return f"others may replace what is in {parent}, and so {folder}; choose another folder"
    return None
