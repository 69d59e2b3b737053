"""Hugging Face to Megatron names and back: bit-equal for every family, layout and kind of module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.errors import ModelError
from orhpc.models import ModelShape, shape_of
from orhpc.plan.layout import Layout, check_layout, stages
from orhpc.train.megatron.hf_mapping import HfMapping, ModelPart, Piece
from orhpc.train.megatron.hf_stream import HfFolder
from orhpc.train.megatron.names import Naming
from orhpc.train.weights.buckets import plan_buckets
from tests.model_configs import REAL, TINY

LOCAL = Naming(fused_norms=False, grouped_experts=False)
FUSED = Naming(fused_norms=True, grouped_experts=True)


class InMemory:
    """A checkpoint in memory that counts the elements read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.elements = 0

    def read(self, piece: Piece, dim: int, start: int, stop: int) -> Tensor:
        tensor = self.tensors[piece.name]
        matrix = tensor if piece.expert is None else tensor[piece.expert].t()
        found = torch.narrow(matrix, dim, start, stop - start)
        self.elements += found.numel()
        return found


def checkpoint(shape: ModelShape) -> dict[str, Tensor]:
    """Return a checkpoint in which all elements are distinct."""
    found: dict[str, Tensor] = {}
    at = 0
    for tensor in shape.tensors():
        for name, size in tensor.each():
            found[name] = torch.arange(at, at + tensor.elements, dtype=torch.float64).reshape(size)
            at += tensor.elements
    return found


def parts(shape: ModelShape, pp: int, ep: int) -> Iterator[ModelPart]:
    """Yield every pipeline stage with every share of the experts."""
    for stage, layers in enumerate(stages(shape, pp)):
        for index in range(ep):
            size = shape.experts // ep
            experts = range(index * size, (index + 1) * size) if shape.experts else None
            yield ModelPart(layers, stage == 0, stage == pp - 1, experts)


def filled(mapping: HfMapping, source: InMemory, part: ModelPart, **ranks: int) -> dict[str, Tensor]:
    """Read one rank's parameters under the names in its model chunk."""
    found: dict[str, Tensor] = {}
    for name, target, index in mapping.own(part, **ranks):
        found[name] = torch.full(target.local_shape(), torch.nan, dtype=torch.float64)
        target.fill(found[name], source, index)
    return found


def loaded(mapping: HfMapping, source: InMemory, pp: int, ep: int) -> dict[str, Tensor]:
    """Load every rank of a layout, and join their parts under the whole model's names."""
    whole: dict[str, Tensor] = {}
    for part in parts(mapping.shape, pp, ep):
        ranks = [
            filled(mapping, source, part, tp_rank=tp, etp_rank=etp)
            for tp, etp in product(range(mapping.tp), range(mapping.etp))
        ]
        first_expert = part.experts.start if part.experts else 0
        for target in mapping.targets(part):
            local = target.named(part.layers.start, first_expert)
            held = [rank.pop(local) for rank in ranks]
            assert all(tuple(t.shape) == target.local_shape() for t in held)
            # Ranks are ordered by tp, then etp; copies along the other dimension are equal.
            chosen = held[: mapping.etp] if target.expert is not None else held[:: mapping.etp]
            joined = target.whole(chosen)
            assert target.name not in whole or torch.equal(whole[target.name], joined)
            whole[target.name] = joined
        assert not any(ranks)
    return whole


