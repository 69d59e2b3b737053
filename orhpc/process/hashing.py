"""Python's hashes of texts, which differ between processes unless a seed is set.

The order of a set differs with them.  Tasks that are drawn from a set would be others in each server, and in
one that was started again: rollouts of a group would have different prompts, and be compared all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLE = "PYTHONHASHSEED"


def same_hashes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment variables with the seed 0, unless they have one already."""
    found = environment.get(_VARIABLE, "")
    return {**environment, _VARIABLE: found if found.isdecimal() else "0"}
