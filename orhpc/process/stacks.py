"""What the threads of this process do at the moment, for a report of a rank that hangs."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks() -> str:
    """Return the Python stacks of all threads but the calling one, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
