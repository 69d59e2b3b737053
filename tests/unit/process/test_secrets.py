"""Secrets: order of sources, file modes, and that no value appears in a log."""

from __future__ import annotations

import base64
import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.errors import PreflightError
from orhpc.process import secrets


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setattr(secrets, "_pattern", None)


def _secret_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return f"file:{path}"


def test_null_reads_the_upper_case_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "upper")
    monkeypatch.setenv("tavily_api_key", "lower")
    assert secrets.resolve_secrets({}, {"tavily_api_key": None}) == {"tavily_api_key": "upper"}


def test_secrets_of_the_environment_override_global_ones_and_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONE", "process one")
    monkeypatch.setenv("TWO", "process two")
    monkeypatch.setenv("THREE", "process three")
    monkeypatch.setenv("OTHER", "other")
    found = secrets.resolve_secrets(
        {"one": "env:OTHER", "two": "env:OTHER"},
        {"one": _secret_file(tmp_path, "from the file\n")},
        required=["one", "two", "three"],
    )
    assert found == {"one": "from the file", "two": "other", "three": "process three"}


@pytest.mark.parametrize("source", [None, "env:NOT_SET_ANYWHERE", "file:/nonexistent/key"])
def test_the_error_for_a_missing_secret_names_it(source: str | None) -> None:
    with pytest.raises(PreflightError, match="'not_set_anywhere'"):
        secrets.resolve_secrets({}, {"not_set_anywhere": source})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o700, 0o666])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(PreflightError, match="0600"):
        secrets.resolve_secrets({"k": _secret_file(tmp_path, "value", mode)}, {})


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="empty"):
        secrets.resolve_secrets({"k": _secret_file(tmp_path, "\n")}, {})


def test_a_binary_file_gives_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\xff\xfe\x00")
    path.chmod(0o600)
    with pytest.raises(PreflightError, match="not text"):
        secrets.resolve_secrets({"k": f"file:{path}"}, {})


@given(st.text(min_size=6).filter(str.strip), st.text(), st.text())
def test_redaction_replaces_every_known_value(value: str, before: str, after: str) -> None:
    if value in secrets.REDACTED:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "_known", set())
        patch.setattr(secrets, "_pattern", None)
        secrets.remember_secrets([value])
        hidden = secrets.redact(before + value + after)
        assert value not in hidden.replace(secrets.REDACTED, "\0")


def test_longer_secrets_are_replaced_before_their_prefixes() -> None:
    secrets.remember_secrets(["abcdef", "abcdefghi"])
    assert secrets.redact("x abcdefghi y") == f"x {secrets.REDACTED} y"


def _log_through_filter(log: logging.Logger) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(secrets.RedactingFilter())
    log.addHandler(handler)
    log.propagate = False
    try:
        log.warning("key %s and %r", "hunter2hunter2", {"key": "hunter2hunter2"})
        log.warning("badly formatted hunter2hunter2 %s %s", "hunter2hunter2")
        try:
            raise RuntimeError("refused key hunter2hunter2")
        except RuntimeError:
            log.exception("failed", stack_info=True)
    finally:
        log.removeHandler(handler)
    return stream.getvalue()


def test_the_filter_covers_arguments_tracebacks_and_bad_formats() -> None:
    secrets.remember_secrets(["hunter2hunter2"])
    output = _log_through_filter(logging.getLogger("test.redaction"))
    assert "hunter2" not in output
    assert output.count(secrets.REDACTED) >= 4
    assert "RuntimeError" in output


def test_headers_in_base64_are_redacted_too() -> None:
    secrets.remember_secrets(["hunter2hunter2"])
    header = f"X-Key: {base64.b64encode(b'hunter2hunter2').decode()}"
    assert secrets.redact(header) == f"X-Key: {secrets.REDACTED}"


def test_installed_redaction_covers_child_loggers_and_uncaught_exceptions() -> None:
    code = """
import logging
from orhpc.process import secrets
secrets.install_redaction()
secrets.install_redaction()
logging.basicConfig()
secrets.resolve_secrets({"MY_KEY": None}, {})
logging.getLogger("a.b.c").error("the key is %s", "hunter2hunter2")
raise SystemError("and here: hunter2hunter2")
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"MY_KEY": "hunter2hunter2", "PATH": ""},
        cwd=Path(__file__).parents[3],
    )
    assert result.returncode == 1
    assert "hunter2" not in result.stderr
    assert result.stderr.count(secrets.REDACTED) == 2
    assert "SystemError" in result.stderr


def test_a_password_is_redacted_as_http_sends_it_with_its_user_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a long password")
    secrets.remember_readable()
    sent = base64.b64encode(b"bob:a long password").decode()
    assert secrets.redact(f"denied for Basic {sent}") == f"denied for Basic {secrets.REDACTED}"
