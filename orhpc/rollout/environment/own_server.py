"""Server process of a served environment, owned by one process outside a job (``orhpc try-env``)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from orhpc.config import EnvironmentSettings
from orhpc.errors import ConfigError
from orhpc.process.hashing import same_hashes
from orhpc.process.parent import naming_parent
from orhpc.process.ports import hold_port
from orhpc.process.user_code import user_frames

_HEAD = "Traceback (most recent call last):"


class OwnServer:
    """Serves ``environments.NAME.serve`` on loopback inside a ``with`` block."""

    def __init__(self, name: str, settings: EnvironmentSettings, folder: Path) -> None:
        """``folder``: where the server's log is written; with ``data``, also that of the task files."""
        self._listener = hold_port("127.0.0.1")
        port = self._listener.getsockname()[1]
        self.key = secrets.token_urlsafe(32)
        """Bearer token that requests must carry."""
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "environment.log"
        self._name = name
        self._command = [sys.executable, "-m", "orhpc.environments.server"]
        environment, options = settings.served(folder)
        self._command += ["--environment", environment, "--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--options-json", json.dumps(options), "--key-from-stdin"]
        self._command += ["--listen-fd", str(self._listener.fileno())]
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            # Tracebacks are read from the log while the server runs.
            quiet = {"OPENREWARD_LOG_LEVEL": "WARNING", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
            env = naming_parent(same_hashes({**os.environ, **quiet}))
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env,
                pass_fds=[self._listener.fileno()],
            )  # fmt: skip
        assert self._process.stdin is not None
        # check() reports a server that has exited already.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:
            stream.write(f"{self.key}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._listener.close()

    def check(self) -> None:
        """Raises ConfigError with the server's last output line when the server has exited."""
        if self._process is None or self._process.poll() is None:
            return
        output = self.log.read_text(errors="replace").rstrip()
        if _HEAD in output:
            print(user_frames(_last_traceback(output)), file=sys.stderr)
        last = output.splitlines()[-1] if output else "the environment server exited without output"
        raise ConfigError(last.removeprefix("orhpc: "))

    def last_traceback(self) -> str:
        """The latest traceback written to the log since the last call, from the user's first frame on."""
        text = self.log.read_text(errors="replace")
        new, self._read = text[self._read :], len(text)
        return user_frames(_last_traceback(new)) if _HEAD in new else ""


def _last_traceback(text: str) -> str:
    """A traceback ends with the first non-indented line after its frames."""
    lines = text[text.rindex(_HEAD) :].splitlines()
    end = next(
        (i for i, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), len(lines) - 1
    )
    return "\n".join(lines[: end + 1])
