"""Block-wise FP8: against a table of e4m3's values, and batches of weights against single ones."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.train.weights import fp8
from orhpc.train.weights.fp8 import make_quantizer, quantize_blocks

BLOCK = fp8.BLOCK


def dequantize_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Invert :func:`quantize_blocks` up to rounding; float32 ``[N, K]``."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * spread


def e4m3_values() -> np.ndarray:
    """All finite values >= 0 by definition: four bits of exponent with bias 7, three of mantissa, one NaN."""
    found = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found.append(normal if exponent else mantissa / 8 * 2.0**-6)
    return np.array(found)


def rounded(values: np.ndarray) -> np.ndarray:
    """Round to the nearest value, ties to the even code."""
    table = e4m3_values()
    above = np.clip(np.searchsorted(table, np.abs(values)), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    down, up = np.abs(values) - low, high - np.abs(values)
    take_low = (down < up) | ((down == up) & ((above - 1) % 2 == 0))
    return np.copysign(np.where(take_low, low, high), values)


def blocks_of(weight: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    rows, columns = weight.shape
    return [
        (i // BLOCK, j // BLOCK, weight[i : i + BLOCK, j : j + BLOCK])
        for i in range(0, rows, BLOCK)
        for j in range(0, columns, BLOCK)
    ]


def some_weight(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand((rows, 1), generator=generator) * 3
    return (torch.randn((rows, columns), generator=generator) * spread).bfloat16()


@pytest.mark.slow
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 1000), power=st.booleans())
def test_every_block_is_scaled_to_the_format_and_rounded(
    rows: int, columns: int, seed: int, power: bool
) -> None:
    weight = some_weight(rows, columns, seed)
    values, scales = quantize_blocks(weight, power_of_two=power)
    assert values.dtype == torch.float8_e4m3fn
    got = values.float().numpy()
    for i, j, block in blocks_of(weight.float().numpy()):
        scale = scales[i, j].numpy()
        largest = np.abs(block).max()
        # As TransformerEngine does: compute the factor of values first, then its inverse.
        factor = np.float32(448) / largest if largest > 0 else np.float32(1)
        if power:
            factor = np.exp2(np.floor(np.log2(np.float64(factor)))).astype(np.float32)
            assert largest == 0 or largest / 448 <= scale < 2 * largest / 448
        assert scale == np.float32(1) / factor
        scaled = block * factor
        here = got[i * BLOCK : i * BLOCK + BLOCK, j * BLOCK : j * BLOCK + BLOCK]
        assert np.array_equal(here, rounded(np.clip(scaled, -448, 448)))
    # e4m3 keeps four significant bits: the relative error is at most 1/16, except for its smallest numbers.
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    error = (values.float() * spread - weight.float()).abs()
    assert (error <= weight.float().abs() / 16 * 1.001 + spread * 2.0**-10).all()


def test_zeros_stay_zeros() -> None:
    values, scales = quantize_blocks(torch.zeros(130, 5))
    assert (values.float() == 0).all()
    assert (scales > 0).all()


def checkpoint() -> list[tuple[str, Tensor]]:
    """Return an expert layer and unquantized tensors, in a checkpoint's order."""
    found = [("model.embed_tokens.weight", some_weight(40, 64, 0))]
    for e in range(5):
        shapes = {"gate_proj": (96, 160), "up_proj": (96, 160), "down_proj": (160, 96)}
        for k, (name, shape) in enumerate(shapes.items()):
            found.append((f"model.layers.0.mlp.experts.{e}.{name}.weight", some_weight(*shape, 10 * e + k)))
    found += [
        ("model.layers.0.mlp.gate.weight", some_weight(5, 160, 90)),
        ("model.layers.0.self_attn.q_proj.weight", some_weight(96, 160, 91)),
        ("model.layers.0.self_attn.q_proj.bias", torch.arange(96.0)),
        ("model.layers.0.input_layernorm.weight", torch.ones(160)),
        ("lm_head.weight", some_weight(40, 64, 92)),
    ]
    return found


@pytest.mark.parametrize("together", [1, 40_000, 1 << 25])
@pytest.mark.parametrize("power", [False, True])
def test_weights_quantized_together_are_those_quantized_alone(
    monkeypatch: pytest.MonkeyPatch, together: int, power: bool
) -> None:
    monkeypatch.setattr(fp8, "_TOGETHER", together)
    expected: list[tuple[str, Tensor]] = []
    for name, tensor in checkpoint():
        if "proj.weight" in name:
            values, scales = quantize_blocks(tensor, power_of_two=power)
            expected += [(name, values), (name + "_scale_inv", scales)]
        else:
            expected.append((name, tensor))
    got = list(make_quantizer(power_of_two=power)(checkpoint()))
    assert [name for name, _ in got] == [name for name, _ in expected]
    for (name, mine), (_, theirs) in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine.float(), theirs.float()), name


def test_what_is_quantized_already_passes_unchanged() -> None:
    """Trainer ranks quantize what they send each other, before the whole bucket is quantized."""
    quantize = make_quantizer(power_of_two=False)
    weights = [(f"layers.{i}.mlp.up_proj.weight", torch.randn(130, 64)) for i in range(3)]
    once = list(quantize(iter(weights[:2])))
    twice = dict(quantize([*once, weights[2]]))
    assert len(twice) == 6
    assert all(twice[name] is tensor for name, tensor in once)


def test_a_plan_has_the_shapes_of_what_will_travel() -> None:
    quantize = make_quantizer(power_of_two=False)
    planned = list(quantize((name, tensor.to("meta")) for name, tensor in checkpoint()))
    real = list(quantize(checkpoint()))
    assert [(n, t.shape, t.dtype) for n, t in planned] == [(n, t.shape, t.dtype) for n, t in real]
    assert all(tensor.is_meta for _, tensor in planned)


def test_experts_in_one_tensor_are_refused_not_left_unquantized() -> None:
    fused = [("model.layers.0.feed_forward.experts.gate_up_proj", torch.zeros(4, 128, 256))]
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj holds all experts"):
        list(make_quantizer(power_of_two=False)(fused))


class Recipe(ModuleType):
    """TransformerEngine's recipe, scales only: it reads the environment once, at import."""

    def __init__(self) -> None:
        super().__init__("transformer_engine.common.recipe")
        plain = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1"
        self.Float8BlockScaling = lambda: SimpleNamespace(
            fp8_quant_fwd_weight=SimpleNamespace(power_2_scale=not plain)
        )


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_that_were_chosen_too_late_are_refused(
    monkeypatch: pytest.MonkeyPatch, *, power_of_two: bool
) -> None:
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1" if power_of_two else "0")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", ModuleType("transformer_engine.common"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", Recipe())
    fp8.choose_scales(power_of_two=power_of_two)
    with pytest.raises(ModelError, match="imported before"):
        fp8.check_scales(power_of_two=power_of_two)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", Recipe())
    fp8.check_scales(power_of_two=power_of_two)
