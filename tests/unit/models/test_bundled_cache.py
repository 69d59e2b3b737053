"""The cache of bundled models, which a home may not allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orhpc.errors import EXIT_PREFLIGHT
from orhpc.models import bundled


@pytest.mark.parametrize("why", ["a read-only home", "others can write to it"])
def test_a_cache_that_cannot_be_used_is_one_line(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bundled", "tiny"])
    if why == "a read-only home":
        monkeypatch.setenv("ORHPC_CACHE", "/proc/no/cache")  # where not even root can make a folder
        wanted = "model.path: /proc/no/cache cannot be written (No such file or directory): set ORHPC_CACHE"
    else:
        monkeypatch.setenv("ORHPC_CACHE", str(tmp_path))
        tmp_path.chmod(0o777)
        wanted = f"ORHPC_CACHE: other users can write to {tmp_path} (mode 0777)"
    assert bundled.main() == EXIT_PREFLIGHT
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "PreflightError"
    assert answer["error"].startswith(wanted)
