"""What to look at first: rules that name a likely problem, with the numbers that show it.

Each rule compares windows of a run's steps (the first and the last fifth).  A rule may be wrong, so every
finding says what was seen, and what one would check or change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orhpc.commands.goodput import OVERHEAD, Account
from orhpc.commands.report.overview import Attempt
from orhpc.commands.report.series import Series, window
from orhpc.commands.run_state import duration
from orhpc.config.algorithm import COMPARING

Event = Mapping[str, Any]
_FEW_STEPS = 10
"""A run with fewer steps has no trends."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One likely problem."""

    title: str
    seen: str
    """The numbers that show it."""
    advice: str
    metric: str = ""
    """The metric whose chart shows it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at."""

    series: Series
    events: Sequence[Event]
    attempts: Sequence[Attempt]
    spent: Account | None
    """Where the time went; None if no step is done."""
    advantage: str = "group"
    """The run's ``algorithm.advantage``."""

    def first(self, metric: str) -> float | None:
        """Mean of the first fifth of the steps; None without the metric or with few steps."""
        return self._mean(metric, last=False)

    def last(self, metric: str) -> float | None:
        """Mean of the last fifth of the steps; None without the metric or with few steps."""
        return self._mean(metric, last=True)

    def _mean(self, metric: str, *, last: bool) -> float | None:
        values = self.series.known(metric)
        return float(window(values, last=last).mean()) if len(values) >= _FEW_STEPS else None


Rule = Callable[[Evidence], Iterator[Finding]]


def findings(evidence: Evidence) -> list[Finding]:
    """Apply every rule, the most severe first."""
    return [finding for rule in RULES for finding in rule(evidence)]


def _mismatch(e: Evidence) -> Iterator[Finding]:
    kl, sample = e.last("rollout_kl"), e.last("effective_sample_size")
    if kl is not None and kl > 0.01:
        age = e.last("staleness_mean") or 0.0
        older = f"; tokens are {age:.2g} steps old on average, which counts too" if age else ""
        yield Finding(
            "Engine and trainer disagree",
            f"KL of {kl:.3g} nats per token in the last steps; healthy runs stay below 0.002{older}",
            "check the age of the tokens, precision, train.routing_replay for MoE models, and "
            "algorithm.correction",
            "rollout_kl",
        )
    elif sample is not None and sample < 0.9:
        yield Finding(
            "Importance weights are uneven",
            f"effective sample size {sample:.2f} of the tokens",
            "lower the age of the sampling policy or set algorithm.correction",
            "effective_sample_size",
        )


def _collapse(e: Evidence) -> Iterator[Finding]:
    before, now = e.first("entropy"), e.last("entropy")
    if before is not None and now is not None and before > 0 and now < 0.2 * before:
        yield Finding(
            "Entropy collapses",
            f"from {before:.3g} to {now:.3g} nats per token",
            "the policy stops exploring: raise algorithm.eps_clip_high, set algorithm.entropy_coef or lower "
            "train.lr",
            "entropy",
        )


def _hacking(e: Evidence) -> Iterator[Finding]:
    before, now = e.first("reward_mean"), e.last("reward_mean")
    if before is None or now is None or now <= before:
        return
    scores = [
        float(np.mean([v for k, v in event.items() if k.startswith("reward_mean") and _is_number(v)]))
        for event in e.events
        if event["event"] == "evaluation"
        and any(k.startswith("reward_mean") and _is_number(v) for k, v in event.items())
    ]
    if len(scores) >= 3 and scores[-1] < max(scores[:-1]) - 0.05 * max(1.0, abs(max(scores))):
        yield Finding(
            "Training reward rises while the evaluation falls",
            f"training {before:.3f} to {now:.3f}; evaluation {max(scores[:-1]):.3f} to {scores[-1]:.3f}",
            "read rollouts with high rewards (orhpc view): the reward may be satisfied without the task",
            "reward_mean",
        )
    short, long = e.first("response_length_mean"), e.last("response_length_mean")
    if short and long and long > 3 * short:
        yield Finding(
            "Responses grow with the reward",
            f"{short:.0f} to {long:.0f} tokens on average",
            "read the longest rollouts: length itself may be rewarded",
            "response_length_mean",
        )


