"""Buckets are copied into a model as the model's own loading has copied them twice."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orhpc.rollout.engines.sglang_command import LOADER
from orhpc.rollout.engines.sglang_loading import RecordedLoading, install
from orhpc.wire.weights import flatten_bucket, unflatten_bucket

HIDDEN, INNER, EXPERTS = 6, 4, 4
NamedTensor = tuple[str, Tensor]


class Layer(nn.Module):
    """Half of the experts, fused; one of two tensor-parallel parts of the attention; a bias in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(EXPERTS // 2, 2 * INNER, HIDDEN, dtype=torch.bfloat16))
        self.w2 = nn.Parameter(torch.zeros(EXPERTS // 2, HIDDEN, INNER, dtype=torch.bfloat16))
        self.qkv = nn.Parameter(torch.zeros(6, HIDDEN, dtype=torch.bfloat16))
        self.out = nn.Parameter(torch.zeros(HIDDEN, 3, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.zeros(EXPERTS))


class Model(nn.Module):
    """Loads checkpoints as SGLang's models do: parameters are fused, divided and left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.calls = 0
        self.absorbed: Tensor | None = None

    def load_weights(self, weights: Iterable[NamedTensor]) -> None:
        self.calls += 1
        layer: Any = self.layer
        for name, tensor in weights:
            kind, _, index = name.partition(".")
            if kind in ("gate", "up", "down"):
                expert = int(index) - EXPERTS // 2
                if expert >= 0:
                    rows = {"gate": slice(0, INNER), "up": slice(INNER, None), "down": slice(None)}[kind]
                    (layer.w2 if kind == "down" else layer.w13).data[expert][rows].copy_(tensor)
            elif kind in ("q", "k", "v"):
                layer.qkv.data.narrow(0, 2 * "qkv".index(kind), 2).copy_(tensor.narrow(0, 2, 2))
            elif kind == "out":
                layer.out.data.copy_(tensor.narrow(1, 3, 3))
                layer.out.data[tensor.shape[0] :].fill_(0)  # no rows: the vocabulary is not padded
            elif kind == "bias":
                layer.bias.copy_(tensor)
            elif kind == "absorbed":
                self.absorbed = tensor.float() @ tensor.float().T


def checkpoint(seed: int, *more: str) -> list[NamedTensor]:
    """Tensors in the order of a bucket: larger types first."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    named = [("bias", random(EXPERTS, dtype=torch.float32))]
    for expert in range(EXPERTS):
        named += [(f"gate.{expert}", random(INNER, HIDDEN)), (f"up.{expert}", random(INNER, HIDDEN))]
        named.append((f"down.{expert}", random(HIDDEN, INNER)))
    named += [(kind, random(4, HIDDEN)) for kind in "qkv"] + [("out", random(HIDDEN, 6))]
    return named + [(name, random(HIDDEN, HIDDEN)) for name in more]


def bucket(named: list[NamedTensor], before: int = 0) -> list[NamedTensor]:
    """The tensors in one buffer; ``before``: bytes before the first of them."""
    flat, places = flatten_bucket(named)
    buffer = torch.cat([torch.zeros(before, dtype=torch.uint8), flat])
    return unflatten_bucket(buffer[before:], places)


def state(model: Model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def loaded_plainly(named: list[NamedTensor]) -> dict[str, Tensor]:
    model = Model()
    model.load_weights(named)
    return state(model)


def assert_loads(model: Model, named: list[NamedTensor], before: int = 0) -> None:
    """A bucket's loading gives what the model's own loading of the same tensors gives."""
    model.load_weights(bucket(named, before))
    wanted = loaded_plainly(named)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state(model).items())


@pytest.fixture
def model() -> Model:
    model = Model()
    install(model, [])
    return model


def test_the_third_sync_and_all_later_ones_copy_directly(model: Model) -> None:
    for seed in range(5):
        assert_loads(model, checkpoint(seed), before=8 * (seed % 2))
        assert model.calls == min(seed + 1, 2)


def test_a_bucket_is_known_by_its_names_and_places(model: Model) -> None:
    other = [checkpoint(0)[0], *reversed(checkpoint(0)[1:])]
    for seed in range(3):
        assert_loads(model, checkpoint(seed))
    assert_loads(model, other)
    assert model.calls == 3
    renamed = [("q" if name == "k" else "k" if name == "q" else name, t) for name, t in checkpoint(7)]
    assert_loads(model, renamed)
    assert model.calls == 4


def test_what_computes_is_left_to_the_model(model: Model) -> None:
    for seed in range(4):
        named = checkpoint(seed, "absorbed")
        assert_loads(model, named)
        assert torch.equal(model.absorbed, named[-1][1].float() @ named[-1][1].float().T)  # type: ignore[arg-type]
    assert model.calls == 4


@pytest.mark.parametrize("change", ["parameter", "memory", "shape"])
def test_a_parameter_that_was_replaced_is_loaded_by_the_model(model: Model, change: str) -> None:
    """SGLang rearranges some parameters for their kernels after a load."""
    for seed in range(3):
        assert_loads(model, checkpoint(seed))
    weight = model.layer.w2
    if change == "parameter":
        model.layer.w2 = nn.Parameter(weight.detach().clone())
    else:
        weight.data = weight.detach().clone() if change == "memory" else weight.detach().view(-1, INNER)
    if change == "shape":
        assert weight.shape == (EXPERTS // 2 * HIDDEN, INNER)
        weight.data = weight.detach().view(1, EXPERTS // 2 * HIDDEN, INNER)
        with pytest.raises(RuntimeError):  # this model's loading does not restore the shape, and is asked to
            model.load_weights(bucket(checkpoint(3)))
        return
    for seed in range(3, 6):
        assert_loads(model, checkpoint(seed))
    assert model.calls == 4  # once more, in which it went as before


def test_overlapping_targets_keep_their_order(model: Model) -> None:
    """A second copy into part of the first one's target: which comes last matters."""
    buffer = nn.Parameter(torch.zeros(8))
    model.layer.register_parameter("both", buffer)

    def load(weights: Iterable[NamedTensor]) -> None:
        model.calls += 1
        for at, (_, tensor) in enumerate(weights):
            buffer.data[2 * at : 2 * at + 4].copy_(tensor)

    recorded = RecordedLoading(model, load)
    for seed in range(4):
        recorded(bucket([("a", torch.full((4,), 1.0 + seed)), ("b", torch.full((4,), 2.0 + seed))]))
        assert buffer.tolist() == [1.0 + seed] * 2 + [2.0 + seed] * 4 + [0.0] * 2
    assert model.calls == 4


def test_tensors_that_are_no_bucket_are_left_to_the_model(model: Model) -> None:
    def stream(named: list[NamedTensor]) -> Iterator[NamedTensor]:
        yield from named

    for _ in range(3):
        model.load_weights(stream(checkpoint(1)))
        model.load_weights(checkpoint(1))
    assert model.calls == 6
    wanted = loaded_plainly(checkpoint(1))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state(model).items())


def test_a_buffer_that_cannot_be_viewed_as_elements_is_left_to_the_model(model: Model) -> None:
    named = checkpoint(1)[1:]
    for _ in range(4):  # a larger element after these would not begin at a multiple of its size
        assert_loads(model, named, before=2)
    assert model.calls == 4


def test_it_is_installed_once_and_loads_nothing(model: Model) -> None:
    module, _, name = LOADER.rpartition(".")
    found: Any = getattr(importlib.import_module(module), name)
    before = model.load_weights
    found(model, [])
    assert model.load_weights is before
    with pytest.raises(ValueError, match="loads nothing"):
        found(model, [("a", torch.zeros(1))])
