"""Ranks send each other weights quantized for the engines: the same bits, half the bytes, computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orhpc.train.actor import TrainerRank
from orhpc.train.weights.buckets import BucketSpec, FlatTensors, buckets_of
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import make_quantizer
from orhpc.wire.weights import NamedTensor
from tests.megatron.kit import DEEP, Case, case_config, save_model
from tests.trainer_kit import run_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUCKET_BYTES = 20_000
"""Less than a layer's experts, so that buckets begin and end within a layer."""

qwen = partial(Case, "qwen3-moe", dtype="bfloat16")
CASES = {
    2: [
        qwen({"ep": 2}),
        qwen({"pp": 2}),
        qwen({"tp": 2, "etp": 2}),
        Case("deepseek-v3", {"ep": 2}, dtype="bfloat16"),
    ],
    4: [
        qwen({"ep": 4}),
        qwen({"tp": 2, "ep": 2, "etp": 2}),
        qwen({"pp": 2, "ep": 2}),
        Case(DEEP, {"pp": 2, "vpp": 2, "tp": 2, "etp": 2}, dtype="bfloat16"),
    ],
}


@dataclass
class Counted:
    """What a rank quantized and sent or received in an export."""

    elements: int = 0
    sent: int = 0

    def quantize(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        def counted() -> Iterator[NamedTensor]:
            for name, tensor in tensors:
                self.elements += 0 if tensor.is_meta else tensor.numel()
                yield name, tensor

        return make_quantizer(power_of_two=False)(counted())


def export_all(
    rank: int, world: int, port: int, folder: str, cases: list[Case], ports: list[int]
) -> list[dict[str, Any]]:
    return [_export(case, rank, world, at, folder) for case, at in zip(cases, ports, strict=True)]


def _export(case: Case, rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    trainer = TrainerRank(case_config(case, world), f"{folder}/{case.family}", rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    source: Any = trainer.backend
    counted = Counted()
    broadcast, exchange = dist.broadcast, dist.all_to_all_single

    def counting_broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counted.sent += tensor.nbytes
        return broadcast(tensor, *args, **kwargs)

    def counting_exchange(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counted.sent += output.nbytes
        return exchange(output, *args, **kwargs)

    try:
        dist.broadcast, dist.all_to_all_single = counting_broadcast, counting_exchange
        found: dict[str, Any] = {}
        # In reverse, so that each rank needs experts that another rank holds.
        for kind, blocks in {"whole": None, "blocks": ExpertBlocks(world, tuple(range(world))[::-1])}.items():
            buckets = buckets_of(source, BUCKET_BYTES, blocks, rank)
            counted.sent = counted.elements = 0
            plain = {n: t.clone() for b in buckets for n, t in source.export(b.parameters, blocks)}
            before, counted.sent = counted.sent, 0
            quick = {
                n: t.clone()
                for b in buckets
                for n, t in source.export(b.parameters, blocks, counted.quantize)
            }
            early = {n for n, t in quick.items() if t.dtype == torch.float8_e4m3fn}
            found[kind] = {
                "plain": before,
                "quantized": counted.sent,
                "early": sum(plain[name].numel() for name in early),
                "elements": counted.elements,
                "at once": _at_once(source, buckets, blocks, counted),
                "differ": _differing(plain, quick),
            }
        return found
    finally:
        dist.broadcast, dist.all_to_all_single = broadcast, exchange
        trainer.close()


def _at_once(source: Any, buckets: list[BucketSpec], blocks: ExpertBlocks | None, counted: Counted) -> int:
    """Elements in FP8 that the weight sync gets in buffers of several tensors."""
    items = (i for b in buckets for i in source.export_flat(b.parameters, blocks, counted.quantize))
    found = 0
    for item in items:
        if isinstance(item, FlatTensors):
            assert item.data.numel() == item.spec.nbytes
            found += sum(t.numel() for _, t in item.tensors() if t.dtype == torch.float8_e4m3fn)
    return found


def _differing(plain: dict[str, torch.Tensor], quick: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits are not those of the plain export, quantized afterwards."""
    quantize = make_quantizer(power_of_two=False)
    expected, got = dict(quantize(plain.items())), dict(quantize(quick.items()))
    assert expected.keys() == got.keys()
    return [
        name
        for name, tensor in expected.items()
        if tensor.dtype != got[name].dtype
        or not torch.equal(tensor.view(torch.uint8), got[name].view(torch.uint8))
    ]


@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.long) if n == max(CASES) else n for n in CASES]
)
def test_quantized_transfers_have_the_same_bits_and_half_the_bytes(world: int, tmp_path: Path) -> None:
    for family in {case.family for case in CASES[world]}:
        save_model(tmp_path / family, family)
    results = run_each(export_all, world, str(tmp_path), CASES[world])
    for case, ranks in zip(CASES[world], results, strict=True):
        for kind in ("whole", "blocks"):
            found = [of_rank[kind] for of_rank in ranks]
            assert [one["differ"] for one in found] == [[]] * world, (case.name, kind)
            for one in found:
                _assert_smaller(one, case.layout, f"{case.name}, {kind}")


def _assert_smaller(found: dict[str, Any], layout: dict[str, Any], what: str) -> None:
    assert found["at once"] == found["early"], what
    if found["plain"] == 0:  # every rank holds a part of all that it needs
        assert found["quantized"] == 0, what
        return
    # Pipelines also send embeddings, heads and norms, which stay as they are.
    assert found["quantized"] < (0.57 if "pp" in layout else 0.502) * found["plain"], what
    assert 0 < found["elements"] < found["early"] or "pp" not in layout, what
    if "pp" not in layout:
        owners = layout["ep"] if "whole" in what else 1  # in blocks each expert is sent to one rank only
        assert found["elements"] * owners == found["early"], what