def _worse_after_restart(e: Evidence) -> Iterator[Finding]:
    """An environment whose reward is lower after a restart than before it."""
    steps = e.series.steps
    names = [m for m in e.series.metrics if m.startswith("reward_mean/")]
    restarts = {a.first_step: a for a in e.attempts[1:] if a.first_step is not None}
    for attempt in restarts.values():
        assert attempt.first_step is not None
        at = int(np.searchsorted(steps, attempt.first_step))
        for name in names:
            values = e.series.metrics[name]
            # The first step may train on rollouts that were finished before the restart.
            before, after = values[max(0, at - 20) : at], values[at + 1 : at + 21]
            before, after = before[~np.isnan(before)], after[~np.isnan(after)]
            if min(len(before), len(after)) < 5:
                continue
            noise = float(np.sqrt(before.var() / len(before) + after.var() / len(after)))
            fall = float(before.mean() - after.mean())
            if fall > 3 * noise and fall > 0.05 * max(abs(float(before.mean())), 1e-9):
                yield Finding(
                    f"{name.partition('/')[2]} got worse after the restart at step {attempt.first_step}",
                    f"mean reward {before.mean():.3f} in the steps before, {after.mean():.3f} after",
                    f"attempt {attempt.number} differs in {attempt.changed}; read its rollouts (orhpc view)"
                    if attempt.changed
                    else f"attempt {attempt.number}: read its rollouts and its environment servers' logs",
                    name,
                )


def _gradient(e: Evidence) -> Iterator[Finding]:
    norms = e.series.known("grad_norm")
    if len(norms) < _FEW_STEPS:
        return
    typical = float(np.median(norms))
    spikes = int((norms > 10 * typical).sum()) if typical > 0 else 0
    if spikes:
        yield Finding(
            "Gradient norm spikes",
            f"{spikes} steps above ten times the median of {typical:.3g}; the highest is {norms.max():.3g}",
            "lower train.lr or train.max_grad_norm if rewards fall at these steps",
            "grad_norm",
        )


def _equal_rewards(e: Evidence) -> Iterator[Finding]:
    share = e.last("equal_reward_groups")
    if share is not None and share > 0.5 and e.advantage in COMPARING:
        yield Finding(
            "Most groups train nothing",
            f"in {share:.0%} of the groups all rewards are equal, so all advantages are 0",
            "tasks are too hard or too easy: choose others, raise rollout.n_samples, or set rollout.filter",
            "equal_reward_groups",
        )


def _critic(e: Evidence) -> Iterator[Finding]:
    explained = e.last("explained_variance")
    if explained is not None and explained <= 0:
        yield Finding(
            "The critic foresees nothing",
            f"it explains {explained:.2f} of the returns' variance; one number for all tokens explains 0",
            "raise algorithm.critic.lr, or algorithm.critic.warmup_steps in a new run",
            "explained_variance",
        )


def _stragglers(e: Evidence) -> Iterator[Finding]:
    longest, mean = e.last("rollout_seconds_max"), e.last("rollout_seconds_mean")
    rollout, whole = e.series.phases.get("rollout"), e.last("seconds")
    if not longest or not mean or rollout is None or not whole:
        return
    share = float(window(rollout, last=True).mean()) / whole
    if longest > 4 * mean and share > 0.5:
        yield Finding(
            "Steps wait for the longest rollouts",
            f"the longest takes {longest:.1f} s, the mean {mean:.1f} s; rollouts are {share:.0%} of a step",
            "raise rollout.oversample with rollout.partial, allow staleness (rollout.max_staleness) or "
            "limit the tokens",
            "rollout_seconds_max",
        )


def _lost_time(e: Evidence) -> Iterator[Finding]:
    if e.spent is None or e.spent.share(*OVERHEAD) <= 0.2 or len(e.series) < _FEW_STEPS:
        return
    lost = [(cause, seconds) for cause, seconds in e.spent.rest() if cause in OVERHEAD]
    causes = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in lost)
    yield Finding(
        "Much time makes no new step",
        f"{e.spent.share(*OVERHEAD):.0%} of {duration(e.spent.wall)}: {causes}",
        "see the attempts below; a smaller checkpoint.save_interval loses fewer steps",
    )


def _above(metric: str, bound: float, title: str, seen: str, advice: str) -> Rule:
    """A rule on the mean of the last steps; ``seen`` is formatted with it as ``value``."""

    def rule(e: Evidence) -> Iterator[Finding]:
        value = e.last(metric)
        if value is not None and value > bound:
            yield Finding(title, seen.format(value=value), advice, metric)

    return rule


RULES: tuple[Rule, ...] = (
    _worse_after_restart,
    _mismatch,
    _collapse,
    _hacking,
    _equal_rewards,
    _critic,
    _above(
        "failed_share",
        0.05,
        "Rollouts fail",
        "{value:.0%} in the environment where most do",
        "failures are not random and bias the training data: orhpc view shows their errors",
    ),
    _above(
        "truncated",
        0.3,
        "Many rollouts are cut off",
        "{value:.0%} end at the token limit",
        "raise rollout.max_total_tokens or shape the reward against length",
    ),
    _gradient,
    _stragglers,
    _above(
        "staleness_mean",
        4,
        "Rollouts come from old policies",
        "{value:.1f} versions on average",
        "lower rollout.max_staleness, or give engines more GPUs",
    ),
    _lost_time,
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
