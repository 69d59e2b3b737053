"""docs/faults.md is current, and every test and figure that it names exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from orhpc.config.faults import KINDS, FaultKind, Target
from tests.faults.page import Row, page, rows

ROOT = Path(__file__).parents[2]
ALL = rows()


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/faults.md").read_text() == page()


def test_every_fault_has_one_row() -> None:
    assert len(ALL) == 44
    assert len({row.fault for row in ALL}) == 44


@pytest.mark.slow
@pytest.mark.parametrize("row", ALL, ids=lambda row: row.fault)
def test_the_named_tests_exist(row: Row) -> None:
    for test in row.tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, f"{file} has no test {name}"


@pytest.mark.parametrize("row", [row for row in ALL if row.measured], ids=lambda row: row.fault)
def test_the_measured_time_is_in_the_named_file(row: Row) -> None:
    """The seconds of T, rounded as on the page, stand in a line of a table in the file."""
    seconds = row.measured.partition("T ")[2].split()[0].strip(",;")
    cells = [
        cell.strip()
        for line in (ROOT / row.source).read_text().splitlines()
        if line.startswith("|")
        for cell in line.split("|")
    ]
    numbers = {round(float(cell)) for cell in cells if cell.replace(".", "", 1).isdigit()}
    assert int(seconds) in numbers


def test_every_kind_of_a_drill_has_a_row() -> None:
    assert {row.drill for row in ALL if row.drill} == set(FaultKind)


def test_the_guide_explains_every_kind_with_what_its_index_counts() -> None:
    guide = (ROOT / "docs/guide/drill.md").read_text()
    lines = [line for line in guide.partition("## The faults")[2].splitlines() if line.startswith("| `")]
    for kind, injection in KINDS.items():
        (index,) = [line.split("|")[3] for line in lines if f"`{kind}`" in line.split("|")[1]]
        counted = "" if injection.target is Target.NOTHING else injection.target.value
        assert index.strip() == counted, kind