def exported(mapping: HfMapping, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, group in mapping.units().items():
        tensors = [whole[t.name] for t in group]
        pieces = mapping.split(name, tensors[0] if len(group) == 1 else torch.stack(tensors))
        assert found.keys().isdisjoint(pieces)
        found |= pieces
    return found


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
@pytest.mark.parametrize("naming", [LOCAL, FUSED], ids=["local", "fused"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_every_family_comes_back_bit_for_bit(name: str, naming: Naming) -> None:
    shape = shape_of(TINY[name])
    original = checkpoint(shape)
    for tp, pp, ep, etp in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (4, 2, 4, 2), (2, 2, 1, 4)):
        if not shape.experts and ep * etp > 1:
            ep = etp = 1
        layout = Layout(tp * pp * ep * etp, tp=tp, pp=pp, ep=ep, etp=etp)
        check_layout(shape, layout, devices_per_node=4)
        mapping = HfMapping(shape, naming, tp=tp, etp=etp)
        whole = loaded(mapping, InMemory(original), pp, ep)
        assert equal(exported(mapping, whole), original)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
)
def test_any_sizes_in_any_layout(tp: int, pp: int, ep: int, etp: int, groups: int, biased: bool) -> None:
    content: dict[str, Any] = {
        **TINY["qwen3-moe"],
        "num_hidden_layers": 4,
        "num_attention_heads": groups * 12,
        "num_key_value_heads": groups * 12 if groups == 1 else groups,
        "head_dim": 6,
        "intermediate_size": 24,
        "moe_intermediate_size": 6,
        "attention_bias": biased,
        "vocab_size": 24,
    }
    shape = shape_of(content)
    mapping = HfMapping(shape, FUSED, tp=tp, etp=etp)
    original = checkpoint(shape)
    source = InMemory(original)
    assert equal(exported(mapping, loaded(mapping, source, pp, ep)), original)
    # Ranks read only what they hold: copied tensors once per rank, divided tensors once per group.
    held = sum(
        tensor.numel() // target.ways
        for part in parts(shape, pp, ep)
        for target in mapping.targets(part)
        for tensor in (torch.empty(target.shape, device="meta"),)
    )
    assert source.elements == held * tp * etp


def test_queries_keys_and_values_lie_as_megatron_reads_them() -> None:
    """megatron.core.transformer.attention views rows as ``[groups, queries a group + 2, head, H]``."""
    shape = shape_of(TINY["qwen2"])
    original = checkpoint(shape)
    layer = "model.layers.1.self_attn."
    for tp in (1, 2):
        mapping = HfMapping(shape, LOCAL, tp=tp)
        for rank in range(tp):
            held = filled(mapping, InMemory(original), ModelPart(range(3)), tp_rank=rank)
            mixed = held["decoder.layers.1.self_attention.linear_qkv.weight"]
            grouped = mixed.view(2 // tp, 2 + 2, 16, 64)
            mine = slice(rank * 64 // tp, (rank + 1) * 64 // tp)
            half = slice(rank * 32 // tp, (rank + 1) * 32 // tp)
            queries = grouped[:, :2].reshape(-1, 64)
            if tp == 2:
                assert torch.equal(queries, original[layer + "q_proj.weight"][rank * 32 : rank * 32 + 32])
            else:
                assert torch.equal(queries, original[layer + "q_proj.weight"][mine])
            assert torch.equal(grouped[:, 2].reshape(-1, 64), original[layer + "k_proj.weight"][half])
            assert torch.equal(grouped[:, 3].reshape(-1, 64), original[layer + "v_proj.weight"][half])
            bias = held["decoder.layers.1.self_attention.linear_qkv.bias"].view(2 // tp, 4, 16)
            assert torch.equal(bias[:, 3].reshape(-1), original[layer + "v_proj.bias"][half])


@pytest.mark.parametrize("name", ["llama", "glm4", "llama4", "mixtral"])
def test_the_parts_of_a_gated_mlp_add_up_to_it(name: str) -> None:
    """Column-parallel gate and up, row-parallel down: the sum over ranks is the whole MLP's output."""
    shape, ways = shape_of(TINY[name]), 4
    torch.manual_seed(0)
    original = {n: torch.randn(t.shape, dtype=torch.float64) for n, t in checkpoint(shape).items()}
    mapping = HfMapping(shape, LOCAL, tp=ways, etp=ways)
    moe = "mlp.experts.local_experts.3." if shape.experts else "mlp."
    layer = max(i for i, at in enumerate(shape.layers) if at.experts == bool(shape.experts))
    x = torch.randn(5, 64, dtype=torch.float64)
    total = torch.zeros(5, 64, dtype=torch.float64)
    for rank in range(ways):
        part = ModelPart(range(layer, layer + 1), False, False)
        held = filled(mapping, InMemory(original), part, tp_rank=rank, etp_rank=rank)
        gate, up = torch.chunk(x @ held[f"decoder.layers.0.{moe}linear_fc1.weight"].t(), 2, dim=-1)
        total += torch.nn.functional.silu(gate) * up @ held[f"decoder.layers.0.{moe}linear_fc2.weight"].t()
    base = f"{shape.family.prefix}layers.{layer}."
    if name == "llama4":
        gate, up = (x @ original[f"{base}feed_forward.experts.gate_up_proj"][3]).chunk(2, dim=-1)
        down = original[f"{base}feed_forward.experts.down_proj"][3].t()
    elif name == "glm4":
        gate, up = (x @ original[f"{base}mlp.gate_up_proj.weight"].t()).chunk(2, dim=-1)
        down = original[f"{base}mlp.down_proj.weight"]
    else:
        inside = "block_sparse_moe.experts.3." if name == "mixtral" else "mlp."
        names = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        first, second, down = (original[f"{base}{inside}{n}.weight"] for n in names)
        gate, up = x @ first.t(), x @ second.t()
    assert torch.allclose(total, torch.nn.functional.silu(gate) * up @ down.t(), atol=1e-9)


def test_padding_of_the_vocabulary_is_zero_and_goes_no_further() -> None:
    shape = shape_of({**TINY["llama"], "vocab_size": 101})
    original = checkpoint(shape)
    with pytest.raises(ModelError, match="101 rows cannot be cut into 4"):
        list(HfMapping(shape, LOCAL, tp=4).targets(ModelPart(range(3))))
    mapping = HfMapping(shape, LOCAL, tp=4, vocabulary=256)
    assert equal(exported(mapping, loaded(mapping, InMemory(original), 1, 1)), original)
    last = filled(mapping, InMemory(original), ModelPart(range(3)), tp_rank=3)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert last[name].shape == (64, 64)
        assert not last[name].any()


def test_a_row_in_place_of_a_matrix_is_refused_and_not_repeated() -> None:
    target = next(HfMapping(shape_of(TINY["qwen3"]), LOCAL).targets(ModelPart(range(3))))
    narrow = InMemory({target.pieces[0].name: torch.ones(target.shape[0], 1)})
    with pytest.raises(ModelError, match="of the checkpoint in place of"):
        target.fill(torch.empty(target.shape), narrow, 0)


def test_a_tied_matrix_is_at_both_ends_of_a_pipeline_and_exported_once() -> None:
    shape = shape_of(TINY["qwen3"])
    mapping = HfMapping(shape, LOCAL)
    original = checkpoint(shape)
    first, last = (filled(mapping, InMemory(original), part) for part in parts(shape, 2, 1))
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])
    assert "decoder.final_layernorm.weight" in last
    assert "output_layer.weight" not in filled(mapping, InMemory(original), ModelPart(range(3)))
    assert "output_layer.weight" not in mapping.units()


def test_names_of_each_kind_of_module() -> None:
    deepseek = shape_of(TINY["deepseek-v3"])
    part = ModelPart(range(1, 3), False, True, range(4, 8))
    local = [t.named(1, 4) for t in HfMapping(deepseek, LOCAL).targets(part)]
    fused = [t.named(1, 4) for t in HfMapping(deepseek, FUSED).targets(part)]
    layer = "decoder.layers.0."
    assert f"{layer}self_attention.kv_layernorm.weight" in local
    assert f"{layer}self_attention.linear_kv_up_proj.layer_norm_weight" in fused
    assert f"{layer}mlp.experts.local_experts.0.linear_fc1.weight" in local
    assert f"{layer}mlp.experts.linear_fc1.weight3" in fused
    assert f"{layer}mlp.experts.linear_fc1.weight4" not in fused
    assert f"{layer}pre_mlp_layernorm.weight" in fused  # the norm before experts is a separate module
    assert f"{layer}mlp.router.expert_bias" in fused
    dense = [t.name for t in HfMapping(shape_of(TINY["llama"]), FUSED).targets(ModelPart(range(1)))]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in dense
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in dense


def test_projections_into_latents_are_whole_on_every_rank() -> None:
    shape = shape_of(TINY["deepseek-v3"])
    for naming in (LOCAL, FUSED):
        held = {t.name: t.local_shape() for t in HfMapping(shape, naming, tp=2).targets(ModelPart(range(1)))}
        assert held["decoder.layers.0.self_attention.linear_kv_down_proj.weight"] == (16 + 8, 64)
        assert held["decoder.layers.0.self_attention.linear_q_down_proj.weight"] == (24, 64)
        assert held["decoder.layers.0.self_attention.linear_kv_up_proj.weight"] == (4 * (16 + 24) // 2, 16)


def test_a_tensor_without_a_rule_is_named() -> None:
    shape = shape_of({**TINY["deepseek-v3"], "attention_bias": True})
    with pytest.raises(
        ModelError, match=r"no Megatron parameter is known for self_attn\.kv_a_proj.*add a rule"
    ):
        HfMapping(shape, LOCAL).units()


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "DeepSeek-V3", "GLM-4.5"])
def test_real_sizes_go_out_in_buckets_of_the_announced_shapes(name: str) -> None:
    shape = shape_of({**REAL[name][0], "num_hidden_layers": 5})
    mapping = HfMapping(shape, FUSED, tp=8, etp=1)
    limit = 1 << 30
    buckets = plan_buckets(mapping.shapes(), mapping.split, torch.bfloat16, limit)
    announced = {n: s for b in buckets for n, s in zip(b.names, b.shapes, strict=True)}
    assert announced == dict(item for t in shape.tensors() for item in t.each())
    assert all(b.nbytes <= limit or len(b.parameters) == 1 for b in buckets)


# --- real folders -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders written by transformers, one for each way of storing experts and language parts."""
    found: dict[str, Path] = {}
    for name in ("qwen3-moe", "deepseek-v3", "glm4", "minimax-m2", "gemma3"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY[name]), dtype=torch.bfloat16)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name], max_shard_size="100KB")
    return found


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "glm4", "minimax-m2", "gemma3"])
def test_folders_that_transformers_wrote(name: str, folders: dict[str, Path]) -> None:
    folder = HfFolder(folders[name])
    assert len(set(folder.files.values())) > 1
    shape = folder.language_part(shape_of(TINY[name]))
    folder.check(shape)
    stored = {n: t for f in set(folder.files.values()) for n, t in load_file(folders[name] / f).items()}
    ep = 2 if shape.experts else 1
    mapping = HfMapping(shape, FUSED, tp=2, etp=ep)
    whole = loaded(mapping, folder, 2, ep)  # type: ignore[arg-type]
    assert equal(exported(mapping, whole), stored)


