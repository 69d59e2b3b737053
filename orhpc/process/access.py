"""Who may read what this process and its children write: only the user, or also the group.

A process that starts or opens a run calls :func:`use_access` once.  Children inherit the umask, and the
variable by which :func:`folder_mode` and :func:`file_mode` know.  Files with keys have mode 0600 in any case.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

Access = Literal["private", "group"]
_VARIABLE = "ORHPC_ACCESS"
_GROUP_UMASK = 0o027
_KEYS = (".key", ".token")
"""Suffixes of files that stay private."""


def use_access(access: Access) -> None:
    """Set the mode of everything that this process and its children create from now on."""
    os.environ[_VARIABLE] = access
    if access == "group":
        os.umask(_GROUP_UMASK)


def folder_mode() -> int:
    """Mode of a new folder of a run."""
    return 0o750 if os.environ.get(_VARIABLE) == "group" else 0o700


def file_mode() -> int:
    """Mode of a new file of a run that is no key."""
    return 0o640 if os.environ.get(_VARIABLE) == "group" else 0o600


def apply_access(folder: Path, access: Access) -> None:
    """Give an existing run directory the mode of ``access``; what is in it becomes readable if it must.

    Closing the folder itself is enough to close what is in it.  Raises OSError.
    """
    mode = stat.S_IMODE(folder.stat().st_mode)
    if access == "private":
        if mode & 0o077:
            folder.chmod(mode & ~0o077)
    elif mode & 0o050 != 0o050:
        _open_tree(folder)
        folder.chmod((mode | 0o050) & ~0o007)  # last: until then the tree is not complete


def _open_tree(folder: Path) -> None:
    """Add the group's right to read; a set-group-id bit of a folder is kept."""
    for inner in folder.rglob("*"):
        if inner.is_symlink() or inner.suffix in _KEYS:
            continue
        mode = stat.S_IMODE(inner.stat().st_mode)
        inner.chmod(mode | (0o050 if inner.is_dir() else 0o040))


def access_of(folder: Path) -> Access:
    """The access that an existing run directory has."""
    return "group" if folder.stat().st_mode & 0o050 == 0o050 else "private"
