"""Where the start of an SGLang server took its time, from its log."""

from __future__ import annotations

import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path

BEGIN = "starting SGLang"
"""What :mod:`orhpc.rollout.engines.sglang_server` logs before it imports SGLang."""
PHASES = {
    "imports": re.compile(r"server_args="),
    "processes of ranks": re.compile(r"Load weight begin"),
    "weights": re.compile(r"Load weight end"),
    "KV cache": re.compile(r"Memory pool end"),
    "CUDA graphs": re.compile(r"Capture .* end\b"),
    "first request": re.compile(r"The server is fired up"),
}
"""The phases of a start, in order, and the line with which each ends (SGLang 0.5.16 and 0.5.23)."""
_LINE = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\S*(.*)")
_READ_BYTES = 4 << 20
"""Of the log: a start is at its end when the engine has just become ready."""


def start_phases(log: Path) -> dict[str, float]:
    """Return the seconds of each phase of a server's newest start, to whole seconds.

    A phase ends when the last rank has ended it; one that the log does not name is part of the next.  Empty
    if the log has no complete start, as that of the CPU engine, or cannot be read.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _READ_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return {}
    times: dict[str, datetime] = {}
    for line in text.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        if BEGIN in found[2]:
            times = {"": datetime.fromisoformat(found[1])}
        elif times and "first request" not in times:
            ended = next((name for name, end in PHASES.items() if end.search(found[2])), None)
            if ended is not None:
                times[ended] = datetime.fromisoformat(found[1])
    if "first request" not in times:
        return {}
    ordered = [("", times[""]), *((name, times[name]) for name in PHASES if name in times)]
    return {name: (end - begin).total_seconds() for (_, begin), (name, end) in pairwise(ordered)}
