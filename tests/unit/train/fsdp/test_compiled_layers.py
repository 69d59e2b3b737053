"""Compiled decoder layers: the same gradients and values, and one compilation for all layers and lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager

from orhpc.config import Config
from orhpc.train.fsdp import compiled_layers
from orhpc.train.fsdp.compiled_layers import compile_layers
from orhpc.train.process_groups import join_default_group
from tests.trainer_kit import (
    free_port,
    fsdp_backend,
    make_config,
    make_samples,
    run_ranks,
    save_tiny_model,
    tiny_model,
)
from tests.unit.train.fsdp.test_fsdp import assert_close, gradients
from tests.unit.train.test_critic import critic_gradients

COMPILE = {"compile": True}


class Counted:
    """A backend of torch.compile without a C++ compiler, which counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank, required by every backend."""
    join_default_group(torch.device("cpu"), "127.0.0.1", free_port(), 0, 1, 30)
    yield
    dist.destroy_process_group()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    found = Counted()
    monkeypatch.setattr(compiled_layers, "BACKEND", found)
    forget()
    yield found
    forget()


def forget() -> None:
    compiled_layers._compiled.cache_clear()
    torch._dynamo.reset()


def config_of(*, compiled: bool, recompute: bool = True, **options: Any) -> Config:
    train = {"gradient_checkpointing": recompute, "compile": compiled, "logprob_chunk_tokens": 16}
    return make_config(train=train, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recompute", "graphs"),
    [
        # Up to attention's norm, to attention, after it, to the MLP, to its last product, and the last sum.
        ("qwen3", True, 6),
        ("llama", False, 4),
        # With two kinds of layers, whose attention is another: soft-capped with and without a window.
        ("gemma2", True, 7),
    ],
)
def test_gradients_are_those_without_compilation_and_code_is_shared(
    counted: Counted, tmp_path: Path, family: str, recompute: bool, graphs: int
) -> None:
    folder, samples = save_tiny_model(tmp_path, family), make_samples()
    plain = fsdp_backend(config_of(compiled=False, recompute=recompute), folder)
    backend = fsdp_backend(config_of(compiled=True, recompute=recompute), folder)
    assert counted.graphs == 0
    assert backend.parameter_shapes() == plain.parameter_shapes()
    assert backend.policy.state_dict().keys() == plain.policy.state_dict().keys()
    assert_close(gradients(backend, samples, 60), gradients(plain, samples, 60), 1e-5)
    # Of two layers, and of micro-batches of several lengths.  What follows attention is compiled again for
    # packs of one sequence and of equal lengths: on a CPU it returns another view of its result for them.
    assert graphs <= counted.graphs <= graphs + 2
    for seed, tokens in ((1, 24), (2, 41), (3, 10_000)):
        gradients(backend, make_samples(7, seed=seed), tokens)
    assert counted.graphs <= graphs + 2


@pytest.mark.slow
def test_layers_with_and_without_recomputation_compute_the_same(counted: Counted, tmp_path: Path) -> None:
    folder, samples = save_tiny_model(tmp_path, "qwen3"), make_samples()
    plain = fsdp_backend(config_of(compiled=False, recompute=False), folder)
    config = config_of(compiled=True)
    train = config.train.model_copy(update={"recompute_layers": 1})
    backend = fsdp_backend(config.model_copy(update={"train": train}), folder)
    assert_close(gradients(backend, samples, 60), gradients(plain, samples, 60), 1e-5)
    graphs = counted.graphs
    assert_close(gradients(backend, samples, 24), gradients(plain, samples, 24), 1e-5)
    assert counted.graphs <= graphs + 2


def products(backend: Any) -> int:
    """Matrix products of an update, those of attention and of the head included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        gradients(backend, make_samples(2), 60)
    return sum(event.name in ("aten::mm", "aten::addmm", "aten::bmm") for event in found.events() or [])


@pytest.mark.slow
def test_a_recomputation_does_not_repeat_the_last_product(counted: Counted, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3")
    plain, backend = (fsdp_backend(config_of(compiled=compiled), folder) for compiled in (False, True))
    gradients(backend, make_samples(2), 60)  # compiles
    assert counted.graphs and products(backend) == products(plain)


def _on_two_ranks(rank: int, world: int, port: int, folder: str) -> Any:
    compiled_layers.BACKEND = "aot_eager"
    join_default_group(torch.device("cpu"), "127.0.0.1", port, rank, world, 60)
    backend = fsdp_backend(config_of(compiled=True, ranks=world), folder, rank, world)
    found = gradients(backend, make_samples(7), 30)  # some micro-batches are empty
    dist.destroy_process_group()
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_two_ranks_compute_what_one_does_without_compilation(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    plain = gradients(fsdp_backend(config_of(compiled=False), folder), make_samples(7), 10_000)
    for found, graphs in run_ranks(_on_two_ranks, 2, folder):
        assert_close(found, plain, 1e-4)
        assert graphs > 0


@pytest.mark.slow
def test_the_critic_computes_what_it_does_without_compilation(counted: Counted, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    plain, ours = (critic_gradients(0, 1, folder, {"train": {"compile": c}}) for c in (False, True))
    assert counted.graphs > 0
    assert_close(ours, plain, 1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "images", "hooks", "foreign"])
def test_models_that_cannot_be_compiled_stay_as_they_are(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = {"images": "sees images", "hooks": "has hooks", "foreign": "common kind"}
    model: Any = tiny_model(family if family not in reasons else "qwen3")
    if family == "images":
        monkeypatch.setattr(model.config, "model_type", "qwen3_vl")
    elif family == "hooks":
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    elif family == "foreign":
        layer = model.model.layers[1]
        layer.__class__ = type("Qwen3DecoderLayer", (type(layer),), {"__module__": "remote.modeling"})
    kinds = [type(layer) for layer in model.model.layers]
    with caplog.at_level(logging.INFO):
        assert not compile_layers(model)
    assert [type(layer) for layer in model.model.layers] == kinds
    assert reasons.get(family, "mixture of experts") in caplog.text


def test_layers_are_compiled_on_gpus_in_half_precision_unless_deterministic() -> None:
    def wanted(device: str, dtype: str, **train: Any) -> bool:
        config = make_config(train=train, dtype=dtype)
        placement = config.placement.model_copy(update={"device": device})
        return config.model_copy(update={"placement": placement}).compiles_layers

    assert wanted("cuda", "bfloat16")
    assert not wanted("cuda", "bfloat16", compile=False)
    assert not wanted("cuda", "bfloat16", deterministic=True)
    assert not wanted("cuda", "float32")
    assert not wanted("cpu", "bfloat16")
    assert wanted("cpu", "float32", compile=True)
    for other in ({"deterministic": True}, {"backend": "megatron"}):
        with pytest.raises(ValueError, match=r"train\.compile"):
            make_config(train=COMPILE | other)
