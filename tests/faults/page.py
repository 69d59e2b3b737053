"""Write docs/faults.md from rows.yaml: ``python -m tests.faults.page > docs/faults.md``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orhpc.config.faults import FaultKind

ROWS = Path(__file__).with_name("rows.yaml")
HEAD = """\
# Faults, and what tests them

<!-- Generated from tests/faults/rows.yaml by `python -m tests.faults.page > docs/faults.md`; do not edit. -->

What a run is expected to survive, how each fault is made in the tests, and which tests they are. "Measured"
has figures that are written down elsewhere: L steps lost, T seconds from the fault (of a preemption: from the
requeue) to the first new step. They are of a tiny model on four SLURM nodes that share two cores, unless
another machine is named. A kind in the column "drill" can be rehearsed on your own cluster with
[`orhpc drill`](guide/drill.md). What no test covers is in [its own list](#not-covered).
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One fault."""

    fault: str
    inject: str
    expected: str
    tests: tuple[str, ...]
    drill: FaultKind | None
    measured: str
    source: str
    open: str
    """What no test covers, and why; empty: nothing."""

    @property
    def title(self) -> str:
        return self.fault[:1].upper() + self.fault[1:]


def rows(path: Path = ROWS) -> list[Row]:
    """Read the rows, in order.  Raises KeyError or ValueError for an incomplete one."""
    found = []
    for entry in yaml.safe_load(path.read_text()):
        known: dict[str, Any] = dict(entry)
        row = Row(
            known.pop("fault"), known.pop("inject"), known.pop("expected"), tuple(known.pop("tests")),
            FaultKind(known.pop("drill")) if "drill" in known else None,
            known.pop("measured", ""), known.pop("in", ""), known.pop("open", "").strip(),
        )  # fmt: skip
        if known:
            raise ValueError(f"{row.fault}: unknown keys {', '.join(known)}")
        if not row.tests and not row.open:
            raise ValueError(f"{row.fault}: neither a test, nor why there is none")
        if bool(row.measured) != bool(row.source):
            raise ValueError(f"{row.fault}: a measured figure and where it is written down belong together")
        found.append(row)
    return found


def page() -> str:
    """Return the page's text."""
    all_rows = rows()
    tested = sum(bool(row.tests) for row in all_rows)
    partly = sum(bool(row.tests and row.open) for row in all_rows)
    parts = [HEAD, f"{tested} of {len(all_rows)} have tests, {partly} of them with a gap.\n"]
    parts.append("| # | fault | made by | expected | drill | measured |\n|---|---|---|---|---|---|")
    for number, row in enumerate(all_rows, 1):
        drill = f"`{row.drill}`" if row.drill else ""
        parts.append(f"| {number} | {row.title} | {row.inject} | {row.expected} | {drill} | {row.measured} |")
    parts.append("\n## Tests\n")
    for number, row in enumerate(all_rows, 1):
        listed = "".join(f"\n   - `{test}`" for test in row.tests) or "\n   - none"
        parts.append(f"{number}. {row.title}{f' (figures: {row.source})' if row.source else ''}{listed}")
    parts.append("\n## Not covered\n")
    parts += [f"* **{n}, {row.fault}**: {row.open}" for n, row in enumerate(all_rows, 1) if row.open]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
