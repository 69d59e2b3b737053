"""Files to which a process appends lines, which a full filesystem delays but does not lose."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from orhpc.process.access import file_mode


class AppendedFile:
    """Appends lines to a file; several processes and threads may do so at the same time.

    Lines are appended by a single ``write`` each, so those of several processes never mix.  The last line of
    a killed process may be incomplete; it is ended when the file is opened again, and readers skip it.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._unwritten = b""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, file_mode())
        self._end_torn_line(path)

    def add(self, line: bytes) -> bool:
        """Add a line, which must end with a newline; :meth:`write` writes it.

        Returns whether earlier lines still wait to be written.
        """
        with self._lock:
            waiting = bool(self._unwritten)
            self._unwritten += line
            return waiting

    def write(self, *, durable: bool = False) -> None:
        """Write all added lines; ``durable``: also after a power failure.

        Raises:
            OSError: not all could be written; the rest is kept for the next call.
        """
        with self._lock:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
            if durable:
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; lines that are not written are lost."""
        os.close(self._descriptor)

    def _end_torn_line(self, path: Path) -> None:
        """End the incomplete line of a killed process, so that the first new line is not appended to it."""
        size = path.stat().st_size
        if size:
            with path.open("rb") as stream:
                stream.seek(size - 1)
                if stream.read(1) != b"\n":
                    os.write(self._descriptor, b"\n")
