"""The reward curve of a run as data and as a picture.

python tests/gpu/sglang_curve.py EVENTS.jsonl OUT      # OUT.csv, and OUT.png if matplotlib is installed
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from orhpc.rundir.events import read_events, steps_of

COLUMNS = (
    "step", "attempt", "reward_mean", "response_length_mean", "seconds", "logprob_diff_mean", "entropy",
    "sync_seconds_total", "seconds_trainer_sleep", "seconds_trainer_wake",
)  # fmt: skip
SMOOTHED = 5
"""Number of steps averaged by the thick line."""


def write(events: Path, out: Path) -> list[Path]:
    """Write the steps' numbers and their picture; returns the files."""
    steps = [event for _, event in sorted(steps_of(read_events(events)).items())]
    table = out.with_suffix(".csv")
    with table.open("w", newline="") as stream:
        rows = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", restval="")
        rows.writeheader()
        rows.writerows(steps)
    if importlib.util.find_spec("matplotlib") is None:
        return [table]
    return [table, _draw(steps, out.with_suffix(".png"))]


def _draw(steps: list[dict[str, Any]], picture: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    at, rewards = [e["step"] for e in steps], [e["reward_mean"] for e in steps]
    smooth = [sum(rewards[max(0, i - SMOOTHED + 1) : i + 1]) / min(i + 1, SMOOTHED) for i in range(len(at))]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(at, rewards, alpha=0.35, label="mean reward")
    axes.plot(at, smooth, linewidth=2, label=f"of the last {SMOOTHED} steps")
    for before, after in itertools.pairwise(steps):
        if before["attempt"] != after["attempt"]:
            axes.axvline(before["step"] + 0.5, linestyle=":", color="grey", label="stopped and resumed")
    axes.set_xlabel("step")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return picture


if __name__ == "__main__":
    print(*write(Path(sys.argv[1]), Path(sys.argv[2])), sep="\n")
