"""Every group of a layout is used once, in the order of all other ranks, before the model is loaded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.kit import Case, case_config
from tests.trainer_kit import run_ranks

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def _opened(rank: int, world: int, port: int, layout: dict[str, int]) -> dict[str, Any]:
    from tests.megatron import shim

    shim.install()
    from orhpc.train.megatron.communicators import open_communicators
    from orhpc.train.megatron.model import leave_groups, start_groups
    from orhpc.train.process_groups import join_default_group

    cpu = torch.device("cpu")
    join_default_group(cpu, "127.0.0.1", port, rank, world, 60.0)
    start_groups(case_config(Case("qwen3-moe", layout), world))
    calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name: str) -> Any:
        def call(*args: Any, group: Any) -> Any:
            calls[name, tuple(dist.get_process_group_ranks(group))] += 1
            return real[name](*args, group=group)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    try:
        opened = open_communicators(cpu, nbytes=1000)
    finally:
        for name in COLLECTIVES:
            setattr(dist, name, real[name])
        leave_groups()
        dist.destroy_process_group()
    return {"opened": opened, "calls": calls}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ({}, {(0, 1, 2, 3)}),
        ({"ep": 4}, {(0, 1, 2, 3)}),
        ({"tp": 2, "ep": 2}, {(0, 1), (0, 2), (0, 1, 2, 3)}),
        ({"tp": 2, "pp": 2}, {(0, 1), (0, 2), (0, 1, 2, 3)}),
        ({"cp": 2, "etp": 2}, {(0, 1), (0, 2), (0, 1, 2, 3)}),
    ],
)
def test_every_group_is_used_once_in_each_way(layout: dict[str, int], groups: set[tuple[int, ...]]) -> None:
    found = run_ranks(_opened, 4, layout)
    first = found[0]
    assert {ranks for _, ranks in first["calls"]} == groups
    for name in COLLECTIVES:
        times = {ranks: count for (called, ranks), count in first["calls"].items() if called == name}
        assert times.keys() == groups
    assert len({of_rank["opened"] for of_rank in found}) == 1
    for of_rank in found:
        assert sum(of_rank["calls"].values()) == (len(COLLECTIVES) + 1) * of_rank["opened"]
