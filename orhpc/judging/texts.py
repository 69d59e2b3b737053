"""Regular expressions, of which some take for ever on some texts."""

from __future__ import annotations

import re
from typing import Any


def is_match(pattern: str, text: str) -> bool:
    """Whether the text contains a match."""
    return re.search(pattern, text) is not None


def last_match(pattern: str, text: str) -> Any:
    """The last match, as ``re.findall`` gives it; None if there is none."""
    matches = re.findall(pattern, text)
    return matches[-1] if matches else None


def prepare() -> None:
    """Nothing to do: the process has imported this module."""
