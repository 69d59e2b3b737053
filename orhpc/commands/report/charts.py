"""Which metrics the report shows together, in which section, and in which unit.

Metrics that are in no panel get a panel of their own, so that the report shows every number of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: metrics of the same unit and a comparable size, over the steps."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    log: bool = False
    """Whether the axis is logarithmic."""
    by_environment: bool = False
    """Whether ``METRIC/ENVIRONMENT`` is shown too."""


@dataclass(frozen=True, slots=True)
class Section:
    """Panels that answer one question."""

    title: str
    panels: tuple[Panel, ...]


LEARNING = Section(
    "Does it learn?",
    (
        Panel("Mean reward", ("reward_mean",), by_environment=True),
        Panel("Success rate (reward above 0)", ("success_rate",)),
        Panel("Standard deviation of rewards", ("reward_std",)),
        Panel("Groups with equal rewards", ("equal_reward_groups",)),
        Panel("Entropy", ("entropy",), "nats per token"),
        Panel("Gradient norm", ("grad_norm",), log=True),
        Panel("Clipped tokens", ("clip_fraction",), "fraction"),
        Panel("KL to the reference", ("kl",), "nats per token", log=True),
        Panel("Loss", ("loss", "policy_loss")),
        Panel("Returns' variance that the critic explains", ("explained_variance",), "fraction"),
        Panel("Value and return, mean over tokens", ("value_mean", "return_mean")),
        Panel("Value loss", ("value_loss",), log=True),
        Panel("Learning rate", ("lr",)),
    ),
)
ROLLOUTS = Section(
    "What do rollouts look like?",
    (
        Panel("Mean response length", ("response_length_mean",), "tokens"),
        Panel("Longest response", ("response_length_max",), "tokens"),
        Panel("Truncated rollouts", ("truncated",), "fraction"),
        Panel("Turns per rollout", ("turns_mean",)),
        Panel("Tool calls per rollout", ("tool_calls_mean",)),
        Panel("Tool calls that raised, malformed calls", ("tool_errors", "malformed_calls"), "per step"),
        Panel(
            "Failed and retried rollouts, groups lost",
            ("failed_rollouts", "retried_rollouts", "failed_groups"),
            "per step",
            by_environment=True,
        ),
        Panel("Age of the sampling policy", ("staleness_mean",), "versions"),
    ),
)
MISMATCH = Section(
    "Do engine and trainer agree?",
    (
        Panel("KL of engine and trainer", ("rollout_kl",), "nats per token", log=True),
        Panel("Difference of log-probabilities", ("logprob_diff_mean", "logprob_diff_max"), "nats", log=True),
        Panel("Tokens that differ by a factor of two", ("extreme_token_fraction",), "fraction"),
        Panel("Effective sample size of importance weights", ("effective_sample_size",), "fraction"),
        Panel(
            "Tokens routed to other experts",
            ("token_mismatch_fraction", "router_mismatch_fraction"),
            "fraction",
        ),
        Panel(
            "Load of the busiest expert above the mean",
            ("expert_max_vio", "expert_rank_max_vio"),
            "relative",
        ),
    ),
)
SPEED = Section(
    "Is it fast?",
    (
        Panel("Sampled tokens per second", ("tokens_per_s",), "tokens/s"),
        Panel("Trained tokens per second of the update", ("train_tokens_per_s",), "tokens/s"),
        Panel("Longest rollout against the mean", ("rollout_seconds_max", "rollout_seconds_mean"), "s"),
        Panel(
            "Where a rollout's time goes, on average",
            ("rollout_opening_seconds_mean", "rollout_engine_seconds_mean", "rollout_tools_seconds_mean"),
            "s",
        ),
        Panel(
            "GPUs that run a kernel, mean over time",
            (
                "gpu_utilization",
                "gpu_utilization_rollout",
                "gpu_utilization_update",
                "gpu_utilization_sync",
                "gpu_utilization_lowest",
            ),
            "fraction",
        ),
        Panel("Power of a GPU", ("gpu_power_w",), "W"),
        Panel("Padding of packed batches", ("padding",), "fraction"),
    ),
)
SECTIONS = (LEARNING, ROLLOUTS, MISMATCH, SPEED)
MEMORY = ("memory_", "gpu_memory_")
"""Prefixes of the metrics of the section on memory."""
_HIDDEN = {"step", "steps", "attempt", "time", "seconds"}


REST = "All other metrics"
"""Title of the section of metrics that are in no panel."""


def sections_of(metrics: Iterable[str], *, apart: bool = False) -> list[Section]:
    """Return the sections for the metrics that runs have; empty panels and sections are left out.

    Metrics of no panel are in two more sections: memory, and the rest.  ``apart``: give every metric a panel
    of its own, for the curves of several runs.
    """
    left = set(metrics) - _HIDDEN
    found: list[Section] = []
    for section in SECTIONS:
        panels: list[Panel] = []
        for panel in section.panels:
            names = [m for m in panel.metrics if m in left]
            if panel.by_environment:
                own = sorted(m for m in left if m.partition("/")[0] in panel.metrics and "/" in m)
                left -= set(own)
                # A single environment's curve would be the same as that of all.
                names += own if len({m.partition("/")[2] for m in own}) > 1 else []
            if names:
                left -= set(names)
                panels += _split(panel, names) if apart else [replace(panel, metrics=tuple(names))]
        if panels:
            found.append(Section(section.title, tuple(panels)))
    memory = sorted(m for m in left if m.startswith(MEMORY))
    rest = sorted(left - set(memory))
    for title, names, unit in (("How full are the GPUs?", memory, "GB"), (REST, rest, "")):
        if names:
            found.append(Section(title, tuple(Panel(name, (name,), unit) for name in names)))
    return found


def _split(panel: Panel, names: list[str]) -> list[Panel]:
    """One panel per metric, with the part of its name that tells it from the others."""
    if len(names) == 1:
        return [replace(panel, metrics=tuple(names))]
    return [
        replace(panel, title=f"{panel.title}: {name.partition('/')[2] or name}", metrics=(name,))
        for name in names
    ]
