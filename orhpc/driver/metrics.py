"""The metrics of a step: phase times and rollout statistics."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from orhpc.rollout.producer import StepGroups
from orhpc.types import PromptGroup, RolloutEnd, RolloutSummary, Waits

_SLOW_OPENING_S = 5.0
_SLOW_OPENING_SHARE = 1 / 3
"""Session openings that take longer than this, and more than this share of a rollout, limit the step."""


class Phases:
    """Wall-clock seconds of each phase of one step, or of a start (whose phases overlap)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()
        self._spans: dict[str, list[tuple[float, float]]] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start, clock = time.monotonic(), time.time()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._spans.setdefault(name, []).append((clock, clock + seconds))

    def spans(self, name: str) -> list[tuple[float, float]]:
        """When a phase ran: starts and ends in seconds since the epoch."""
        return self._spans.get(name, [])

    @property
    def total(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._start


def rollout_metrics(step_groups: StepGroups, version: int, max_age: int) -> dict[str, float]:
    """Statistics of the step's rollouts.

    ``reward_mean`` and lengths are over trained rollouts; ``success_rate`` is the share of rewards above 0;
    ``staleness_mean`` is in policy versions, ``stale_tokens`` the share of sampled tokens that are older than
    ``max_age`` versions; ``carried_tokens`` were sampled before this step's policy was published, and
    ``carried_groups`` are left to the next steps; ``dropped_*`` counts groups by reason.  For failures see
    :func:`failure_metrics`.
    """
    rollouts = [r for g in step_groups.groups for r in g.trainable]
    metrics = {f"dropped_{reason}": float(n) for reason, n in step_groups.reasons.items()}
    metrics["groups"] = float(len(step_groups.groups))
    metrics |= failure_metrics(step_groups)
    if not rollouts:
        return metrics
    metrics |= summary_metrics(rollouts)
    metrics["staleness_mean"] = float(np.mean([version - r.min_version for r in rollouts]))
    if max_age > 0:
        metrics["carried_groups"] = float(step_groups.carried)
        metrics["carried_tokens"] = float(sum(r.response_tokens - r.tokens_since(version) for r in rollouts))
        fresh = sum(r.tokens_since(version - max_age) for r in rollouts)
        metrics["stale_tokens"] = 1 - fresh / max(1.0, metrics["response_tokens"])
    metrics["equal_reward_groups"] = sum(len(set(g.rewards)) == 1 for g in step_groups.groups) / len(
        step_groups.groups
    )
    for environment, selected in _by_environment(step_groups.groups).items():
        metrics[f"reward_mean/{environment}"] = float(np.mean(selected))
    return metrics


def failure_metrics(step_groups: StepGroups) -> dict[str, float]:
    """Failures of the step's rollouts, including those of groups that are not trained on.

    ``failed_rollouts``, ``retried_rollouts`` (repeated in a new session) and ``failed_groups`` (dropped
    groups with failed rollouts) are counts, as are ``replayed_rollouts`` and ``replay_mismatches`` after a
    stop of the run (:mod:`orhpc.rollout.replay`); ``failed_share`` is the share of failed rollouts in the
    environment where it is highest.  ``.../ENVIRONMENT`` is the same for one environment, if it is not 0.
    """
    groups = [*step_groups.groups, *step_groups.dropped]
    rollouts, failed, retried, lost, replayed, mismatched = (Counter[str]() for _ in range(6))
    for group in groups:
        name = group.task.environment
        failures = sum(r.end is RolloutEnd.FAILED for r in group.rollouts)
        rollouts[name] += len(group.rollouts)
        failed[name] += failures
        retried[name] += sum(r.retries > 0 for r in group.rollouts)
        replayed[name] += sum(r.replayed_turns > 0 for r in group.rollouts)
        mismatched[name] += sum(r.replay_mismatch is not None for r in group.rollouts)
    for group in step_groups.dropped:
        lost[group.task.environment] += any(r.end is RolloutEnd.FAILED for r in group.rollouts)
    metrics = {
        "failed_share": max((failed[n] / total for n, total in rollouts.items() if total), default=0.0)
    }
    counts = {"failed_rollouts": failed, "retried_rollouts": retried, "failed_groups": lost}
    if replayed.total() or mismatched.total():
        counts |= {"replayed_rollouts": replayed, "replay_mismatches": mismatched}
    for what, by_name in counts.items():
        metrics[what] = float(by_name.total())
        metrics |= {f"{what}/{name}": float(n) for name, n in by_name.items() if n}
    return metrics


def summary_metrics(rollouts: Sequence[RolloutSummary]) -> dict[str, float]:
    """Rewards, lengths, ends and waits of a set of rollouts with rewards.

    ``rollout_*_seconds_mean`` divide a rollout's seconds: opening its session, waiting for the engine, tool
    calls with verification; the rest is the agent loop's own work and closing the session.
    """
    rewards = np.array([r.reward for r in rollouts], dtype=np.float64)
    response = np.array([r.response_tokens for r in rollouts], dtype=np.float64)
    ends = Counter(r.end for r in rollouts)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "success_rate": float((rewards > 0).mean()),
        "response_length_mean": float(response.mean()),
        "response_length_max": float(response.max()),
        "response_tokens": float(response.sum()),
        "total_tokens": float(sum(r.length for r in rollouts)),
        "turns_mean": float(np.mean([r.turns for r in rollouts])),
        "tool_calls_mean": float(np.mean([r.tool_calls for r in rollouts])),
        "malformed_calls": float(sum(r.malformed for r in rollouts)),
        "tool_errors": float(sum(r.raised for r in rollouts)),
        "truncated": ends[RolloutEnd.LENGTH] / len(rollouts),
        "terminal": ends[RolloutEnd.TERMINAL] / len(rollouts),
        "rollout_seconds_mean": float(np.mean([r.seconds for r in rollouts])),
        "rollout_seconds_max": max(r.seconds for r in rollouts),
        **_mean_waits([r.waits for r in rollouts if r.waits is not None]),
    }


def opening_notice(numbers: Mapping[str, float]) -> str:
    """A line if environment servers limit the step because opening their sessions takes too long."""
    opening = numbers.get("rollout_opening_seconds_mean", 0.0)
    whole = numbers.get("rollout_seconds_mean", 0.0)
    if opening < _SLOW_OPENING_S or opening < _SLOW_OPENING_SHARE * whole:
        return ""
    return (
        f"environment servers limit the step: of a rollout's {whole:.0f} s on average, {opening:.0f} s are "
        "the opening of its session; more environments.NAME.replicas (at most rollout.workers_per_node) or a "
        "faster server would help"
    )


def _mean_waits(waits: Sequence[Waits]) -> dict[str, float]:
    if not waits:
        return {}
    return {
        "rollout_opening_seconds_mean": float(np.mean([w.opening for w in waits])),
        "rollout_engine_seconds_mean": float(np.mean([w.engine for w in waits])),
        "rollout_tools_seconds_mean": float(np.mean([w.tools for w in waits])),
    }


def _by_environment(groups: Sequence[PromptGroup]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for group in groups:
        rewards.setdefault(group.task.environment, []).extend(r for r in group.rewards if r is not None)
    return rewards
