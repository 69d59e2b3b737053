"""Make untrusted text safe for a terminal or a log."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from orhpc.process.secrets import install_redaction, redact, remember_readable

SecretSources = Sequence[Mapping[str, str | None]]
"""Sources of secrets by name: those of the config, and those of each environment."""
_VARIABLE = "ORHPC_SECRET_SOURCES"

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that change text direction, and lone surrogates."""


def safe(text: str) -> str:
    """Return a text with its control characters shown as ``\\xNN`` or ``\\uNNNN``.

    Text of an environment or a model must not move the cursor, change the window title or fake a line.
    """
    return _CONTROL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class RedactedStream:
    """A text stream that redacts known secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(self._shown(redact(text)))
        return len(text)

    def _shown(self, text: str) -> str:
        return text

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class GuardedStream(RedactedStream):
    """A :class:`RedactedStream` that also applies :func:`safe`."""

    @property
    def unguarded(self) -> TextIO:
        """The stream below."""
        return self._stream

    def _shown(self, text: str) -> str:
        return safe(text)


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Guard standard output and standard error within the block."""
    before = sys.stdout, sys.stderr
    guard_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def guard_output() -> None:
    """Guard standard output and standard error of this process.

    Characters that the terminal's encoding lacks, as in Latin-1 locales, are shown as ``\\uNNNN``: they come
    from a model or an environment, and must not end a command.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error
    sys.stdout, sys.stderr = cast(TextIO, GuardedStream(sys.stdout)), cast(TextIO, GuardedStream(sys.stderr))


def discard_output() -> None:
    """Let the interpreter's flush at exit succeed (docs.python.org, "Note on SIGPIPE")."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def styled_output() -> TextIO:
    """Standard output for text with colors of our own: secrets are redacted, control characters pass.

    Text of others must go through :func:`safe` before it is written here.
    """
    stream = sys.stdout
    return cast(TextIO, RedactedStream(stream.unguarded)) if isinstance(stream, GuardedStream) else stream


def protect_process(*sources: Mapping[str, str | None]) -> None:
    """Remove secrets and control characters from everything that this process logs and prints.

    ``sources``: see :data:`SecretSources`.  A source that this process cannot read is skipped.
    """
    remember_readable(*sources)
    install_redaction()
    guard_output()


def to_server(sources: SecretSources) -> dict[str, str]:
    """Return variables that pass secret sources to a server that we start; see :func:`protect_server`."""
    return {_VARIABLE: json.dumps(list(sources))}


def protect_server() -> None:
    """Remove secrets from everything that this server logs and prints.

    Control characters stay: the output goes to a file, where libraries draw progress bars.
    """
    remember_readable(*json.loads(os.environ.get(_VARIABLE, "[]")))
    install_redaction()
    sys.stdout = cast(TextIO, RedactedStream(sys.stdout))
    sys.stderr = cast(TextIO, RedactedStream(sys.stderr))
