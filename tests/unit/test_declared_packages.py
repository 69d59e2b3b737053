"""The wheel requires every package that the code imports, itself or by an extra."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMES_WITH = {
    "pydantic_core": "pydantic", "transformer_engine_torch": "transformer_engine", "triton": "torch",
    "yarl": "aiohttp",
}  # fmt: skip
"""Modules that are in the interface of another package, which requires them."""


def imported_modules() -> set[str]:
    """Names of the modules outside of the standard library that any file of orhpc imports."""
    names = set()
    for file in (ROOT / "orhpc").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"orhpc"}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


@pytest.mark.slow
def test_every_imported_package_is_required() -> None:
    required = {normal(re.split(r"[\[><=!~; ]", line)[0]) for line in requires("orhpc") or []}
    modules = imported_modules()
    assert {"ray", "torch", "openreward"} <= modules
    known = packages_distributions()
    packages = {m: known.get(COMES_WITH.get(m, m), [COMES_WITH.get(m, m)]) for m in modules}
    assert {m: names for m, names in packages.items() if required.isdisjoint(map(normal, names))} == {}
