"""Secrets: from the environment or files of mode 0600 only to the environments that need them.

A config names secrets and their sources, never their values.  Every value read here is also
remembered in this process, so that :class:`RedactingFilter` and :func:`install_redaction` can
remove it from logs and tracebacks.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import stat
import sys
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from orhpc.errors import ConfigError, PreflightError

log = logging.getLogger(__name__)

REDACTED = "[secret]"
SHORTEST = 4
"""Shorter values are not redacted: replacing them would garble every text."""
OF_TRACKERS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DATABRICKS_TOKEN")
"""Variables of the process environment that only trackers of experiments need."""
CREDENTIALS = ("OPENREWARD_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *OF_TRACKERS)
"""Variables whose values are always redacted."""

_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def resolve_secrets(
    global_secrets: Mapping[str, str | None],
    environment_secrets: Mapping[str, str | None],
    *,
    required: Iterable[str] = (),
) -> dict[str, str]:
    """Return the values, by name, of all secrets for one environment.

    The environment's own entry for a name overrides the global one; a required name in neither
    is read from the process environment, in upper case.
    Args:
        global_secrets: ``secrets`` of the config: name to source.
        environment_secrets: ``secrets`` of one environment.
        required: names that the environment declares as required.

    Raises:
        PreflightError: a secret has no value, or its file is missing, empty or readable by others.
    """
    sources = {**dict.fromkeys(required), **global_secrets, **environment_secrets}
    values = {name: _read(name, source) for name, source in sources.items()}
    remember_secrets(values.values())
    return values


def variables_of(sources: Mapping[str, str | None]) -> set[str]:
    """Return the environment variables that are the sources of these secrets."""
    return {_variable(n, s) for n, s in sources.items() if s is None or not s.startswith("file:")}


def _variable(name: str, source: str | None) -> str:
    return name.upper() if source is None else source.removeprefix("env:")


def _read(name: str, source: str | None) -> str:
    if source is not None and source.startswith("file:"):
        return _read_file(name, Path(source.removeprefix("file:")).expanduser())
    variable = _variable(name, source)
    value = os.environ.get(variable, "")
    if not value:
        raise PreflightError(f"secret {name!r}: the environment variable {variable} is not set")
    return value


def _read_file(name: str, path: Path) -> str:
    try:
        # Check the descriptor, not the path, so that the file cannot be swapped in between.
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o177:
                raise PreflightError(f"secret {name!r}: {path} has mode {mode:04o}; chmod it to 0600")
            value = file.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise PreflightError(f"secret {name!r}: {path} cannot be read: {reason}") from None
    if not value:
        raise PreflightError(f"secret {name!r}: {path} is empty")
    return value


def read_engine_key(path: Path | None) -> str | None:
    """Return an engine's key from a file that only this user can read; None without a file.

    The key is redacted from now on.  Raises ConfigError.
    """
    if path is None:
        return None
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"--api-key-file {path} can be read by others: chmod 600 it")
        key = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from error
    if not key:
        raise ConfigError(f"--api-key-file {path} is empty")
    remember_secrets([key])
    return key


def remember_secrets(values: Iterable[str]) -> None:
    """Redact these values from now on, also when quoted for JSON or a URL, and in base64."""
    global _pattern
    for value in values:
        if len(value) < SHORTEST:
            continue
        encoded = value.encode(errors="surrogateescape")
        _known.update(
            (
                value,
                json.dumps(value)[1:-1],
                urllib.parse.quote(encoded, safe=""),
                base64.b64encode(encoded).decode(),
            )
        )
    longest_first = sorted(_known, key=len, reverse=True)
    _pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def remember_readable(*sources: Mapping[str, str | None]) -> None:
    """Remember every secret of these sources that this process can read, and :data:`CREDENTIALS`.

    Args:
        sources: ``secrets`` of a config: name to source.
    """
    found = [os.environ.get(name, "") for name in CREDENTIALS]
    if password := os.environ.get("MLFLOW_TRACKING_PASSWORD"):
        # HTTP sends both in one base64 text, in which the password's does not occur.
        found.append(f"{os.environ.get('MLFLOW_TRACKING_USERNAME', '')}:{password}")
    for name, source in (item for of in sources for item in of.items()):
        try:
            found.append(_read(name, source))
        except PreflightError as error:
            log.debug("%s", error)
    remember_secrets(found)


def redact(text: str) -> str:
    """Return the text with every known secret replaced by :data:`REDACTED`."""
    return _pattern.sub(REDACTED, text) if _pattern else text


def redact_strings(value: Any) -> Any:
    """Return a JSON value with :func:`redact` applied to every string in it, keys included."""
    if _pattern is None:
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_strings(key): redact_strings(inner) for key, inner in value.items()}
    return [redact_strings(inner) for inner in value] if isinstance(value, list) else value


class RedactingFilter(logging.Filter):
    """Redacts a record in place: message, arguments, traceback and stack."""

    _formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        if _pattern is None:
            return True
        try:
            record.msg, record.args = redact(record.getMessage()), ()
        except (TypeError, ValueError):
            # The arguments do not fit the format; logging reports that itself, including both.
            record.msg, record.args = redact(f"{record.msg} {record.args!r}"), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = self._formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


def install_redaction() -> None:
    """Redact every log record of this process, from any logger, and uncaught exceptions.

    A filter on a logger does not apply to its children's records, so this replaces the record factory.
    Calling it again changes nothing.
    """
    factory = logging.getLogRecordFactory()
    if getattr(factory, "redacts", False):
        return
    redactor = RedactingFilter()

    def redacting_factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = factory(*args, **kwargs)
        redactor.filter(record)
        return record

    redacting_factory.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(redacting_factory)
    sys.excepthook = _redacting_excepthook


def _redacting_excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    import traceback

    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
