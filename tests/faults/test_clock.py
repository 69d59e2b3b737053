"""Deadlines are monotonic: a clock that is set or differs between nodes decides nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "orhpc"
FOLDERS = ("driver", "rollout", "train")
ALLOWED = {"rollout/environment/receiving.py": "the date of a Retry-After is wall-clock time"}


def computed_with(path: Path) -> list[int]:
    """Lines in which a time of the wall clock is compared or computed with."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp):
            operands = [node.left, node.right]
        lines += [node.lineno for o in operands if ast.unparse(o) in ("time.time()", "datetime.now()")]
    return lines


@pytest.mark.slow
def test_no_deadline_depends_on_the_wall_clock() -> None:
    files = [path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    found = {str(path.relative_to(PACKAGE)) for path in files if computed_with(path)}
    assert found == set(ALLOWED)
