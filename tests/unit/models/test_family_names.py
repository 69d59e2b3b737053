"""Only ``orhpc/models/families`` names model families."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import orhpc
from orhpc.models.families import FAMILIES

PACKAGE = Path(orhpc.__file__).parent
ALLOWED = {
    "models/families": "the families themselves",
    "models/bundled.py": "builds random models, and must say of which families",
}
"""Modules and folders that may name families, and why."""
SHORTEST_START = 3
"""Characters of a family's name that ``startswith`` may not ask for; shorter ones match other texts too."""


def named_families(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is a family's name or a tested prefix of one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in FAMILIES:
            yield node.lineno, str(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            for text in _asked_starts(node):
                if text not in FAMILIES and any(name.startswith(text) for name in FAMILIES):
                    yield node.lineno, text


def _asked_starts(call: ast.Call) -> Iterator[str]:
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr in ("startswith", "removeprefix"):
        for node in (part for argument in call.args for part in ast.walk(argument)):
            if isinstance(node, ast.Constant) and len(str(node.value)) >= SHORTEST_START:
                yield str(node.value)


@pytest.mark.slow
def test_no_other_module_names_a_family() -> None:
    modules = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    assert len(modules) > 100
    found = [
        f"orhpc/{module}:{line}: {text!r}"
        for module in modules
        if not any(module.is_relative_to(allowed) for allowed in ALLOWED)
        for line, text in named_families((PACKAGE / module).read_text(encoding="utf-8"))
    ]
    assert not found, f"read a field of the family's row instead: {found}"


def test_every_exception_still_exists() -> None:
    for allowed in ALLOWED:
        files = [PACKAGE / allowed] if allowed.endswith(".py") else list((PACKAGE / allowed).glob("*.py"))
        assert any(list(named_families(file.read_text(encoding="utf-8"))) for file in files), allowed


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("scaled = family == 'gemma2'", ["gemma2"]),
        ("if kind in ('qwen2_moe', 'qwen3_moe'): pass", ["qwen2_moe", "qwen3_moe"]),
        ("match kind:\n    case 'llama4': pass", ["llama4"]),
        ("WHY = {'glm4': 'no'}", ["glm4"]),
        ("gemma = family.startswith('gemma')", ["gemma"]),
        ("qwen = family.startswith(('qwen', 'x'))", ["qwen"]),
        ("path.startswith('/') and text == 'a llama'", []),
    ],
)
def test_every_way_to_name_a_family_is_detected(source: str, found: list[str]) -> None:
    assert sorted(text for _, text in named_families(source)) == found
