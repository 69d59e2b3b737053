"""Ranks that run out of memory in a step continue in their processes, with the same gradient."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from orhpc.errors import InfraError, OutOfMemory
from orhpc.train import actor
from orhpc.train.actor import TrainerRank
from orhpc.train.batch import plan_batches
from orhpc.types import MiniBatch
from tests.trainer_kit import make_config, make_samples, run_ranks, save_tiny_model

MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
NCCL_MEMORY = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 10485760 bytes"
)
"""What torch raises when NCCL gets no memory for its buffers, because torch's allocator holds the rest."""
POINTS = [
    ("fetch", 0),
    ("forward", 0),
    ("forward", 1),
    ("backward", 0),
    ("backward", 1),
    ("recomputed", 1),
    ("logprobs", 1),
    ("optimizer", 0),
    ("collective of forward", 1),
    ("collective of backward", 0),
]
"""Where the memory ends, and in which call, from 0; "logprobs" is a pass without gradient."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def plans(step: int, ranks: int, max_tokens: int, minibatches: int = 1) -> tuple[MiniBatch, ...]:
    samples = make_samples(8 * ranks * minibatches, seed=step)
    return plan_batches(samples, ranks=ranks, n_minibatches=minibatches, max_tokens=max_tokens).minibatches


def fails(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def fails_on_the_host(*_: Any, **__: Any) -> Any:
    raise RuntimeError(MEMORY)


def fails_in_nccl(*_: Any, **__: Any) -> Any:
    raise dist.DistBackendError(NCCL_MEMORY)


def at_call(number: int, action: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``action`` in the call with this number only."""
    left = iter(range(number))

    def counted(*args: Any, **kwargs: Any) -> Any:
        return action(*args, **kwargs) if next(left, None) is None else None

    return counted


@contextmanager
def failing(rank: TrainerRank, where: str, number: int) -> Iterator[None]:
    """Make this rank run out of memory there; ``number``: which call of it."""
    backend: Any = rank.backend
    layer: nn.Module = backend.policy.hf.model.layers[1]
    unharmed = rank.load_batch
    steps = backend.optimizer.step
    hooks: list[Any] = []
    if where == "fetch":
        rank.load_batch = fails
    elif where in ("forward", "logprobs", "collective of forward"):
        action = fails_in_nccl if "collective" in where else fails_on_the_host
        hooks.append(layer.register_forward_pre_hook(at_call(number, action)))
    elif where == "recomputed":  # forward passes and their repetitions alternate
        hooks.append(layer.mlp.register_forward_pre_hook(at_call(number, fails)))  # type: ignore[union-attr,operator]
    elif where in ("backward", "collective of backward"):

        def on_output(_: nn.Module, __: Any, output: Any) -> None:
            found: Tensor = output[0] if isinstance(output, tuple) else output
            if found.requires_grad:
                found.register_hook(fail_once)

        fail_once = at_call(number, fails_in_nccl if "collective" in where else fails)
        hooks.append(layer.register_forward_hook(on_output))
    elif where == "optimizer":
        backend.optimizer.step = fails
    try:
        yield
    finally:
        rank.load_batch = unharmed
        backend.optimizer.step = steps
        for hook in hooks:
            hook.remove()


def state_of(rank: TrainerRank) -> dict[str, Tensor]:
    return {s.key: s.tensor.clone() for s in rank.backend.shards()}


def go_back(rank: TrainerRank, state: dict[str, Tensor], progress: dict[str, Any]) -> None:
    for shard in rank.backend.shards():
        shard.tensor.copy_(state[shard.key])
    rank.backend.set_progress(progress)
    rank._whole_at = rank.backend.progress()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[key]) for key, t in one.items())


def failure_of(rank: TrainerRank, plan: tuple[MiniBatch, ...]) -> str:
    """The class of what the step raises; the exception itself would keep the groups' memory alive."""
    try:
        rank.step(plan, step=2)
    except (OutOfMemory, InfraError) as error:
        return type(error).__name__
    return "none"


