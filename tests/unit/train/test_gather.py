"""Rows on several ranks become whole parameters, compared with FSDP2's own result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from orhpc.train.fsdp.optim import local
from orhpc.train.gather import gathered

RANKS = 3


class Odd(nn.Module):
    """First dimensions for which some ranks hold fewer rows, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(7, 5), (1,), (2, 3, 4), (9, 1), (4,)]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def rank_of(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    model = Odd()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    rows = {name: local(p) for name, p in model.named_parameters()}
    for dtype in (torch.float32, torch.bfloat16):
        found = gathered(rows, shapes, dtype, RANKS)
        assert list(found) == list(wanted)
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name].to(dtype)), name
    assert gathered({}, {}, torch.float32, RANKS) == {}
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_rank_gets_every_parameter(tmp_path: Path) -> None:
    mp.spawn(rank_of, (str(tmp_path / "store"),), nprocs=RANKS)  # type: ignore[attr-defined]  # raises ranks' errors
