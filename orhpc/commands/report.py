"""``orhpc report RUN``: one self-contained HTML page of a run, from its events."""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orhpc.launch.slurm.ledger import outcome_of
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import FAILURES, read_events, steps_of

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: one line per metric over the steps."""

    title: str
    metrics: tuple[str, ...]
    log_scale: bool = False


CHARTS = (
    Chart("Mean reward", ("reward_mean",)),
    Chart("Success rate", ("success_rate",)),
    Chart("Response length, tokens", ("response_length_mean", "response_length_max")),
    Chart(
        "Seconds per step", ("seconds", "phases.rollout", "phases.update", "phases.sync", "phases.checkpoint")
    ),
    Chart(
        "Seconds per rollout: longest, mean, and mean by phase",
        (
            "rollout_seconds_max",
            "rollout_seconds_mean",
            "rollout_opening_seconds_mean",
            "rollout_engine_seconds_mean",
            "rollout_tools_seconds_mean",
        ),
    ),
    Chart("Tokens per second", ("tokens_per_s", "train_tokens_per_s")),
    Chart("Loss", ("loss",)),
    Chart("Gradient norm", ("grad_norm",), log_scale=True),
    Chart("Entropy, nats", ("entropy",)),
    Chart("KL of engine and trainer, nats per token", ("rollout_kl", "logprob_diff_mean"), log_scale=True),
    Chart("Tokens that differ by a factor of two", ("extreme_token_fraction",)),
    Chart("Effective sample size", ("effective_sample_size",)),
    Chart("Fraction routed to different experts", ("token_mismatch_fraction", "router_mismatch_fraction")),
    Chart(
        "Load of the busiest expert and of the busiest expert rank above the mean",
        ("expert_max_vio", "expert_rank_max_vio"),
    ),
    Chart("Clipped tokens", ("clip_fraction",)),
    Chart("Truncated rollouts", ("truncated",)),
    Chart(
        "Failed and retried rollouts, groups lost", ("failed_rollouts", "retried_rollouts", "failed_groups")
    ),
    Chart("Tool calls that raised, malformed calls", ("tool_errors", "malformed_calls")),
)
_ENDS = ("finished", "stopped", "failed")
"""Last events of an attempt that is not killed."""
_FAILURE_COUNTS = {
    "failed_rollouts": "failed rollouts",
    "retried_rollouts": "retried rollouts",
    "failed_groups": "groups lost to failures",
}
WIDTH, HEIGHT, MARGIN = 460, 170, 46
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1480px;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:1.6em}
table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}
th{border-bottom:1px solid #999}figure{display:inline-block;margin:.4em .8em .4em 0}
figcaption{font-weight:600}svg text{font-size:11px;fill:#555}pre{background:#f4f4f4;padding:1em;overflow:auto}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre{background:#222}svg text{fill:#aaa}}
"""


def write_report(run: RunDir) -> Path:
    """Write ``RUN/report.html`` and return its path."""
    path = run.path / "report.html"
    write_atomic(path, page(run))
    return path


def page(run: RunDir) -> str:
    """The page as HTML."""
    events = read_events(run.events)
    steps = [event for _, event in sorted(steps_of(events).items())]
    parts = [
        f"<h1>{_text(run.path.name)}</h1>",
        _summary(run, events, steps),
        "<h2>Steps</h2>",
        *(figure for chart in CHARTS if (figure := draw(chart, steps))),
        *_environments(steps),
        *_events_table("Alarms", events, ("alarm",), newest=50),
        *_events_table("Notices", events, ("notice",), newest=50),
        *_events_table("Restarts and failures", events, FAILURES, newest=50),
        *_events_table("Evaluations", events, ("evaluation",), newest=200),
        "<h2>Attempts</h2>",
        _attempts(run, events),
        f"<h2>Settings</h2><pre>{_text(run.config.read_text(encoding='utf-8', errors='replace'))}</pre>",
    ]
    title = _text(run.path.name)
    head = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    )
    return head + "\n".join(parts) + "</html>\n"


def goodput(events: Sequence[Event]) -> float | None:
    """Fraction of the wall-clock time from the first to the last event that was spent on the run's steps.

    Steps that were repeated after a resume count once; queue time counts as lost.
    """
    steps = steps_of([dict(e) for e in events]).values()
    if not steps:
        return None
    whole = events[-1]["time"] - events[0]["time"]
    return min(1.0, sum(s["seconds"] for s in steps) / whole) if whole > 0 else None


def _summary(run: RunDir, events: Sequence[Event], steps: Sequence[Event]) -> str:
    if not steps:
        return "<p>No step is done yet.</p>"
    last = steps[-1]
    share = goodput(events)
    rows = {
        "step": f"{last['step']} of {last.get('steps', '?')}",
        "mean reward of the first step": _number(steps[0], "reward_mean"),
        "mean reward of the last step": _number(last, "reward_mean"),
        "attempts": str(run.newest_attempt()),
        "committed": str(max((e["step"] for e in events if e["event"] == "commit"), default="nothing yet")),
        "goodput (time spent in steps)": "-" if share is None else f"{share:.1%}",
        "alarms": str(sum(e["event"] == "alarm" for e in events)),
        "last event": f"{events[-1]['event']}, {_clock(events[-1]['time'])}",
    }
    return _table((), rows.items())


