"""Where compilers keep what they have compiled, from one attempt to the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from orhpc.process.own_folders import require_own

log = logging.getLogger(__name__)
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def kept_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the folders of torch's and Triton's compiled code.

    They hold pickles and shared libraries, which are loaded without a further look: torch's default, a
    folder in /tmp that is named after the user, can be made by another user first.

    Args:
        environment: of the job; folders that it names are taken if nobody else can write to them.

    Raises:
        PreflightError: another user owns such a folder, or may write to it.
    """
    kept: dict[str, str] = {}
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "/nonexistent", ".cache")
    for variable in _VARIABLES:
        named = environment.get(variable)
        folder = Path(named) if named else Path(home, "orhpc", variable.split("_")[0].lower())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            # Without a home, what is compiled lasts as long as the attempt: it goes to its temporary folder.
            log.warning("%s: nothing compiled is kept there: %s", folder, error)
            continue
        kept[variable] = str(require_own(folder, variable))
    return kept
