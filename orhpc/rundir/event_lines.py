"""Format events as single lines, for the live display and the driver's log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Event = dict[str, Any]


BUDGETS = ("bring_up", "trainers_restarted", "out_of_memory_recovered", "token_budget_raised")
"""Events with the token budget of a micro-batch."""


_OF_PARTS: dict[str, Callable[[Event], str]] = {
    "fault_injected": lambda event: f"injected the fault {event.get('fault')}",
    "engines_ended": lambda event: f"engines have ended: {_list(event.get('engines'))}{_reason(event)}",
    "engines_restarted": lambda event: f"restarted engines: {_list(event.get('engines'))}",
    "worker_ended": lambda event: f"rollout worker {event.get('worker')} on {event.get('node')} has ended",
    "worker_restarted": lambda event: f"restarted rollout worker {event.get('worker')}",
    "node_replaced": lambda event: f"node replaced: {event.get('error')}",
    "environment_restarted": lambda event: f"restarted environment server {event.get('server')}",
}
"""Lines about single parts of a run."""


def spares_of(events: Sequence[Event]) -> tuple[int, int] | None:
    """Spare nodes of the newest attempt: how many have replaced a node, and how many are left.

    None if the attempt has none.
    """
    own = [e for e in events if e["attempt"] == events[-1]["attempt"]]
    if not any(e["event"] == "spares" for e in own):
        return None
    used = sum(e["event"] == "node_replaced" for e in own)
    last = next(e for e in reversed(own) if e["event"] in ("spares", "node_replaced"))
    left = last.get("spares_left") if last["event"] == "node_replaced" else len(last.get("names", ()))
    return used, int(left or 0)


def _list(numbers: object) -> str:
    return ", ".join(map(str, numbers)) if isinstance(numbers, list) else "-"


def _reason(event: Event) -> str:
    """The first reason of an event about several engines, in brackets."""
    reasons = [reason for reason in event.get("reasons", []) if reason]
    return f" ({reasons[0]})" if reasons else ""


def line_of(event: Event) -> str | None:
    """Return a line for a step, a commit, an evaluation or a stage of an attempt; None for other events.

    Failures, alarms and notices are formatted where they are raised.
    """
    kind = event["event"]
    if kind == "step":
        return step_line(event)
    if kind == "commit":
        return f"committed step {event['step']} ({event['bytes'] / 1e6:.0f} MB, {event['seconds']:.1f} s)"
    if kind == "evaluation":
        names = [k.partition("/")[2] for k in event if k.startswith("reward_mean/")]
        means = ", ".join(_evaluated(event, name) for name in names)
        return f"evaluation after step {event['step']}: {means or 'no rollout'}"
    if kind == "bring_up":
        return f"starting from {start_of(event)}{lowered_budget(event)}"
    if kind == "ready":
        took = _seconds(event["phases"])
        if slowest := event.get("engine_start"):
            took += f"; in the slowest engine: {_seconds(slowest)}"
        about = f"{event.get('parameters', 0) / 1e6:.1f} M parameters, step {event['step']}"
        return f"ready after {event['seconds']:.0f} s ({took}): {about}"
    if kind == "token_budget_raised":
        tokens, setting = event.get("max_tokens"), event.get("max_tokens_per_gpu")
        return f"trying {tokens} tokens per micro-batch again (train.max_tokens_per_gpu {setting})"
    if kind == "candidate":
        return candidate_line(event)
    if kind in _OF_PARTS:
        return _OF_PARTS[kind](event)
    if kind in ("finished", "stopped"):
        return f"{kind} after step {event['step']}"
    return None


def _seconds(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.0f}" for name, seconds in phases.items())


def start_of(event: Event) -> str:
    """Return what an attempt's weights were loaded from, by its ``bring_up`` event."""
    if event.get("copied"):
        return f"the copy of step {event['step']} in memory"
    if event.get("commit"):
        return f"commit {event['commit']}"
    if event.get("load"):
        return f"the weights of {event['load']}"
    return f"the base model, an export of {event['origin']}" if event.get("origin") else "the base model"


def lowered_budget(event: Event) -> str:
    """Describe a token budget below its setting, by an event of :data:`BUDGETS`; empty if it is not."""
    tokens, setting = event.get("max_tokens"), event.get("max_tokens_per_gpu")
    if tokens is None or tokens == setting:
        return ""
    lowered = f"{tokens} tokens per micro-batch instead of train.max_tokens_per_gpu {setting}"
    return f"; out of memory before: {lowered}"


def candidate_line(event: Event) -> str:
    """Format what a candidate of ``orhpc tune`` reached."""
    settings = " ".join(event["settings"]) or "the config as it is"
    if "error" in event:
        return f"{settings}: {event['error']}"
    peak = f", {event['memory_peak_gb']:.1f} GB" if event.get("memory_peak_gb") is not None else ""
    return f"{settings}: {event['tokens_per_s_per_rank']:.0f} tokens/s a rank{peak}"


def step_line(event: Event, left: str = "") -> str:
    """Format a step's numbers; ``left`` is the remaining time, as text."""
    numbers = (
        f"step {event['step']}/{event['steps']}  reward {number(event, 'reward_mean', '.3f')}"
        f"  length {number(event, 'response_length_mean', '.1f')}"
        f"  {number(event, 'tokens_per_s', '.0f')} tokens/s  {event['seconds']:.1f} s ({phases_of(event)})"
    )
    return "  ".join(part for part in (numbers, left, failures_of(event)) if part)


def number(event: Event, key: str, form: str) -> str:
    """Format a metric; a dash if the event does not have it."""
    value = event.get(key)
    return format(value, form) if isinstance(value, (int, float)) else "-"


def phases_of(event: Event) -> str:
    """Format the seconds of a step's phases, without those below 0.05 s."""
    return " ".join(f"{k} {v:.1f}" for k, v in event["phases"].items() if v >= 0.05)


def _evaluated(event: dict[str, Any], name: str) -> str:
    """Format one split of an evaluation; failed rollouts count as the lowest score."""
    mean, failed = (
        f"{name} {number(event, f'reward_mean/{name}', '.3f')}",
        number(event, f"failed/{name}", ".0f"),
    )
    if failed in ("-", "0"):
        return mean
    return f"{mean} ({failed} of {number(event, f'rollouts/{name}', '.0f')} rollouts failed)"


def failures_of(event: dict[str, Any]) -> str:
    """Format a step's failed and retried rollouts and dropped groups, by environment; empty if none."""
    parts = []
    for key, what in (("failed_rollouts", "failed"), ("retried_rollouts", "retried"),
                      ("failed_groups", "groups dropped")):  # fmt: skip
        if not event.get(key):
            continue
        names = [f"{k.partition('/')[2]} {v:.0f}" for k, v in event.items() if k.startswith(f"{key}/")]
        where = f" ({', '.join(names)})" if names else ""
        parts.append(f"{what} {event[key]:.0f}{where}")
    return "  ".join(parts)
