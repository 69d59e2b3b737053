"""Every family's tensors and FLOPs against transformers' own models, built without storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from orhpc.models import HfTensor, shape_of
from orhpc.plan.activations import Kernels, layer_activations
from orhpc.plan.layout import Layout, first_rank_rows
from orhpc.plan.memory import Demand, trainer_memory
from orhpc.plan.sent_weights import parameter_sizes
from orhpc.train.fsdp import compiled_layers
from orhpc.train.fsdp.compiled_layers import compile_layers
from tests.model_configs import REAL, SEEING, TINY

LENGTH = 256


def meta_model(content: dict[str, Any]) -> PreTrainedModel:
    """Build the family's language model from the contents of a config.json."""
    plain = dict(content)
    if content["model_type"] == "llama4":  # AutoModelForCausalLM builds only the language part
        plain = {"model_type": "llama4_text", **content["text_config"]}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain), attn_implementation="eager")


def checkpoint_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a checkpoint of the language part, parameters and buffers."""
    state = dict(model.state_dict())
    if "lm_head.weight" in state and model.config.get_text_config().tie_word_embeddings:
        del state["lm_head.weight"]
    shapes = {n: tuple(t.shape) for n, t in revert_weight_conversion(model, state).items()}
    vision = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )
    return {n: s for n, s in shapes.items() if not n.startswith(vision)}


def ours(tensors: list[HfTensor]) -> dict[str, tuple[int, ...]]:
    return dict(item for tensor in tensors for item in tensor.each())


@pytest.mark.parametrize("name", sorted(TINY))
def test_names_and_shapes_equal_those_of_a_checkpoint(name: str) -> None:
    shape = shape_of(TINY[name])
    model = meta_model(TINY[name])
    assert ours(list(shape.tensors())) == checkpoint_shapes(model)
    spans = [layer.span for layer in shape.layers]
    assert any(spans) == any(k in name for k in ("mistral", "windowed", "gemma", "llama4", "v32"))


@pytest.mark.parametrize("name", sorted(n for n, c in TINY.items() if c.get("kv_lora_rank")))
def test_latent_norms_have_the_epsilon_in_the_family_table(name: str) -> None:
    content = {**TINY[name], "rms_norm_eps": 0.03}
    norms = {n: m for n, m in meta_model(content).named_modules() if n.endswith("_a_layernorm")}
    expected = shape_of(content).family.megatron.latent_norm_eps
    assert norms
    assert {norm.variance_epsilon for norm in norms.values()} == {0.03 if expected is None else expected}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REAL))
def test_parameter_counts_of_real_sizes_equal_transformers(name: str) -> None:
    config, parameters, _ = REAL[name]
    model = meta_model(config)
    assert sum(p.numel() for p in model.parameters()) == parameters == shape_of(config).parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Llama-3.2-1B", "Llama-4-Scout", "DeepSeek-V3"])
@pytest.mark.parametrize("ranks", [3, 7, 24, 256])
def test_the_first_fsdp_rank_holds_the_most_rows(name: str, ranks: int) -> None:
    """FSDP2 cuts the first dimension as torch.chunk does: of 128 experts, 24 ranks get 6, 5.3 on average."""
    demand = Demand(4096, 2, "full", 1024, reference=True)
    memory = trainer_memory(shape_of(REAL[name][0]), Layout(ranks, sharded=True), demand)
    parts = [p.chunk(ranks)[0].numel() for p in meta_model(REAL[name][0]).parameters()]
    held = sum(parts)
    assert (memory.weights, memory.optimizer, memory.reference) == (4 * held, 8 * held, 2 * held)


@pytest.mark.parametrize("name", sorted(SEEING))
def test_the_root_holds_what_is_in_no_layer_of_decoder_or_vision_tower(name: str) -> None:
    """FSDP gathers it throughout a pass; Qwen3-VL's mergers are as large as its embedding."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**SEEING[name]))
    units = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    inside = {id(p) for unit in units for p in unit.parameters()}
    outside = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    assert first_rank_rows(shape_of(SEEING[name]), 2).root == outside


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_plan_knows_the_sizes_of_fsdps_parameters(name: str) -> None:
    """transformers merges the tensors of a layer's experts; the sync gathers what the model has."""
    tower = ("vision_tower.", "multi_modal_projector.")
    named = meta_model(TINY[name]).named_parameters()
    sizes = [p.numel() for n, p in named if not any(part in n for part in tower)]
    found = parameter_sizes(shape_of(TINY[name]), 1, sharded=True)
    assert sorted(size for size, part in found if part not in ("bias", "vision")) == sorted(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "glm4", "gemma2", "deepseek-v3", "qwen3"])
def test_flops_equal_torchs_count(name: str) -> None:
    content = {**TINY[name], "first_k_dense_replace": 9}  # FLOPs of experts depend on the tokens
    shape, length = shape_of(content), 32
    with FlopCounterMode(display=False) as forward:
        logits = meta_model(content)(torch.zeros(1, length, dtype=torch.long, device="meta")).logits
    # Eager attention multiplies by all keys, masked or not.
    per_token = shape.linear_flops + len(shape.layers) * shape.attention_flops(length)
    assert forward.get_total_flops() / length == pytest.approx(per_token, rel=0.01)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert backward.get_total_flops() == pytest.approx(2 * forward.get_total_flops(), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [(torch.float32, "eager"), (torch.bfloat16, "eager"), (torch.bfloat16, "compiled")],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2"])
def test_activation_sizes_equal_what_autograd_saves(
    name: str, dtype: torch.dtype, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure what a second and a third layer keep for the backward pass, storage by storage."""
    # What inductor keeps, without its C++ compiler.
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager_decomp_partition")
    compiled_layers._compiled.cache_clear()
    torch._dynamo.reset()

    def kept(layers: int) -> int:
        content = {**TINY[name], "num_hidden_layers": layers, "hidden_size": 256, "intermediate_size": 512}
        config = AutoConfig.for_model(**content)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
        if kernels == "compiled":
            assert compile_layers(model)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}
        alive: list[torch.Tensor] = []  # an address may be reused once its storage is freed

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(torch.zeros(1, LENGTH, dtype=torch.long), use_cache=False)
        return sum(storages.values())

    content = {**TINY[name], "hidden_size": 256, "intermediate_size": 512}
    expected = LENGTH * layer_activations(shape_of(content), 0, dtype.itemsize, kernels)
    assert (kept(3) - kept(1)) / 2 == pytest.approx(expected, rel=0.1)
    compiled_layers._compiled.cache_clear()
