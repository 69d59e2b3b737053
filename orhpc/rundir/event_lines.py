"""What events say in one line each: for the live display, and for the driver's log."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def line_of(event: Event) -> str | None:
    """One line about a step, a commit, an evaluation or a stage of an attempt; None: about anything else.

    Failures, alarms and notices have lines of their own, wherever they are raised.
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
        took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in event["phases"].items())
        about = f"{event.get('parameters', 0) / 1e6:.1f} M parameters, step {event['step']}"
        return f"ready after {event['seconds']:.0f} s ({took}): {about}"
    if kind in ("finished", "stopped"):
        return f"{kind} after step {event['step']}"
    return None


def start_of(event: Event) -> str:
    """What an attempt's weights are, by its ``bring_up`` event."""
    if event.get("commit"):
        return f"commit {event['commit']}"
    if event.get("load"):
        return f"the weights of {event['load']}"
    return "the base model"


def lowered_budget(event: Event) -> str:
    """What a ``bring_up`` event says of a token budget below its setting; empty where it is not."""
    tokens, setting = event.get("max_tokens"), event.get("max_tokens_per_gpu")
    if tokens is None or tokens == setting:
        return ""
    lowered = f"{tokens} tokens a micro-batch instead of train.max_tokens_per_gpu {setting}"
    return f"; out of memory before: {lowered}"


def step_line(event: Event, left: str = "") -> str:
    """A step's numbers; ``left`` is the time that remains, as text."""
    said = (
        f"step {event['step']}/{event['steps']}  reward {number(event, 'reward_mean', '.3f')}"
        f"  length {number(event, 'response_length_mean', '.1f')}"
        f"  {number(event, 'tokens_per_s', '.0f')} tokens/s  {event['seconds']:.1f} s ({phases_of(event)})"
    )
    return "  ".join(part for part in (said, left, failures_of(event)) if part)


def number(event: Event, key: str, form: str) -> str:
    """A metric as text; a dash where the event has none."""
    value = event.get(key)
    return format(value, form) if isinstance(value, (int, float)) else "-"


def phases_of(event: Event) -> str:
    """Seconds of a step's phases, without those that took no time."""
    return " ".join(f"{k} {v:.1f}" for k, v in event["phases"].items() if v >= 0.05)


def _evaluated(event: dict[str, Any], name: str) -> str:
    """One split of an evaluation, with the rollouts that failed, which count as the lowest score."""
    failed, mean = event.get(f"failed/{name}", 0), f"{name} {event[f'reward_mean/{name}']:.3f}"
    return f"{mean} ({failed:.0f} of {event[f'rollouts/{name}']:.0f} rollouts failed)" if failed else mean


def failures_of(event: dict[str, Any]) -> str:
    """A step's failed and retried rollouts and dropped groups, by environment; empty without any."""
    said = []
    for key, what in (("failed_rollouts", "failed"), ("retried_rollouts", "retried"),
                      ("failed_groups", "groups dropped")):  # fmt: skip
        if not event.get(key):
            continue
        names = [f"{k.partition('/')[2]} {v:.0f}" for k, v in event.items() if k.startswith(f"{key}/")]
        where = f" ({', '.join(names)})" if names else ""
        said.append(f"{what} {event[key]:.0f}{where}")
    return "  ".join(said)