def test_a_folder_with_images_gives_its_language_part(tmp_path: Path) -> None:
    shape = shape_of(TINY["llama4"])
    for prefix, head in (
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.", "lm_head.weight"),
    ):
        folder = tmp_path / head
        folder.mkdir()
        tensors = {
            n.replace("model.", prefix, 1) if n.startswith("model.") else head: t.contiguous()
            for n, t in checkpoint(shape).items()
        }
        save_file({**tensors, "vision_model.class_embedding": torch.zeros(3)}, folder / "model.safetensors")
        source = HfFolder(folder)
        mapping = HfMapping(source.language_part(shape), LOCAL, tp=2, etp=2)
        source.check(mapping.shape)
        assert equal(exported(mapping, loaded(mapping, source, 2, 2)), tensors)  # type: ignore[arg-type]


def test_blockwise_fp8_is_read_as_the_values_it_stands_for(tmp_path: Path) -> None:
    """DeepSeek-V3's format with blocks of 20 x 12, which are not aligned with ranks' parts."""
    shape = shape_of(TINY["deepseek-v3"])
    torch.manual_seed(0)
    plain = {n: torch.randn(t.shape) for n, t in checkpoint(shape).items()}
    stored, wanted = dict(plain), dict(plain)
    for name in [n for n, t in plain.items() if "experts." in n or ("_proj" in n and t.ndim == 2)]:
        rows, columns = plain[name].shape
        scale = torch.rand(-(-rows // 20), -(-columns // 12)) + 0.5
        spread = scale.repeat_interleave(20, 0)[:rows].repeat_interleave(12, 1)[:, :columns]
        stored[name] = (plain[name] / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        wanted[name] = stored[name].float() * spread
    save_file(stored, tmp_path / "model.safetensors")
    about = {"quant_method": "fp8", "weight_block_size": [20, 12]}
    (tmp_path / "config.json").write_text(json.dumps({**TINY["deepseek-v3"], "quantization_config": about}))
    folder = HfFolder(tmp_path)
    folder.check(shape)
    mapping = HfMapping(shape, LOCAL, tp=4, etp=2)
    found = exported(mapping, loaded(mapping, folder, 2, 2))  # type: ignore[arg-type]
    assert equal(found, wanted)
    assert len(stored) > len(found)


def test_faults_of_folders_are_one_line(tmp_path: Path) -> None:
    shape = shape_of(TINY["llama"])
    with pytest.raises(ModelError, match="no safetensors weights"):
        HfFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read"):
        HfFolder(tmp_path)
    tensors = checkpoint(shape)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing model\.layers\.2\.mlp\.up_proj\.weight$"):
        HfFolder(tmp_path).check(shape)
    with pytest.raises(ModelError, match=r"missing model\.layers\.2\.mlp\.up_proj\.weight$"):
        filled(HfMapping(shape, LOCAL), HfFolder(tmp_path), ModelPart(range(3)))  # type: ignore[arg-type]
    wider = shape_of({**TINY["llama"], "intermediate_size": 128})
    with pytest.raises(ModelError, match=r"gate_proj\.weight is \[96, 64\], which differs from config\.json"):
        filled(HfMapping(wider, LOCAL), HfFolder(tmp_path), ModelPart(range(2)))  # type: ignore[arg-type]
    narrower = shape_of({**TINY["llama"], "intermediate_size": 48, "num_hidden_layers": 2})
    with pytest.raises(ModelError, match=r"gate_proj\.weight is \[96, 64\], by config\.json \[48, 64\]"):
        HfFolder(tmp_path).check(narrower)
    save_file({"model.layers.0.mlp.up_proj.qweight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"quantized weights .*qweight.* unknown format"):
        HfFolder(tmp_path)
    save_file({"model.layers.0.weight_scale_inv": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json has no FP8 block size"):
        HfFolder(tmp_path)
    other = {"quant_method": "int8", "weight_block_size": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": other}))
    with pytest.raises(ModelError, match="int8 in blocks of 8 x 8 is not supported"):
        HfFolder(tmp_path)
    save_file({"other.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no embed_tokens\.weight"):
        HfFolder(tmp_path).language_part(shape)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="has no weight_map"):
        HfFolder(tmp_path)
