"""Folders in which compilers cache compiled code between attempts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from orhpc.process.own_folders import require_own

log = logging.getLogger(__name__)
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def kept_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the folders of torch's and Triton's compiled code.

    They contain pickles and shared libraries, which are loaded unverified: torch's default, a folder
    in /tmp named after the user, could be created by another user first.

    Args:
        environment: the job's variables; folders that they name are used if no other user can write to them.

    Raises:
        PreflightError: another user owns such a folder, or can write to it.
    """
    kept: dict[str, str] = {}
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "/nonexistent", ".cache")
    for variable in _VARIABLES:
        named = environment.get(variable)
        folder = Path(named) if named else Path(home, "orhpc", variable.split("_")[0].lower())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            # Without a home folder, compiled code is kept in the attempt's temporary folder.
            log.warning("%s: compiled code is not cached there: %s", folder, error)
            continue
        kept[variable] = str(require_own(folder, variable))
    return kept
