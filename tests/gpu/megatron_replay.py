"""Tools to inspect the routers of a Megatron trainer that replays routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from orhpc.train.actor import TrainerRank
from orhpc.train.fetch import load_batch
from orhpc.types import MiniBatch, Sample
from tests.gpu import megatron_kit as kit


class NoReplay:
    """Lets a trainer's routers choose as if it had been built without routing replay."""

    def __init__(self, trainer: TrainerRank) -> None:
        self.trainer = trainer
        self.backend: Any = trainer.backend

    def __enter__(self) -> None:
        backend = self.backend
        self.held = (backend._policy, backend._routers, self.trainer.load_batch)
        self.replays = [(router, router.router_replay) for router in routers(self.trainer)]
        for router, _ in self.replays:
            router.router_replay = None
        backend._policy, backend._routers = replace(backend._policy, routers=None), None
        self.trainer.load_batch = partial(load_batch, routes=None)

    def __exit__(self, *_: Any) -> None:
        for router, replay in self.replays:
            router.router_replay = replay
        self.backend._policy, self.backend._routers, self.trainer.load_batch = self.held


def routers(trainer: TrainerRank) -> Iterator[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    backend: Any = trainer.backend
    for model in backend._policy.models:
        for module in model.modules():
            if isinstance(module, TopKRouter):
                yield module


class _Recorder:
    """Replaces a router's replay: records the router's choices, in their order."""

    def __init__(self) -> None:
        self.chosen: list[torch.Tensor] = []
        """``[N, K]`` of each micro-batch."""

    def get_replay_topk(
        self, scores: Any, topk: int, num_groups: Any, group_topk: Any, compute: Any
    ) -> tuple[Any, Any]:
        values, own = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chosen.append(own)
        return values, own


def own_routes(
    trainer: TrainerRank, samples: Sequence[Sample]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The routers' choices for samples, and the resulting log-probabilities.

    Call it within :class:`NoReplay`.  Experts are in the order of megatron-core's top k, which is not sorted
    without gradients: weights are normalized by a sum, whose rounding depends on the order.
    """
    recorders: list[_Recorder] = []
    for router in routers(trainer):
        router.router_replay = _Recorder()
        recorders.append(router.router_replay)
    found = kit.trainer_logprobs(trainer, samples)
    (micro_batches,) = kit.planned(samples, 1).ranks
    routes: dict[str, Any] = {}
    for index, micro_batch in enumerate(micro_batches):
        chosen = torch.stack([r.chosen[index] for r in recorders], 1).cpu().numpy().astype(np.uint8)
        at = 0
        for sample in micro_batch.samples:
            routes[sample.rollout_id] = chosen[at : at + sample.length - 1]
            at += sample.length
    return routes, found


def wrong_choices(trainer: TrainerRank, minibatch: MiniBatch) -> tuple[int, int]:
    """Number of choices in one training step that differ from the recorded ones, and of router passes."""
    wrong: list[int] = []

    def check(router: Any, _inputs: Any, output: Any) -> None:
        rows = router.router_replay.rows
        if rows is not None and torch._C._current_autograd_node() is None:  # type: ignore[attr-defined]
            wanted = torch.zeros_like(output[1]).scatter(1, rows.experts_NK.long(), True)
            wrong.append(int((output[1] != wanted)[rows.known_N].sum()))

    hooks = [r.register_forward_hook(check) for r in routers(trainer)]
    try:
        trainer.step([minibatch], step=0)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(wrong), len(wrong)
