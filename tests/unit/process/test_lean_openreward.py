"""Importing openreward without the SDKs of which it only names types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run_python(code: str, *paths: Path) -> str:
    code = f"import sys\nsys.path[:0] = {[str(p) for p in paths]}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("module", ["orhpc.environments.server", "orhpc.rollout.environment.environment"])
def test_the_sdks_are_imported_only_by_who_uses_them(module: str) -> None:
    code = f"""
import {module}
assert not {{"anthropic", "anthropic.types", "google.genai", "google.genai.types"}} & set(sys.modules)
import openreward
from openreward.api.rollouts.serializers.ant import serialize_anthropic_message
from openreward.api.rollouts.serializers.gdm import serialize_gdm_message
from anthropic.types import Message
from google.genai import types
assert Message.__module__.startswith("anthropic")
print(serialize_anthropic_message(dict(role="user", content="red"))[0].content)
print(serialize_gdm_message(types.Content(role="user", parts=[types.Part(text="blue")]))[0].content)
"""
    assert run_python(code).split() == ["red", "blue"]


def test_a_package_that_needs_more_than_names_is_imported_whole(tmp_path: Path) -> None:
    (tmp_path / "sdk").mkdir()
    (tmp_path / "sdk" / "__init__.py").touch()
    (tmp_path / "sdk" / "types.py").write_text("LIMIT = 3\n")
    (tmp_path / "user.py").write_text("from sdk.types import LIMIT\nITEMS = list(range(LIMIT))\n")
    code = """
from orhpc.process.lean_openreward import import_without
import_without(["sdk.types"], "user")
import user
print(len(user.ITEMS))
"""
    assert run_python(code, tmp_path).split() == ["3"]


def test_modules_that_are_loaded_stay(tmp_path: Path) -> None:
    (tmp_path / "sdk.py").write_text("class Message: ...\n")
    (tmp_path / "user.py").write_text("from sdk import Message\ndef send(message: Message) -> None: ...\n")
    code = """
import sdk
from orhpc.process.lean_openreward import import_without
import_without(["sdk"], "user")
import user
assert user.send.__annotations__["message"] is sdk.Message and sys.modules["sdk"] is sdk
"""
    run_python(code, tmp_path)
