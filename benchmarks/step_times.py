"""Compare the step times that ``orhpc plan`` predicts with the measured ones of RESULTS.md.

    python -m benchmarks.step_times [--errors]

The rows are in ``benchmarks/step_times.yaml``.  Without an option it prints the table of
``docs/guide/step-times.md``; with ``--errors`` the table of ``orhpc/plan/step_errors.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orhpc.commands.plan_calibration import CALIBRATED
from orhpc.config.files import load_config
from orhpc.launch.checks.fit import KNOWN_DEVICES
from orhpc.plan.run_plan import RunPlan, make_plan
from orhpc.plan.speeds import CARDS, speed
from orhpc.plan.step_errors import Error
from orhpc.plan.step_time import StepTimes, predict
from orhpc.plan.update_time import predict_update
from orhpc.plan.workload import Workload

ROWS = Path(__file__).with_suffix(".yaml")
HEAD = ("measured on", "phase", "measured, s", "predicted, s", "off", "")


@dataclass(frozen=True, slots=True)
class Compared:
    """One measured time and its prediction."""

    row: dict[str, Any]
    phase: str
    kind: str
    """Key of the table of errors."""
    measured: float
    predicted: float

    @property
    def off(self) -> float:
        """Deviation, as a share of the measured seconds."""
        return self.predicted / self.measured - 1

    @property
    def fitted(self) -> bool:
        return self.phase in self.row.get("fitted", [])


def rows() -> list[dict[str, Any]]:
    """Return the measured rows, each with the ``config.json`` of its model as ``content``."""
    read = yaml.safe_load(ROWS.read_text())
    found = []
    for row in read["rows"]:
        content = dict(read["models"][row["model"]])
        content["num_hidden_layers"] = row.get("layers", content["num_hidden_layers"])
        found.append({**row, "content": content})
    return found


def plan_of(row: dict[str, Any], folder: Path) -> RunPlan:
    """Return the plan of a row's config; ``folder`` gets its model's ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(row["content"]))
    overrides = [f"model.path={folder}", *row["settings"], *row.get("more", [])]
    if not row.get("state_stays"):  # trainers moved all state before they could keep it
        overrides.append("placement.offload=always")
    earlier_recipe = Path(__file__).with_name(row["config"])
    config = load_config(str(earlier_recipe) if earlier_recipe.is_file() else row["config"], overrides)
    return make_plan(config, KNOWN_DEVICES[row["card"]])


def compare(folder: Path) -> Iterator[Compared]:
    """Yield every measured time with its prediction."""
    for index, row in enumerate(rows()):
        run = plan_of(row, folder / str(index))
        work = Workload(**row["work"], assumed=False)
        times = predict(run, row["card"], work)
        kind = "mixture" if run.shape.experts else "dense"
        predicted = _seconds(run, times)
        if row.get("alone"):  # without what a run's driver and workers add
            predicted["update"] = predict_update(
                run.config, run.shape, CARDS[row["card"]], work
            ).seconds - speed("step")
        for phase, measured in row["seconds"].items():
            of_backend = f", {run.config.train.backend}" if phase == "update" else ""
            yield Compared(row, phase, f"{phase}, {kind}{of_backend}", measured, predicted[phase])


def _seconds(run: RunPlan, times: StepTimes) -> dict[str, float]:
    found = {phase.name: phase.seconds for phase in times.phases if phase.seconds is not None}
    if times.seconds is not None:
        found["step"] = times.seconds
    if times.rollout is not None:
        found |= {name: getattr(times.rollout, name) for name in ("generate", "sleep", "wake")}
    return found


def errors(compared: list[Compared]) -> dict[str, Error]:
    """Return the deviations by kind."""
    found: dict[str, list[float]] = {}
    for each in compared:
        found.setdefault(each.kind, []).append(abs(each.off))
    return {
        kind: Error(len(off), round(statistics.median(off), 2), round(max(off), 2))
        for kind, off in sorted(found.items())
    }


def calibrated(compared: list[Compared]) -> list[tuple[float, float]]:
    """Return deviations before and after calibration with another row of the same machine.

    Each phase that ``orhpc plan`` calibrates is compared with that of every other row of its machine and
    kind.
    """
    found = []
    for each, other in itertools.permutations((c for c in compared if "machine" in c.row), 2):
        same = each.row["machine"] == other.row["machine"] and each.kind == other.kind
        if same and each.phase in CALIBRATED and each.row is not other.row:
            factor = other.measured / other.predicted
            found.append((each.off, factor * each.predicted / each.measured - 1))
    return found


def table(compared: list[Compared]) -> str:
    """Return the comparison in Markdown, held-out rows marked."""
    lines = [" | ".join(HEAD), "|".join("---" for _ in HEAD)]
    for each in compared:
        row = each.row
        where = f"{row['name']} ({row['card'].upper()}, `{row['commit']}`)"
        cells = (
            where, each.phase, f"{each.measured:.3g}", f"{each.predicted:.3g}", f"{100 * each.off:+.0f} %",
            "fitted" if each.fitted else "held out",
        )  # fmt: skip
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--errors", action="store_true", help="print the table of orhpc/plan/step_errors.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compared = list(compare(Path(folder)))
    if options.errors:
        for kind, error in errors(compared).items():
            print(f'    "{kind}": Error({error.rows}, {error.median}, {error.largest}),')
        return 0
    print(table(compared))
    pairs = calibrated(compared)
    within = [sum(abs(pair[i]) <= 0.15 for pair in pairs) for i in (0, 1)]
    print(f"\nof {len(pairs)} pairs of one machine {within[0]} within 15 %, calibrated {within[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
