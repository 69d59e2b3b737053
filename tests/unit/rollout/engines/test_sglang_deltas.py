"""SGLang's processes change a bucket of which only the changes arrive, or refuse and stay as they were."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.rollout.engines.recorded_copies import DirectCopies
from orhpc.rollout.engines.sglang_loading import RecordedLoading, install
from orhpc.train.weights.deltas import WHOLE_SYNCS
from orhpc.wire.weight_deltas import DISTANCES, HEADER, NEEDS_WHOLE, VALUES, BucketId, delta_of
from orhpc.wire.weights import flatten_bucket, unflatten_bucket
from tests.trainer_kit import run_ranks
from tests.unit.rollout.engines.test_sglang_loading import (
    INNER,
    Model,
    NamedTensor,
    bucket,
    checkpoint,
    loaded_plainly,
    state,
)

CPU = torch.device("cpu")


def whole(named: list[NamedTensor], version: int, number: int = 0) -> list[NamedTensor]:
    """A bucket as it arrives."""
    return bucket([(HEADER, BucketId(number, 0, version).tensor(CPU)), *named])


def changes(
    old: list[NamedTensor], new: list[NamedTensor], base: int, version: int, number: int = 0
) -> list[NamedTensor]:
    """A delta as it arrives."""
    delta = delta_of(flatten_bucket(old)[0], flatten_bucket(new)[0])
    assert delta is not None
    message = [
        (HEADER, BucketId(number, base, version).tensor(CPU)),
        (VALUES, delta.values),
        (DISTANCES, delta.distances),
    ]
    flat, places = flatten_bucket(message)
    return unflatten_bucket(flat, places)


def stepped(named: list[NamedTensor], seed: int, share: float = 0.1) -> list[NamedTensor]:
    """The tensors after a step that changed this share of their elements."""
    generator = torch.Generator().manual_seed(seed)

    def changed(tensor: Tensor) -> Tensor:
        chosen = torch.rand(tensor.shape, generator=generator) < share
        return torch.where(chosen, tensor + torch.randn(tensor.shape, generator=generator), tensor).to(
            tensor.dtype
        )

    return [(name, changed(tensor)) for name, tensor in named]


def assert_holds(model: Model, named: list[NamedTensor]) -> None:
    wanted = loaded_plainly(named)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state(model).items())


def prepared(named: list[NamedTensor], syncs: int = WHOLE_SYNCS) -> Model:
    """A model that was sent these weights whole in as many syncs, the last as version ``syncs``."""
    model = Model()
    install(model, [])
    for version in range(1, syncs + 1):
        model.load_weights(whole(named, version))
    return model


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_deltas_give_what_whole_buckets_give(share: float) -> None:
    named = checkpoint(0)
    model = prepared(named)
    for version in range(WHOLE_SYNCS, WHOLE_SYNCS + 4):
        new = stepped(named, version, share)
        model.load_weights(changes(named, new, version, version + 1))
        assert_holds(model, new)
        named = new
    assert model.calls == WHOLE_SYNCS, "SGLang loaded a delta itself"


def test_a_delta_follows_a_bucket_that_was_sent_whole_in_between() -> None:
    named, new, newer = checkpoint(0), checkpoint(1), stepped(checkpoint(1), 2)
    model = prepared(named)
    model.load_weights(whole(new, 10))
    model.load_weights(changes(new, newer, 10, 11))
    assert_holds(model, newer)


def test_a_bucket_that_the_model_rounds_is_refused() -> None:
    """Half of a float32 would replace half of the number that its rounding to bfloat16 gives."""
    named = [("out", torch.randn(6, 6)), *checkpoint(0)[1:-1]]
    model = prepared(named)
    new = [(name, tensor + 1e-6 if name == "out" else tensor) for name, tensor in named]
    assert "rounds" in refusal(model, changes(named, new, WHOLE_SYNCS, 9))


def test_a_bucket_that_the_model_widens_is_changed() -> None:
    named = [("bias", torch.randn(4).to(torch.bfloat16)), *checkpoint(0)[1:]]
    model = prepared(named)
    assert model.layer.bias.dtype == torch.float32
    new = stepped(named, 1)
    model.load_weights(changes(named, new, WHOLE_SYNCS, 9))
    assert_holds(model, new)


def test_a_number_that_is_copied_to_several_places_is_loaded_whole() -> None:
    model = Model()

    def load(weights: Any) -> None:
        for _, tensor in weights:
            model.layer.w2.data[0, 0].copy_(tensor.expand(INNER))

    recorded = RecordedLoading(model, load)
    named = [("scale", torch.ones(1, dtype=torch.bfloat16)), ("scale", torch.ones(1, dtype=torch.bfloat16))]
    for version in (1, 2, 3):
        recorded(whole(named, version))
    with pytest.raises(ValueError, match=NEEDS_WHOLE):
        recorded(changes(named, [named[0], ("scale", named[1][1] + 1)], 3, 4))


def test_a_rank_without_memory_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    named = checkpoint(0)
    model = prepared(named)

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("orhpc.rollout.engines.sglang_loading.apply_delta", fails)
    assert "out of memory" in refusal(model, changes(named, stepped(named, 1), WHOLE_SYNCS, 9))


def test_a_bucket_that_was_loaded_without_memory_to_read_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = checkpoint(0)
    model = prepared(named)

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(DirectCopies, "read", fails)
        model.load_weights(whole(named, 8))
    assert_holds(model, named)
    assert "other contents" in refusal(model, changes(named, stepped(named, 1), 8, 9))


def refusal(model: Model, message: list[NamedTensor]) -> str:
    before = state(model)
    with pytest.raises(ValueError, match=NEEDS_WHOLE) as caught:
        model.load_weights(message)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(model).items())
    return str(caught.value)


def test_other_contents_are_refused_and_the_whole_bucket_mends_it() -> None:
    named = checkpoint(0)
    new = stepped(named, 1)
    model = prepared(named)
    assert "other contents" in refusal(model, changes(named, new, base=7, version=8))
    model.load_weights(whole(new, 8))
    assert_holds(model, new)
    newer = stepped(new, 2)
    model.load_weights(changes(new, newer, base=8, version=9))
    assert_holds(model, newer)


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_that_has_just_started_refuses(number: int) -> None:
    named = checkpoint(0)
    model = prepared(named, syncs=1)
    reason = refusal(model, changes(named, stepped(named, 1), base=1, version=2, number=number))
    assert ("observed" if number == 0 else "other contents") in reason


def test_loading_that_computes_is_refused() -> None:
    named = checkpoint(0, "absorbed")
    model = prepared(named, syncs=4)
    assert "does not only copy" in refusal(model, changes(named, stepped(named, 1), base=4, version=5))


@pytest.mark.parametrize("how", ["scaled", "shuffled", "replaced"])
def test_weights_that_sglang_changed_after_loading_are_refused(how: str) -> None:
    named = checkpoint(0)
    model = prepared(named)
    weight = model.layer.w2
    if how == "replaced":
        model.layer.w2 = copy.deepcopy(weight)
    else:
        weight.data.copy_(weight.detach() * 2 if how == "scaled" else weight.detach().flip(0))
    reason = refusal(model, changes(named, stepped(named, 1), WHOLE_SYNCS, 9))
    assert ("observed" if how == "replaced" else "have changed") in reason


def test_changes_that_do_not_fit_are_refused() -> None:
    named, larger = checkpoint(0), checkpoint(0, "more", "still more")
    model = prepared(named)
    beyond = changes(larger, [*larger[:-1], ("still more", larger[-1][1] + 1)], WHOLE_SYNCS, 9)
    assert "a bucket of" in refusal(model, beyond)


def _one_rank_cannot(rank: int, world: int, port: int) -> Any:
    """Rank 1 was sent the bucket once less."""
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), rank=rank, world_size=world
    )
    named = checkpoint(0)
    model = prepared(named, syncs=WHOLE_SYNCS - rank)
    base = WHOLE_SYNCS - rank
    reason = refusal(model, changes(named, stepped(named, 1), base, 10))
    dist.destroy_process_group()
    return reason


@pytest.mark.slow
def test_no_rank_of_an_engine_changes_anything_if_one_cannot() -> None:
    """SGLang answers with the result of its first rank only."""
    first, second = run_ranks(_one_rank_cannot, 2)
    assert "another rank" in first
    assert "observed" in second
