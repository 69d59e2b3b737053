"""Routing replay through the FSDP backend and the trainer ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from orhpc.errors import ConfigError, RoutesMissing
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role
from orhpc.train.batch import pack, plan_batches
from orhpc.train.fetch import fetch_arrays, load_batch
from orhpc.train.fsdp.model import DeviceBatch
from orhpc.types import Location, MiniBatch, Sample
from orhpc.wire.routes import RouteShare
from tests.trainer_kit import (
    MAX_TOKENS,
    fsdp_backend,
    make_config,
    make_samples,
    run_ranks,
    save_tiny_model,
    with_routes,
)


def test_only_the_updates_own_passes_are_counted(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    backend = fsdp_backend(replaying_config(), folder)
    samples = samples_with_routes(4)
    batch = pack(samples, [s.location.arrays for s in samples], routes=True)
    backend.logprobs(Batches([batch], 1), Role.POLICY)
    routers = backend.policy.routers
    assert routers is not None
    assert float(routers.metrics().sums["routed_tokens"]) == 0
    backend.policy(DeviceBatch.of(batch, torch.device("cpu")))
    sums = routers.metrics().sums
    assert float(sums["routed_tokens"]) == batch.routes_known_P.sum()
    assert float(sums["routed_pairs"]) == 2 * batch.routes_known_P.sum()


def test_all_of_a_micro_batch_is_copied_to_the_device_through_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the host waits for the micro-batch before, and the GPU then for the host."""
    samples = samples_with_routes(4)
    batch = pack(samples, [s.location.arrays for s in samples], routes=True)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    found = DeviceBatch.of(batch, torch.device("meta"))
    assert found.routed is not None
    sent = [getattr(part, name) for part in (found, found.routed) for name in part.__slots__]
    assert len(pinned) == sum(isinstance(value, torch.Tensor) for value in sent)


def samples_with_routes(n: int, seed: int = 0) -> list[Sample]:
    """Samples for the tests' tiny Qwen3-MoE."""
    return with_routes(make_samples(n, seed=seed), layers=2, experts=4, topk=2, seed=seed)


def replaying_config(ranks: int = 1, *, replay: bool = True) -> Any:
    train = {"gradient_checkpointing": True, "lr": 0.0, "routing_replay": replay}
    return make_config(ranks=ranks, train=train, record_routes=True)


def one_step(rank: int, world: int, port: int, folder: str, replay: bool) -> dict[str, float]:
    trainer = TrainerRank(replaying_config(world, replay=replay), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    try:
        plan = plan_batches(samples_with_routes(8), ranks=world, n_minibatches=1, max_tokens=MAX_TOKENS)
        minibatches: tuple[MiniBatch, ...] = plan.minibatches
        return trainer.step(minibatches, step=0)
    finally:
        trainer.close()


@pytest.mark.slow
def test_one_and_two_ranks_replay_the_same_and_count_the_same(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    (alone,) = run_ranks(one_step, 1, folder, True)
    first, second = run_ranks(one_step, 2, folder, True)
    for name in (
        "loss",
        "grad_norm",
        "logprob_diff_mean",
        "router_mismatch_fraction",
        "token_mismatch_fraction",
        "expert_max_vio",
    ):
        assert first[name] == second[name]
        assert first[name] == pytest.approx(alone[name], rel=1e-4), name
    assert 0 < alone["router_mismatch_fraction"] <= alone["token_mismatch_fraction"] <= 1
    (off,) = run_ranks(one_step, 1, folder, False)
    assert off["logprob_diff_mean"] != alone["logprob_diff_mean"]  # other experts were used


def test_a_samples_logprobs_do_not_depend_on_what_it_is_packed_with(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3_moe")
    samples = samples_with_routes(4, seed=5)
    backend = fsdp_backend(replaying_config(), folder)
    arrays = [s.location.arrays for s in samples]
    (together,) = backend.logprobs(Batches([pack(samples, arrays, routes=True)], 1), Role.POLICY)
    alone = [pack([s], [a], routes=True) for s, a in zip(samples, arrays, strict=True)]
    parts = backend.logprobs(Batches(alone, len(alone)), Role.POLICY)
    assert together is not None
    torch.testing.assert_close(together, torch.cat([p for p in parts if p is not None]), rtol=1e-4, atol=1e-5)
    (free,) = backend.logprobs(Batches([pack(samples, arrays)], 1), Role.POLICY)
    assert free is not None
    assert float((free - together).abs().max()) > 1e-3


def test_missing_routes_are_an_error_and_never_a_silent_fallback() -> None:
    samples = samples_with_routes(2)
    bare = [{k: v for k, v in s.location.arrays.items() if k != "routes"} for s in samples]
    with pytest.raises(RoutesMissing, match="not recorded"):
        pack(samples, bare, routes=True)
    short = [s.location.arrays | {"routes": s.location.arrays["routes"][:-1]} for s in samples]
    with pytest.raises(RoutesMissing, match="rows of expert routes"):
        pack(samples, short, routes=True)


def test_replay_needs_recorded_routes() -> None:
    with pytest.raises((ConfigError, ValueError), match="record_routes"):
        make_config(train={"routing_replay": True})


@pytest.mark.parametrize("stages", [1, 2])
def test_each_rank_receives_the_routes_of_its_own_samples_and_layers_and_no_others(stages: int) -> None:
    samples = samples_with_routes(16)
    shares = [RouteShare()] if stages == 1 else [RouteShare(0, (0,)), RouteShare(1, (1,))]
    received: dict[tuple[int, int], int] = {}
    (minibatch,) = plan_batches(samples, ranks=3, n_minibatches=1, max_tokens=MAX_TOKENS).minibatches
    for rank, batches in enumerate(minibatch.ranks):
        for share in shares:

            def counting(location: Location, *, routes: RouteShare, at: tuple[int, int]) -> Any:
                arrays = fetch_arrays(location, routes=routes)
                received[at] = received.get(at, 0) + arrays["routes"].nbytes
                return arrays

            fetch = partial(counting, at=(rank, share.stage))
            for batch in batches:
                packed = load_batch(batch, fetch, routes=share)
                assert packed.routes_PLK is not None
                assert packed.routes_PLK.shape[1] == 2 // stages
    assert sum(received.values()) == sum(s.location.arrays["routes"].nbytes for s in samples)
    assert max(received.values()) < 0.6 / stages * sum(received.values())
