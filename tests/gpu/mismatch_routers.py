"""The routers of a Megatron trainer: balanced during training, recorded while it computes engines' tokens."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tests.gpu import mismatch_kit as kit

BALANCE = 0.01
"""Weight of the load-balancing loss during training (Switch Transformer, arXiv:2101.03961)."""


def routers(trainer: Any) -> list[Any]:
    return list(importlib.import_module("tests.gpu.megatron_replay").routers(trainer))


def balanced(trainer: Any, tokens: int) -> None:
    """Add the load-balancing loss to the routers, divided by the ``tokens`` of a step."""
    for router in routers(trainer):
        router.routing_type = "aux_loss"
        router.config.moe_aux_loss_coeff = BALANCE / tokens


def usage(trainer: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Held-out loss, and the distribution of tokens over experts by the routers' own choice."""
    from tests.gpu.megatron_replay import NoReplay

    with NoReplay(trainer):
        found = routers(trainer)
        counts: dict[int, torch.Tensor] = {}
        largest: list[torch.Tensor] = []

        def look(router: Any, _inputs: Any, output: Any) -> None:
            own = output[1].sum(0).double()
            counts[id(router)] = counts.get(id(router), torch.zeros_like(own)) + own
            largest.append(output[0].max(-1).values.float().mean())

        hooks = [router.register_forward_hook(look) for router in found]
        try:
            values = kit.logprobs(trainer, samples)
        finally:
            for hook in hooks:
                hook.remove()
    shares = torch.stack([counts[id(router)] for router in found])
    shares = shares / shares.sum(-1, keepdim=True)
    entropy = -(shares * shares.clamp(min=1e-12).log()).sum(-1)
    experts = shares.shape[1]
    return {
        "nats_a_byte": float(-np.concatenate(list(values.values())).mean()),
        "experts_in_use": [round(float(e), 1) for e in entropy.exp()],
        "busiest_over_even": [round(float(s) * experts, 2) for s in shares.max(-1).values],
        "largest_weight": round(float(torch.stack(largest).mean()), 3),
    }


class Watched:
    """Records the experts that a trainer's routers choose for each token, with or without replay."""

    def __init__(self, trainer: Any, *, replay: bool) -> None:
        self.trainer = trainer
        self.found = routers(trainer)
        for router in self.found:
            router.router_replay.replay = replay
        self.others: list[torch.Tensor] = []
        self.hooks: list[Any] = []

    def __enter__(self) -> Watched:
        def look(router: Any, _inputs: Any, output: Any) -> None:
            rows = router.router_replay.rows
            wanted = torch.zeros_like(output[1]).scatter(1, rows.experts_NK.long(), True)
            self.others.append((output[1] & ~wanted).sum(-1) * rows.known_N)

        self.hooks = [router.register_forward_hook(look) for router in self.found]
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()

    def pass_over(self, micro_batch: Any) -> Iterator[tuple[str, np.ndarray, dict[str, float]]]:
        """Log-probabilities and counts of choices for each response of one micro-batch."""
        batch = self.trainer.load_batch(micro_batch)
        self.others.clear()
        values = kit.batch_logprobs(self.trainer, batch)
        others_LP = torch.stack(self.others)[:, : len(batch.input_ids_P)].cpu().numpy()
        topk = batch.routes_PLK.shape[2]
        for s, name in enumerate(batch.sample_ids):
            here = others_LP[:, (batch.segments_P == s) & batch.routes_known_P]
            layers, tokens = here.shape
            yield name, values[name], {
                "rerouted_tokens": float((here > 0).any(0).sum()), "routed_tokens": tokens,
                "rerouted_pairs": float((here > 0).sum()), "routed_pairs": tokens * layers,
                "other_choices": float(here.sum()), "choices": tokens * layers * topk,
            }  # fmt: skip
