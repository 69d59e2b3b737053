"""Text of others on its way to a terminal or a log: shown, never obeyed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from orhpc.process.secrets import install_redaction, redact, remember_readable

SecretSources = Sequence[Mapping[str, str | None]]
"""Where secrets come from, name to source: those of the config, and those of each of its environments."""
_VARIABLE = "ORHPC_SECRET_SOURCES"

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, marks that turn the direction of writing, and lone surrogates."""


def safe(text: str) -> str:
    """Return a text with its control characters shown as ``\\xNN`` or ``\\uNNNN``.

    An environment's or a model's text must not move the cursor, rename the window or fake a line.
    """
    return _CONTROL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class RedactedStream:
    """A text stream that writes everything without known secrets."""

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
    """Likewise, and everything :func:`safe`."""

    def _shown(self, text: str) -> str:
        return safe(text)


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Guard standard output and standard error until the block ends."""
    before = sys.stdout, sys.stderr
    guard_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def guard_output() -> None:
    """Guard standard output and standard error of this process."""
    sys.stdout, sys.stderr = cast(TextIO, GuardedStream(sys.stdout)), cast(TextIO, GuardedStream(sys.stderr))


def protect_process(*sources: Mapping[str, str | None]) -> None:
    """Keep secrets and control characters out of all that this process logs and prints.

    ``sources``: a :data:`SecretSources`.  A process that cannot read one cannot repeat it.
    """
    remember_readable(*sources)
    install_redaction()
    guard_output()


def to_server(sources: SecretSources) -> dict[str, str]:
    """Variables that tell a server that we start where secrets come from: see :func:`protect_server`."""
    return {_VARIABLE: json.dumps(list(sources))}


def protect_server() -> None:
    """Keep secrets out of all that this server logs and prints.

    Into a file, where libraries draw progress bars: control characters stay.
    """
    remember_readable(*json.loads(os.environ.get(_VARIABLE, "[]")))
    install_redaction()
    sys.stdout = cast(TextIO, RedactedStream(sys.stdout))
    sys.stderr = cast(TextIO, RedactedStream(sys.stderr))
