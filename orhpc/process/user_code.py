"""Exceptions of the user's code: their location, in one line, and the traceback to show.

User code runs in two places: in this process (``rollout.custom_agent``,
``rollout.custom_reward``), and in an environment server, which sends its traceback as text.  The job's
own server sends that of a verifier function (``data.verifier``) in the metadata of its result.
"""

from __future__ import annotations

import logging
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from orhpc.errors import UserCodeError
from orhpc.process.secrets import redact

log = logging.getLogger(__name__)
USER_ERRORS = "user_errors.log"
"""Name of the file with their tracebacks, in an attempt's folder."""
_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_OWN = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_paths()["stdlib"]
_LONGEST_TRACE = 8000
"""Maximum characters of a traceback; that of a recursion would fill the terminal."""
_LONGEST_LINE = 300
_RAISED, _TRACE = "orhpc_user_error", "orhpc_user_trace"


def user_error(what: str, error: BaseException) -> UserCodeError:
    """Describe an exception that the user's code raised in this process.

    Args:
        what: the code, such as ``rollout.custom_reward: mine.score``.
        error: the exception, with its traceback.
    """
    trace = "".join(traceback.format_exception(error))
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return _error(what, "raised", reason, trace)


class UserErrorLog:
    """A file with the tracebacks of the user's code, each once per process; several processes write to it."""

    def __init__(self, path: Path) -> None:
        """``path``: ``attempts/NNN/user_errors.log`` of the run."""
        self._path = path
        self._known: set[str] = set()

    def add(self, error: UserCodeError) -> None:
        """Append an error's line and traceback; if the file cannot be written, log them instead."""
        text = error.trace or str(error)
        if text in self._known:
            return
        self._known.add(text)
        when = datetime.now().isoformat(" ", "seconds")
        entry = f"{when} {error}\n" + (textwrap.indent(error.trace.rstrip(), "    ") + "\n") * bool(
            error.trace
        )
        try:
            # One append of a few kilobytes: entries of several processes do not mix.
            with self._path.open("ab", buffering=0) as file:
                file.write(entry.encode(errors="replace"))
        except OSError as refused:
            log.warning("%s cannot be written (%s); it would have: %s", self._path, refused, entry)


def server_error(what: str, detail: str, trace: str) -> UserCodeError:
    """Describe an exception that an environment raised on its server.

    Args:
        what: the environment and the request.
        detail: the exception, in one line from the server.
        trace: its traceback; empty if the server does not send it.
    """
    return _error(what, "raised", detail, trace)


def error_metadata(error: UserCodeError) -> dict[str, str]:
    """Return an error as metadata of a tool's result, in which the job's own servers send it."""
    return {_RAISED: str(error), _TRACE: error.trace}


def error_of_metadata(metadata: Mapping[str, Any] | None) -> UserCodeError | None:
    """Return the error that :func:`error_metadata` has written; None if there is none."""
    line, trace = ((metadata or {}).get(key) for key in (_RAISED, _TRACE))
    if not isinstance(line, str) or not isinstance(trace, str):
        return None
    return UserCodeError(line, trace=trace)


def place_of(trace: str) -> str:
    """Return ``FILE:LINE in FUNCTION`` of the last frame in the user's code, else of the last frame."""
    frames = list(_FRAME.finditer(trace))
    own = [f for f in frames if _is_users(f["file"])] or frames
    return f"{own[-1]['file']}:{own[-1]['line']} in {own[-1]['name']}" if own else ""


def last_line(trace: str) -> str:
    """Return the exception line of a traceback, without its frames."""
    lines = [line for line in trace.strip().splitlines() if line.strip()]
    begun = [line for line in lines if line[:1].strip()]
    return begun[-1] if begun else (lines[-1] if lines else "")


def user_frames(trace: str) -> str:
    """Return a traceback without the frames of servers and libraries before the user's first frame."""
    frames = list(_FRAME.finditer(trace))
    first = next((f for f in frames if _is_users(f["file"])), None)
    if first is None or not frames:
        return trace
    return trace[: frames[0].start()] + trace[first.start() :]


def _is_users(file: str) -> bool:
    installed = "site-packages" in file or "dist-packages" in file
    return not (installed or file.startswith((_OWN, _STANDARD, "<")))


def _error(what: str, did: str, reason: str, trace: str) -> UserCodeError:
    where = place_of(trace)
    line = f"{what} {did} {reason[:_LONGEST_LINE]}" + (f" ({where})" if where else "")
    return UserCodeError(redact(line), trace=redact(user_frames(trace)[-_LONGEST_TRACE:]))
