"""The files and the table of ``benchmarks/gpu/moe_update.py``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALONE, EXPERTS, TENSORS = "TP 1 EP 1", "TP 1 EP 2", "TP 2 EP 2"
LAYOUTS: dict[str, dict[str, Any]] = {ALONE: {}, EXPERTS: {"ep": 2}, TENSORS: {"tp": 2, "ep": 2}}
SPARE_S = 12.0
"""Seconds that a further case needs at least."""


class Results:
    """What the first rank of a layout measured, in a file that is replaced after each value.

    All ranks read it when they start, so that they measure the same cases.
    """

    def __init__(self, out: Path, layout: str, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.path = results_file(out, layout)
        self._case = self.path.with_suffix(".case")
        self._reason = self.path.with_suffix(f".reason-{rank}")
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self._known = set(self.found)

    @property
    def current(self) -> str:
        """The case that was begun last."""
        return self._case.read_text()

    def begin(self, name: str) -> None:
        """Note which case is measured, for :meth:`age`."""
        if self.rank == 0:
            _replace(self._case, name)

    def age(self) -> tuple[str, float]:
        """The case that is measured, and since how many seconds."""
        return self.current, time.time() - self._case.stat().st_mtime

    def waits(self, name: str, turn: int) -> bool:
        """Whether a case is to be measured: in the first turn only if an earlier process did not."""
        row = self.row(name)
        if "failed" in row or "skipped" in row:
            return False
        return turn > 0 or name not in self._known

    def row(self, name: str) -> dict[str, Any]:
        return self.found.get(name, {})

    def put(self, name: str, value: dict[str, Any]) -> None:
        self.found[name] = value
        if self.rank == 0:
            _replace(self.path, json.dumps(self.found, indent=1))
            print(f"{self.layout}, {name}: {str(value)[:600]}", flush=True)

    def explain(self, reason: str) -> None:
        """Say why this rank ends, for :meth:`reason`."""
        _replace(self._reason, reason)

    def reason(self) -> str:
        """Return why this rank ended, once; empty if it did not say."""
        text = self._reason.read_text() if self._reason.exists() else ""
        self._reason.unlink(missing_ok=True)
        return text

    def fail(self, reason: str, name: str) -> None:
        """Note a failure in addition to what was measured of the case before."""
        self.put(name, self.row(name) | {"failed": reason})


def results_file(out: Path, layout: str) -> Path:
    return out / f"moe_update-{layout.replace(' ', '')}.json"


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text)
    part.replace(path)


def joined(out: Path, layouts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The results by layout."""
    files = {layout: results_file(out, layout) for layout in layouts}
    return {la: json.loads(path.read_text()) if path.exists() else {} for la, path in files.items()}


COLUMNS = {
    "tflops": "TFLOP/s a GPU",
    "tokens_s": "tokens/s a GPU",
    "seconds": "s",
    "peak_gib": "peak GiB",
    "planned_gib": "planned",
    "exchange_share": "all-to-all, share",
    "exposed_s": "of it alone, s",
    "host_waits": "host waits",
    "host_wait_s": "host waits, s",
    "idle_share": "GPU idle",
    "expert_rank_max_vio": "rank max vio",
}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: the cases, then what else was found.  ``speed-up``: over the layout's first case."""
    lines = [
        f"| layout | recompute, tokens, routes | speed-up | {' | '.join(COLUMNS.values())} |",
        "|---" * (3 + len(COLUMNS)) + "|",
    ]
    others: list[str] = []
    for layout, rows in found.items():
        timed = {name: row for name, row in rows.items() if "tflops" in row}
        first = next(iter(timed.values()), {"tflops": 0.0})["tflops"]
        for name, row in rows.items():
            if name in timed:
                up = f"{row['tflops'] / first:.2f}" if first else ""
                cells = [f"{row[c]:.3g}" if c in SMALL and c in row else str(row.get(c, "")) for c in COLUMNS]
                lines.append(f"| {layout} | {name} | {up} | {' | '.join(cells)} |")
                if "by_kind" in row:
                    kinds = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in row["by_kind"].items())
                    others.append(f"{layout}, {name}: {row['kernels']} kernels; s by kind: {kinds}")
            if name not in timed or "failed" in row:
                others.append(f"{layout}, {name}: {row.get('failed') or row.get('skipped') or row}")
        for kind in ("natural", "even"):
            norms = [row["grad_norm"] for name, row in timed.items() if name.endswith(kind)]
            if norms:
                others.append(f"{layout}, {kind}: gradient norms within {max(norms) / min(norms) - 1:.1e}")
    return "\n".join([*lines, *others])


SMALL = {"exchange_share", "exposed_s", "host_wait_s", "idle_share", "expert_rank_max_vio"}
