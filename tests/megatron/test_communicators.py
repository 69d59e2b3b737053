"""Every group that a step uses is used before the model is loaded, in the same order on all ranks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from orhpc.train.actor import TrainerRank
from tests.megatron.kit import DEEP, Case, case_config, planned, save_model
from tests.trainer_kit import make_samples, run_ranks

KINDS = {
    "allreduce": "reduce", "allreduce_coalesced": "reduce",
    "allgather": "gather", "_allgather_base": "gather", "all_gather_single": "gather",
    "allgather_into_tensor_coalesced": "gather", "all_gather_single_coalesced": "gather",
    "reduce_scatter": "scatter", "_reduce_scatter_base": "scatter", "reduce_scatter_single": "scatter",
    "reduce_scatter_tensor_coalesced": "scatter", "reduce_scatter_single_coalesced": "scatter",
    "alltoall": "exchange", "alltoall_base": "exchange", "all_to_all_single": "exchange",
    "send": "exchange", "recv": "exchange", "broadcast": "broadcast",
}  # fmt: skip
"""Methods of a process group, and how they use its communicator."""


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Record how groups of more than one rank are used, by their unique names."""
    used: dict[str, set[str]] = defaultdict(set)
    with contextlib.ExitStack() as stack:
        for method, kind in KINDS.items():
            if (real := getattr(dist.ProcessGroup, method, None)) is None:  # of another release of torch
                continue

            def call(self: Any, *args: Any, _real: Any = real, _kind: str = kind, **kwargs: Any) -> Any:
                if self.size() > 1:
                    used[self.group_name].add(_kind)
                return _real(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(dist.ProcessGroup, method, call))
        yield used


@contextlib.contextmanager
def recorded_pairs() -> Iterator[set[tuple[str, str, int]]]:
    """Record which ranks this one sends to or receives from, in which group, outside of a batch."""
    pairs: set[tuple[str, str, int]] = set()
    batches: list[None] = []  # a batch uses the communicator of the whole group
    real = {method: getattr(dist.ProcessGroup, method) for method in ("send", "recv")}
    real_batch = dist.batch_isend_irecv

    def batch(operations: Any) -> Any:
        batches.append(None)
        try:
            return real_batch(operations)
        finally:
            batches.pop()

    with contextlib.ExitStack() as stack:
        for method in real:

            def call(self: Any, tensors: Any, peer: int, tag: int, _method: str = method) -> Any:
                if not batches:
                    pairs.add((self.group_name, _method, peer))
                return real[_method](self, tensors, peer, tag)

            stack.enter_context(mock.patch.object(dist.ProcessGroup, method, call))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch))
        yield pairs


def _family(layout: dict[str, Any]) -> str:
    return DEEP if "vpp" in layout else "qwen3-moe"


def _step(rank: int, world: int, port: int, folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: open the communicators, then take a step."""
    from tests.megatron import shim

    shim.install()
    from orhpc.train.megatron.communicators import open_communicators

    trainer = TrainerRank(case_config(Case(_family(layout), layout), world), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    default = dist.group.WORLD
    assert default is not None
    interleaved = "vpp" in layout
    with recorded() as opened, recorded_pairs() as opened_pairs:
        count = open_communicators(torch.device("cpu"), elements=100, interleaved=interleaved)
    minibatch = planned(make_samples(8, seed=1), trainer.config.data_ranks)
    with recorded() as used, recorded_pairs() as used_pairs:
        trainer.step([minibatch], step=0)
    trainer.close()
    for uses in (opened, used):
        uses.pop(default.group_name, None)  # agreements of the ranks, by gloo; else in pairs
    pairs = {"opened_pairs": opened_pairs, "used_pairs": used_pairs}
    return {"count": count, "opened": dict(opened), "used": dict(used), **pairs}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {}),
        (2, {"ep": 2}),
        (2, {"tp": 2, "ep": 2}),
        (2, {"pp": 2}),
        (2, {"pp": 2, "vpp": 2}),
        (2, {"tp": 2, "etp": 2}),
        pytest.param(4, {"tp": 2, "pp": 2, "ep": 2}, marks=pytest.mark.long),
        pytest.param(4, {"cp": 2, "ep": 2}, marks=pytest.mark.long),
    ],
)
def test_a_step_uses_no_group_in_a_way_that_was_not_opened(
    tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    save_model(tmp_path, _family(layout))
    found = run_ranks(_step, world, str(tmp_path), layout)
    for of_rank in found:
        assert of_rank["used"]
        for group, kinds in of_rank["used"].items():
            assert kinds - {"broadcast"} <= of_rank["opened"].get(group, set()), (group, of_rank)
        assert of_rank["count"] == len(of_rank["opened"])
        assert of_rank["used_pairs"] <= of_rank["opened_pairs"]
        assert bool(of_rank["used_pairs"]) is ("vpp" in layout)
