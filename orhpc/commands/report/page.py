"""The report's page: its data as JSON, a bundled charting library, and the script that draws them.

The page loads nothing from anywhere.  Everything that a run wrote is in the JSON block, whose ``<`` are
escaped, and the script only ever inserts it as text.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from orhpc.commands.goodput import TRAINING, account_of
from orhpc.commands.report.charts import REST, sections_of
from orhpc.commands.report.findings import Evidence, findings
from orhpc.commands.report.gpu_lanes import gpu_lanes
from orhpc.commands.report.overview import (
    MARKS,
    attempts_of,
    clock,
    environments_of,
    facts,
    mark_of,
)
from orhpc.commands.report.rollouts import distributions
from orhpc.commands.report.series import Series, compact, curve
from orhpc.commands.report.settings import differences, provenance_of, settings_of
from orhpc.commands.run_state import duration
from orhpc.process.terminal import safe
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.metrics import metric_of

_MOST_MARKS = 500
"""Marked events of one run on the page, the newest."""
_SLOWEST = 10


def write_report(runs: Sequence[RunDir], output: Path | None = None) -> Path:
    """Write one page about one or several runs and return its path.

    ``output``: file to write; None: ``report.html`` in the first run's directory.
    """
    path = output if output is not None else runs[0].path / "report.html"
    write_atomic(path, page(runs))
    return path


def page(runs: Sequence[RunDir]) -> str:
    """Return the page as HTML."""
    about = [run_data(run) for run in runs]
    names = _distinct([run.path for run in runs])
    for one, name in zip(about, names, strict=True):
        one["name"] = name
    metrics = dict.fromkeys(metric for one in about for metric in one["metrics"])
    data = {
        "made": clock(time.time()),
        "runs": about,
        "sections": [
            {
                "title": section.title,
                "folded": section.title == REST,
                "panels": [
                    {
                        "title": p.title,
                        "metrics": list(p.metrics),
                        "unit": p.unit or _unit(p.metrics),
                        "log": p.log,
                        "about": _about(p.metrics),
                    }
                    for p in section.panels
                ],
            }
            for section in sections_of(metrics, apart=len(about) > 1)
        ],
        "differences": differences([one["settings"] for one in about]) if len(about) > 1 else [],
    }
    shared, assets = files("orhpc.commands") / "assets", files("orhpc.commands.report") / "assets"
    title = html.escape(" and ".join(names))
    # Not readable as markup: a "</script>" in a rollout must not end the block.
    block = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<style>{(shared / 'base.css').read_text('utf-8')}</style>",
            f"<style>{(assets / 'report.css').read_text('utf-8')}</style>",
            "</head><body>",
            '<main id="report"></main>',
            f'<script type="application/json" id="data">{block}</script>',
            f"<script>{(assets / 'echarts.min.js').read_text('utf-8')}</script>",
            f"<script>{(shared / 'dom.js').read_text('utf-8')}</script>",
            f"<script>{(assets / 'report.js').read_text('utf-8')}</script>",
            "</body></html>\n",
        )
    )


def _about(metrics: Sequence[str]) -> str:
    """What the metrics of a panel mean, a line each."""
    known = [(name, found) for name in metrics if (found := metric_of(name)) is not None]
    return "\n".join(f"{name}: {found.meaning}" for name, found in known)


def _unit(metrics: Sequence[str]) -> str:
    units = {found.unit for name in metrics if (found := metric_of(name)) is not None}
    return units.pop() if len(units) == 1 else ""


def run_data(run: RunDir) -> dict[str, Any]:
    """Return everything that the page shows of one run, as JSON values."""
    events = read_events(run.events, orjson.loads)
    steps = [event for _, event in sorted(steps_of(events).items())]
    series = Series.of(steps)
    attempts, spent = attempts_of(run, events), account_of(run, events)
    advantage = settings_of(run).get("algorithm.advantage", "group")
    histograms, samples = distributions(run)
    marks = [mark_of(e) for e in events if e["event"] in MARKS]
    curves = {name: curve(series.steps, values) for name, values in series.metrics.items()}
    return {
        "path": str(run.path),
        "facts": facts(run, events, steps, spent),
        "findings": [
            {"title": f.title, "seen": f.seen, "advice": f.advice, "metric": f.metric}
            for f in findings(Evidence(series, events, attempts, spent, advantage))
        ],
        "metrics": {name: points for name, points in curves.items() if points[0]},
        "times": curve(series.steps, series.times),
        "phases": {name: curve(series.steps, values) for name, values in series.phases.items()},
        "environments": environments_of(steps),
        "slowest": _slowest(series),
        "attempts": [
            {
                "number": a.number,
                "began": a.began,
                "ready": a.ready,
                "last": a.last,
                "steps": "none" if a.first_step is None else f"{a.first_step} to {a.last_step}",
                "end": a.end,
                "changed": a.changed,
            }
            for a in attempts
        ],
        "spent": []
        if spent is None
        else [
            (cause, duration(seconds), compact(seconds / spent.wall))
            for cause, seconds in [(TRAINING, spent.seconds[TRAINING]), *spent.rest(least=0.001)]
        ],
        "marks": marks[-_MOST_MARKS:],
        "marks_left_out": max(0, len(marks) - _MOST_MARKS),
        "evaluations": [_evaluation(e) for e in events if e["event"] == "evaluation"],
        "histograms": histograms,
        "gpus": gpu_lanes(run),
        "samples": [{"title": safe(s["title"]), "text": s["text"]} for s in samples],
        "settings": settings_of(run),
        "provenance": provenance_of(run),
        "steps": len(steps),
    }


def _slowest(series: Series) -> list[dict[str, Any]]:
    """The slowest steps, with the phase that took more than it usually does."""
    if not len(series) or "seconds" not in series.metrics:
        return []
    usual = {name: float(np.sort(values)[len(values) // 2]) for name, values in series.phases.items()}
    seconds = series.metrics["seconds"]
    order = np.argsort(-seconds, kind="stable")[:_SLOWEST].tolist()
    found: list[dict[str, Any]] = []
    for i in order:
        over = {name: float(values[i]) - usual[name] for name, values in series.phases.items()}
        cause = max(over, key=over.__getitem__, default="")
        found.append(
            {
                "step": int(series.steps[i]),
                "seconds": compact(float(seconds[i])),
                "phase": cause,
                "over": compact(over.get(cause, 0.0)),
            }
        )
    return found


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    numbers = {k: compact(v) for k, v in event.items() if isinstance(v, (int, float)) and k not in ("time",)}
    return {"step": event.get("step"), "numbers": numbers}


def _distinct(paths: Sequence[Path]) -> list[str]:
    """The folders' names; where two are equal, as much of the paths as tells them apart."""
    depth = 1
    while depth < 20:
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len({str(p) for p in paths}):
            return names
        depth += 1
    return [str(path) for path in paths]
