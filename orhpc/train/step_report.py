"""Metrics of a training step: sums that add up exactly over micro-batches, updates and ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.train.backend import Update
from orhpc.train.expert_choices import load_metrics
from orhpc.train.loss.grpo import MetricSums
from orhpc.train.sleep.residence import peak_gb, reset_peak
from orhpc.train.stopping import agree

TOKEN_MEANS = {
    "policy_loss": "policy_loss",
    "clipped": "clip_fraction",
    "entropy": "entropy",
    "ratio": "ratio_mean",
    "kl": "kl",
    "logprob_diff": "logprob_diff_mean",
    "rollout_kl": "rollout_kl",
    "rollout_kl_k1": "rollout_kl_k1",
    "extreme": "extreme_token_fraction",
    "correction_weight": "correction_weight_mean",
    "corrected_away": "corrected_away_fraction",
}
"""Sums over sampled tokens, and the metric that each becomes when divided by the number of tokens."""
ROUTE_FRACTIONS = {"pairs": "router_mismatch_fraction", "tokens": "token_mismatch_fraction"}
"""Fractions of (token, router) pairs and of tokens routed to other experts than in the engine."""
VALUE_MEANS = {"value_loss": "value_loss", "value_clipped": "value_clip_fraction"}
"""Sums over the tokens that the critic trained on, and the metric that each becomes per token."""


class StepReport:
    """Collects one rank's numbers of a step and reduces them over all ranks at its end."""

    def __init__(self, device: torch.device, *, expert_ranks: int = 1) -> None:
        """``expert_ranks``: number of ranks over which each layer's experts are divided."""
        reset_peak(device)
        self._expert_ranks = expert_ranks
        self._device = device
        self._metrics = MetricSums()
        self._seconds: dict[str, float] = {"fetch": 0.0, "old_logprobs": 0.0, "reference": 0.0}
        self._updates: list[Update] = []
        self._critic_updates: list[Update] = []
        self._known: dict[str, float] = {}
        self._packed_tokens = 0
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent inside the block to ``phase``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def add_packed(self, tokens: int) -> None:
        """Add the tokens of this rank's part of a mini-batch."""
        self._packed_tokens += tokens

    def add_update(self, update: Update) -> None:
        """Add one optimizer step of the policy on this rank."""
        self._metrics.add(update.metrics)
        self._updates.append(update)

    def add_critic_update(self, update: Update) -> None:
        """Add one optimizer step of the critic on this rank."""
        self._metrics.add(update.metrics)
        self._critic_updates.append(update)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add metrics that are already reduced over all ranks."""
        self._known |= metrics

    def reduced(self) -> dict[str, float]:
        """Return the step's metrics over all ranks (collective).

        Means are over sampled tokens of all mini-batches; ``loss``, ``grad_norm`` and ``lr`` are means
        over optimizer steps, ``critic_*`` those of the critic; ``seconds_*`` are the slowest rank's,
        ``memory_trainer_peak_gb`` (10^9 bytes, on GPUs) is the fullest rank's.  A step without any optimizer
        step of the policy has only ``optimiser_steps`` 0, the critic's metrics, its times and its memory.
        """
        every = [*self._updates, *self._critic_updates]
        self._seconds["optimiser"] = sum(u.optimizer_seconds for u in every)
        self._seconds["total"] = time.perf_counter() - self._started
        largest = {f"seconds_{name}": value for name, value in self._seconds.items()} | peak_gb(self._device)
        maxima = _numbers(_over_ranks(self._metrics.maxima | largest, dist.ReduceOp.MAX))
        added = _over_ranks(
            self._metrics.sums | {"packed_tokens": float(self._packed_tokens)}, dist.ReduceOp.SUM
        )
        loads_LE = added.pop("expert_loads", None)
        sums = _numbers(added)
        steps = len(self._updates)
        result = {**maxima, "optimiser_steps": float(steps), "packed_tokens": sums["packed_tokens"]}
        result |= self._known | self._of_critic(sums)
        if steps:
            result["tokens"] = sums["tokens"]
            result["loss"] = sums["loss"] / steps
            result["grad_norm"] = sum(u.grad_norm for u in self._updates) / steps
            result["lr"] = sum(u.lr for u in self._updates) / steps
            tokens = max(sums["tokens"], 1.0)
            result |= {metric: sums[name] / tokens for name, metric in TOKEN_MEANS.items() if name in sums}
            if sums["rho_squared"]:
                result["effective_sample_size"] = sums["rho"] ** 2 / (sums["rho_squared"] * tokens)
            for what in ("pairs", "tokens"):
                if sums.get(f"routed_{what}"):
                    result[ROUTE_FRACTIONS[what]] = sums[f"rerouted_{what}"] / sums[f"routed_{what}"]
            if loads_LE is not None:
                result |= load_metrics(loads_LE, self._expert_ranks)
        return result

    def _of_critic(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the critic's optimizer steps; empty without a critic."""
        if not (updates := self._critic_updates):
            return {}
        tokens = max(sums["value_tokens"], 1.0)
        return {
            "critic_grad_norm": sum(u.grad_norm for u in updates) / len(updates),
            "critic_lr": sum(u.lr for u in updates) / len(updates),
            **{metric: sums[name] / tokens for name, metric in VALUE_MEANS.items()},
        }


def _over_ranks(values: Mapping[str, Tensor | float], how: dist.ReduceOp.RedOpType) -> dict[str, Tensor]:
    own = {name: torch.as_tensor(values[name], dtype=torch.float64).cpu() for name in sorted(values)}
    vector = torch.cat([value.flatten() for value in own.values()])
    agree(vector, how)
    parts = vector.split([value.numel() for value in own.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(own.items(), parts, strict=True)}


def _numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
