"""Weights gathered and gradients reduced once an update: the same gradients, few collectives, clean stops."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orhpc.errors import StopRequested
from orhpc.train.backend import Batches, TokenEstimates, TrainingBatch
from orhpc.train.batch import plan_batches
from orhpc.train.fetch import load_batch
from orhpc.train.fsdp import recovery
from orhpc.train.fsdp.backend import FsdpBackend
from orhpc.train.fsdp.optim import local
from orhpc.train.process_groups import join_default_group
from orhpc.train.stopping import NeverStop
from tests.trainer_kit import fsdp_backend, make_config, make_samples, run_ranks, save_tiny_model

TOKENS = 12
"""Of a micro-batch: the eight samples need several for each of two ranks."""
COLLECTIVES = {
    "gather": ("all_gather_into_tensor", "all_gather_single"),
    "reduce": ("reduce_scatter_tensor", "reduce_scatter_single"),
}
"""What FSDP2 calls in torch 2.11 and in 2.13."""


def training_batches(backend: FsdpBackend) -> tuple[Batches[TrainingBatch], int]:
    (minibatch,) = plan_batches(
        make_samples(8), ranks=backend.world_size, n_minibatches=1, max_tokens=TOKENS
    ).minibatches
    found = [TrainingBatch(load_batch(m)) for m in minibatch.ranks[backend.rank]]
    return Batches(found, len(found)), minibatch.n_tokens


class Stopper(NeverStop):
    """Raises before the micro-batch of an index, as a run does that is asked to stop."""

    def __init__(self, index: int) -> None:
        self.left = index

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StopRequested("stopped")


def gradients(backend: FsdpBackend, between: Any) -> tuple[dict[str, np.ndarray], Counter[str]]:
    """Whole gradients of an update, before the optimizer would use them, and the collectives by name."""
    found: dict[str, np.ndarray] = {}

    def capture(loss: torch.Tensor) -> tuple[float, float]:
        for name, p in backend.policy.hf.named_parameters():
            grad: Any = p.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).numpy().copy()
        backend.optimizer.clear()
        return 0.0, 0.0

    backend.optimizer.step = capture  # type: ignore[method-assign]
    batches, n_tokens = training_batches(backend)
    with counted_collectives() as counts:
        backend.update(batches, n_samples=8, n_tokens=n_tokens, between=between)
        during = Counter(counts)
    return found, during


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count FSDP2's gathers and reductions."""
    counts = Counter[str]()

    def counting(kind: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return own(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in COLLECTIVES.items():
            for name in names:
                if hasattr(dist, name):
                    patch.setattr(dist, name, counting(kind, getattr(dist, name)))
        yield counts


def is_sharded(backend: FsdpBackend) -> bool:
    """Whether this rank holds its rows alone, without a gradient that waits to be reduced."""
    groups = list(recovery._groups(backend.policy))
    parameters = [p for group in groups for p in group.fsdp_params]
    assert parameters
    return all(group.is_sharded for group in groups) and all(
        p.unsharded_accumulated_grad is None and getattr(p, "_unsharded_param", p).grad is None
        for p in parameters
    )


def _two_ways(rank: int, world: int, port: int, folder: str, dtype: str, checkpointing: bool) -> Any:
    join_default_group(torch.device("cpu"), "127.0.0.1", port, rank, world, 60)
    results = []
    for once in (False, True):
        train = {"gather_once": once, "gradient_checkpointing": checkpointing}
        backend = fsdp_backend(make_config(ranks=world, dtype=dtype, train=train), folder, rank, world)
        before = {name: local(p).clone() for name, p in backend.policy.hf.named_parameters()}
        with pytest.raises(StopRequested):
            gradients(backend, Stopper(2))
        stopped = is_sharded(backend)
        found, counts = gradients(backend, NeverStop())
        same = all(torch.equal(local(p), before[name]) for name, p in backend.policy.hf.named_parameters())
        results.append((found, counts, stopped and same and is_sharded(backend)))
        batches = len(training_batches(backend)[0])
    dist.destroy_process_group()
    return results, batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "checkpointing"),
    [("qwen3", "float32", True), ("llama", "bfloat16", False), ("qwen3_moe", "float32", False)],
)
def test_gradients_are_the_same_and_collectives_do_not_grow_with_micro_batches(
    tmp_path: Path, family: str, dtype: str, checkpointing: bool
) -> None:
    folder = save_tiny_model(tmp_path, family)
    for (often, once), batches in run_ranks(_two_ways, 2, folder, dtype, checkpointing):
        assert batches >= 3
        assert often[2] and once[2]
        for name, gradient in often[0].items():
            scale = np.abs(gradient).max() + 1e-8
            bound = 1e-5 if dtype == "float32" else 2e-2  # each reduction of bfloat16 gradients rounds
            assert np.abs(once[0][name] - gradient).max() / scale < bound, name
        groups = once[1]["reduce"]  # the layers, and what is outside of them
        assert groups >= 3
        assert once[1]["gather"] == groups
        assert often[1]["reduce"] == groups * batches
        assert often[1]["gather"] >= (2 * groups - 1) * batches


def _critic(rank: int, world: int, port: int, folder: str) -> Any:
    join_default_group(torch.device("cpu"), "127.0.0.1", port, rank, world, 60)
    results = []
    for once in (False, True):
        config = make_config(
            ranks=world, dtype="bfloat16", train={"gather_once": once}, algorithm={"advantage": "ppo"}
        )
        backend = fsdp_backend(config, folder, rank, world)
        batches, n_tokens = training_batches(backend)
        estimated = []
        for training in batches:
            slots = len(training.batch.input_ids_P)
            values_P = torch.linspace(-1, 1, slots)
            estimates = TokenEstimates(values_P=values_P, returns_P=-values_P, advantages_P=values_P)
            estimated.append(TrainingBatch(training.batch, estimates=estimates))
        update = backend.update_critic(
            Batches(estimated, len(estimated)), n_tokens=n_tokens, between=NeverStop()
        )
        results.append(update.grad_norm)
    dist.destroy_process_group()
    return results


@pytest.mark.slow
def test_the_critics_gradient_is_the_same(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3")
    for often, once in run_ranks(_critic, 2, folder):
        assert often > 0
        assert once == pytest.approx(often, rel=2e-2)