def _environments(steps: Sequence[Event]) -> list[str]:
    """A table of the environments: rewards, and failures summed over all steps."""
    names = sorted(
        {k.partition("/")[2] for s in steps for k in s if k.startswith(("reward_mean/", "failed_"))}
    )
    rows = []
    for name in filter(None, names):
        rewards = [s[f"reward_mean/{name}"] for s in steps if f"reward_mean/{name}" in s]
        counts = (sum(s.get(f"{what}/{name}", 0) for s in steps) for what in _FAILURE_COUNTS)
        last = f"{rewards[-1]:.3f}" if rewards else "none was trained"
        rows.append((name, last, *(f"{count:.0f}" for count in counts)))
    head = ("environment", "mean reward of its last step", *_FAILURE_COUNTS.values())
    return ["<h2>Environments</h2>", _table(head, rows)] if rows else []


def _attempts(run: RunDir, events: Sequence[Event]) -> str:
    newest = run.newest_attempt()
    rows: list[tuple[str, ...]] = []
    for number in range(1, newest + 1):
        own = [e for e in events if e.get("attempt") == number]
        done = [e["step"] for e in own if e["event"] == "step"]
        began = _clock(own[0]["time"]) if own else "-"
        steps = f"{min(done)} to {max(done)}" if done else "none"
        rows.append((str(number), began, steps, _end_of(run, number, own, newest=number == newest)))
    return _table(("attempt", "began", "steps", "ended"), rows)


def _end_of(run: RunDir, number: int, own: Sequence[Event], *, newest: bool) -> str:
    """How an attempt ended: from the outcome that a job's launcher writes, or from its last event."""
    if outcome := outcome_of(run, number):
        return f"{outcome.reason} {outcome.detail}".strip()
    if not own:
        return "not yet: it has written no event" if newest else "killed: it wrote no event"
    last = own[-1]
    if last["event"] in _ENDS:
        return f"{last['event']} {last.get('reason') or last.get('error') or ''}".strip()
    name = f"{last['event']} of step {last['step']}" if "step" in last else str(last["event"])
    since = f"its last event is {name}, {_clock(last['time'])}"
    return f"not yet, or killed: {since}" if newest else f"killed: {since}"


def _events_table(title: str, events: Sequence[Event], kinds: tuple[str, ...], newest: int) -> list[str]:
    chosen = [e for e in events if e["event"] in kinds][-newest:]
    hidden = {"event", "time", "attempt"}
    rows = [
        (
            _clock(e["time"]),
            str(e["event"]),
            ", ".join(f"{k} {_short(v)}" for k, v in e.items() if k not in hidden),
        )
        for e in chosen
    ]
    return [f"<h2>{title}</h2>", _table(("time", "event", ""), rows)] if rows else []


def draw(chart: Chart, steps: Sequence[Event]) -> str:
    """One chart as a figure with inline SVG; empty when no step has any of its metrics."""
    lines = {
        m: [(s["step"], v) for s in steps if (v := _value(s, m, chart.log_scale)) is not None]
        for m in chart.metrics
    }
    lines = {metric: points for metric, points in lines.items() if points}
    if not lines:
        return ""
    everything = [point for points in lines.values() for point in points]
    x_low, x_high = (pick(x for x, _ in everything) for pick in (min, max))
    y_low, y_high = (pick(y for _, y in everything) for pick in (min, max))
    if y_low == y_high:
        margin = max(0.5, abs(y_low) / 20)
        y_low, y_high = y_low - margin, y_high + margin

    def at(x: float, y: float) -> str:
        across = MARGIN + (x - x_low) / max(x_high - x_low, 1) * (WIDTH - MARGIN - 8)
        up = 8 + (y_high - y) / (y_high - y_low) * (HEIGHT - 30)
        return f"{across:.1f},{up:.1f}"

    shapes = [
        f'<path d="M{MARGIN},8V{HEIGHT - 22}H{WIDTH - 8}" fill="none" stroke="#999"/>',
        f'<text x="2" y="16">{_axis(y_high, chart)}</text>',
        f'<text x="2" y="{HEIGHT - 22}">{_axis(y_low, chart)}</text>',
        f'<text x="{MARGIN}" y="{HEIGHT - 6}">{x_low}</text>',
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">step {x_high}</text>',
    ]
    legend = []
    for color, (metric, points) in zip(COLORS, lines.items(), strict=False):
        path = " ".join(at(x, y) for x, y in points)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) == 1:
            x, _, y = at(*points[0]).partition(",")
            shapes.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>')
        legend.append(f'<span style="color:{color}">{_text(metric)}</span>')
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(shapes)}</svg>'
    return f"<figure><figcaption>{_text(chart.title)}: {', '.join(legend)}</figcaption>{svg}</figure>"


def _value(step: Event, metric: str, log_scale: bool) -> float | None:
    value: Any = step
    for key in metric.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if log_scale:
        return math.log10(value) if value > 0 else None
    return float(value)


def _axis(value: float, chart: Chart) -> str:
    # The axis extends a little beyond its values, so 10 ** value could overflow.
    return f"{10 ** min(value, sys.float_info.max_10_exp):.2g}" if chart.log_scale else f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "<tr>" + "".join(f"<th>{_text(h)}</th>" for h in head) + "</tr>" if head else ""
    body = ("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{top}{''.join(body)}</table>"


def _number(event: Event, key: str) -> str:
    value = event.get(key)
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _text(value: str) -> str:
    return html.escape(str(value))
