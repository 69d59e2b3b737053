"""Each engine rank is sent its own experts and all other weights, bit for bit those of a whole sync."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orhpc.train.actor import TrainerRank
from orhpc.train.weights.expert_blocks import ExpertBlocks, blocks_of_engines
from orhpc.train.weights.fp8 import SCALE, make_quantizer
from orhpc.train.weights.update_requests import Receiver, SyncPlan
from tests.megatron.kit import DEEP, Case, case_config, save_model
from tests.trainer_kit import run_each
from tests.update_engine import KEY, UpdateEngine, update_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXPERTS = 8
BUCKET_BYTES = 20_000
"""Less than a layer's experts, so that buckets begin and end within a layer."""


@dataclass(frozen=True)
class Sent:
    """A trainer's layout, and engines of ``tp`` ranks that divide experts among ``ep``."""

    case: Case
    tp: int
    ep: int
    reverse: bool = False
    """Whether engine ranks map the trainer ranks in reverse, so that each needs what another rank holds."""
    exchanges: bool = True
    """Whether ranks of an expert-parallel group send experts to each other."""
    alone: bool = False
    """Whether there is one engine only, and the other ranks' memory is mapped by none."""

    @property
    def name(self) -> str:
        return f"{self.case.name} to tp{self.tp}.ep{self.ep}{' reversed' * self.reverse}"

    def engines(self, world: int) -> list[list[int]]:
        """The trainer ranks that each engine maps."""
        engines = [list(range(first, first + self.tp)) for first in range(0, world, self.tp)]
        engines = engines[1:2] if self.alone else engines
        return [ranks[::-1] for ranks in engines] if self.reverse else engines

    def blocks(self, world: int) -> ExpertBlocks:
        engines = {str(number): ranks for number, ranks in enumerate(self.engines(world))}
        return blocks_of_engines(engines, tp=self.tp, ep=self.ep, ranks=world)


qwen = partial(Case, "qwen3-moe")
half = partial(Case, "qwen3-moe", dtype="bfloat16")  # sent in FP8
SENT = {
    2: [
        Sent(half({"ep": 2}), 2, 2, exchanges=False),
        Sent(qwen({"ep": 2}), 2, 2, reverse=True),
        Sent(half({"tp": 2, "etp": 2}), 2, 2, exchanges=False),
        Sent(Case("deepseek-v3", {"tp": 2, "ep": 2}), 2, 2, reverse=True),
        Sent(qwen({}), 2, 2, exchanges=False),
        Sent(Case("llama4", {"ep": 2}), 2, 2, exchanges=False),
    ],
    4: [
        Sent(half({"ep": 4}), 4, 2),
        Sent(qwen({"ep": 2}), 4, 4),
        Sent(qwen({"ep": 2, "tp": 2, "etp": 2}), 2, 2),
        Sent(qwen({"pp": 2, "ep": 2}), 4, 4),
        Sent(qwen({"pp": 2, "ep": 2}), 2, 2, exchanges=False),
        Sent(Case("deepseek-v3", {"pp": 2, "etp": 2, "tp": 2}), 4, 4, reverse=True, exchanges=False),
        Sent(qwen({"cp": 2, "ep": 4}), 2, 2, alone=True),
        Sent(Case(DEEP, {"pp": 2, "vpp": 2, "ep": 2}), 4, 4, reverse=True),
    ],
}


def send_all(
    rank: int, world: int, port: int, folder: str, numbers: list[int], ports: list[int], urls: list[str]
) -> list[dict[str, Any]]:
    cases = zip(numbers, ports, strict=True)
    return [_send(number, SENT[world][number], rank, world, at, folder, urls) for number, at in cases]


def _send(
    number: int, one: Sent, rank: int, world: int, port: int, folder: str, urls: list[str]
) -> dict[str, Any]:
    """Send all weights whole and by blocks, change them, and send them again; requests carry their number."""
    trainer = TrainerRank(case_config(one.case, world), f"{folder}/{one.case.family}", rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    trainer.sync._bucket_bytes = BUCKET_BYTES
    if one.case.dtype == "bfloat16":
        trainer.sync._quantize = make_quantizer(power_of_two=False)
    exchange, exchanges = dist.all_to_all_single, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        exchanges.append(args)
        return exchange(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        for sync in range(4):
            if sync == 2:
                for tensor in trainer.backend._exporter.held().values():
                    tensor.detach().mul_(torch.linspace(1, 2, tensor.numel()).view_as(tensor))
            receivers = tuple(
                Receiver(url, tuple(ranks), True, {"sync": [number, sync]})
                for url, ranks in zip(urls, one.engines(world), strict=False)
            )
            blocks, before = one.blocks(world) if sync % 2 else None, len(exchanges)
            report = trainer.send_weights(SyncPlan(receivers, "", 60.0, KEY, blocks))
            assert report.failures == {}
            assert sync % 2 or len(exchanges) == before
        names, shapes = trainer.backend.hf_names(), trainer.backend.parameter_shapes()
        experts = {
            tensor: expert
            for name, expert in trainer.backend.expert_parameters().items()
            for tensor in names.split(name, torch.empty(shapes[name], device="meta"))
        }
        return {"experts": experts, "exchanges": len(exchanges)}
    finally:
        dist.all_to_all_single = exchange
        trainer.close()


def received(engine: UpdateEngine, sync: list[int], place: int) -> list[dict[str, Any]]:
    """What one rank of an engine was sent in a sync, by request."""
    requests = zip(engine.bodies, engine.mapped, strict=True)
    return [mapped[place] for body, mapped in requests if json.loads(body)["sync"] == sync]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)), "sent twice"
    return {name: array for part in parts for name, array in part.items()}


@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.long) if n == max(SENT) else n for n in SENT]
)
def test_each_engine_rank_gets_its_own_experts(world: int, tmp_path: Path) -> None:
    for family in {one.case.family for one in SENT[world]}:
        save_model(tmp_path / family, family)
    with update_engines(world // min(one.tp for one in SENT[world])) as engines:
        urls = [engine.url for engine in engines]
        results = run_each(send_all, world, str(tmp_path), range(len(SENT[world])), urls)
        for number, (one, found) in enumerate(zip(SENT[world], results, strict=True)):
            there = engines[: len(one.engines(world))]
            _assert_own_experts(one, number, there, found[0]["experts"])
            assert any(of_rank["exchanges"] for of_rank in found) == one.exchanges, one.name


def _assert_own_experts(one: Sent, number: int, engines: list[UpdateEngine], experts: dict[str, int]) -> None:
    assert bool(experts) == (one.case.family != "llama4")
    for engine, sync in itertools.product(engines, (0, 2)):
        parts = received(engine, [number, sync], 0)
        whole = joined(parts)
        if sync:
            first = joined(received(engine, [number, 0], 0))
            assert all(np.any(array != first[name]) for name, array in whole.items() if np.any(array))
        held: set[str] = set()
        for place in range(one.tp):
            size = EXPERTS // one.ep
            block = range(place * one.ep // one.tp * size, (place * one.ep // one.tp + 1) * size)
            own = received(engine, [number, sync + 1], place)
            assert all(own), "a request without tensors"
            assert len(own) < len(parts) or not experts, one.name
            wanted = {n for n in whole if experts.get(n.removesuffix(SCALE), block[0]) in block}
            assert joined(own).keys() == wanted, one.name
            for name, array in joined(own).items():
                np.testing.assert_array_equal(array, whole[name], err_msg=f"{one.name}: {name}")
            held |= wanted
        assert held == whole.keys()