def _recovers(
    rank: int, world: int, port: int, folder: str, meet: str, dtype: str, recompute: bool, own: bool
) -> Any:
    if own:
        del FSDPModule.reset_iter_state
    config = make_config(
        ranks=world,
        dtype=dtype,
        train={"gradient_checkpointing": recompute},
        algorithm={"old_logprobs": "always"},
    )
    trainer = TrainerRank(config, folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 100)
    trainer.build()
    trainer.step(plans(0, world, 40), step=1)
    before, progress = state_of(trainer), trainer.backend.progress()
    smaller = plans(1, world, 20)
    undisturbed = trainer.step(smaller, step=2)
    after = state_of(trainer)
    found = []
    for index, (where, number) in enumerate(POINTS):
        go_back(trainer, before, progress)
        with failing(trainer, where, number) if rank == 1 % world else failing(trainer, "nowhere", 0):
            failed = failure_of(trainer, plans(1, world, 40))
        began = time.monotonic()
        if world > 1:
            trainer.leave_groups()
            trainer.rejoin("127.0.0.1", f"{meet}/{index}", 100)
        answer = trainer.recover()
        untouched = same(state_of(trainer), before)
        metrics = trainer.step(smaller, step=2)
        equal = metrics["grad_norm"] == undisturbed["grad_norm"] and same(state_of(trainer), after)
        found.append((where, failed, answer, untouched, equal, time.monotonic() - began))
    trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "dtype", "recompute", "own"),
    [
        (1, "float32", False, False),
        (1, "bfloat16", True, False),
        (2, "float32", True, False),
        (3, "bfloat16", False, False),
        pytest.param(2, "bfloat16", True, True, marks=pytest.mark.long),
    ],
)
def test_the_step_is_repeated_in_place_with_the_same_gradient(
    folder: str, tmp_path: Path, world: int, dtype: str, recompute: bool, own: bool
) -> None:
    """Whatever the ranks do when one of them runs out of memory, with FSDP and without.

    ``own``: without torch's ``reset_iter_state``, as in torch 2.11.
    """
    results = run_ranks(_recovers, world, folder, str(tmp_path), dtype, recompute, own)
    for rank, found in enumerate(results):
        for where, failed, answer, untouched, equal, seconds in found:
            about = f"rank {rank}, {where}"
            assert failed == ("OutOfMemory" if rank == 1 % world else "InfraError"), about
            assert answer is True, about
            assert untouched, about
            assert equal, about
            assert seconds < 60, about  # the collectives' own timeout is 100


@pytest.mark.slow
def test_the_failure_names_a_sample_that_was_alone_in_its_micro_batch(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For it, half the token budget would not help."""
    rank, samples = make(), make_samples(8)
    for budget, alone in ((1, True), (1000, False)):
        plan = plan_batches(samples, ranks=1, n_minibatches=1, max_tokens=budget).minibatches
        first = plan[0].ranks[0][0].samples
        with monkeypatch.context() as patch:
            patch.setattr(rank.backend, "_accumulate", fails)
            with pytest.raises(OutOfMemory) as failure:
                rank.step(plan, step=1)
        assert failure.value.alone == (first[0].length if alone else None)
        again = pickle.loads(pickle.dumps(failure.value))  # as Ray does on the way to the driver
        assert again.alone == failure.value.alone
        rank.recover()


@pytest.mark.slow
def test_a_rank_that_has_moved_does_not_pass_for_the_base_model(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has neither copy nor commit in its first step: only a new process has the base weights."""
    rank = make(minibatches=2)
    with monkeypatch.context() as patch:
        step = rank.backend.optimizer.step  # type: ignore[attr-defined]
        second = at_call(1, fails)
        patch.setattr(rank.backend.optimizer, "step", lambda loss: second() or step(loss))  # type: ignore[attr-defined]
        with pytest.raises(OutOfMemory):
            rank.step(plans(0, 1, 40, minibatches=2), step=0)
    assert rank.recover() is False
    with pytest.raises(InfraError):
        rank.restore(None)
    assert not rank.holds_whole_step()


@pytest.mark.slow
def test_a_failure_after_the_last_optimizer_step_leaves_no_state_of_before_the_step(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver repeats the step, or commits the one before: the update would count twice."""
    rank = make()

    @contextmanager
    def without_memory_for_the_trace(*_: Any) -> Iterator[None]:
        yield
        raise MemoryError

    monkeypatch.setattr(actor, "traced", without_memory_for_the_trace)
    with pytest.raises(OutOfMemory):
        rank.step(plans(0, 1, 40), step=0)
    assert rank.backend.progress() == {"optimiser_steps": 1}
    assert not rank.holds_whole_step()
    assert rank.recover() is False


@pytest.mark.slow
def test_segments_expand_in_a_step_that_is_short_of_memory(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In others they would only cost time."""
    rank, plan, used = make(), plans(0, 1, 40), list[str]()

    @contextmanager
    def segments(device: torch.device) -> Iterator[None]:
        used.append(device.type)
        yield

    monkeypatch.setattr(actor, "expandable_segments", segments)
    rank.step(plan, step=0)
    assert not used
    rank.step(plan, step=1, short_of_memory=True)
    assert used == ["cpu"]
