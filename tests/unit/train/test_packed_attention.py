"""Packed attention against each family's own forward pass on one sequence at a time."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Llama4TextConfig

from orhpc.errors import ModelError
from orhpc.train.attention import llama4, softcap
from orhpc.train.attention import packed as packed_attention
from orhpc.train.attention.packed import packed_attention as attend
from orhpc.train.attention.packing import Packing
from tests.trainer_kit import VOCABULARY, tiny_model

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "qwen3_moe", "gemma3", "gemma2", "llama4"]


def bounds_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Each family twice with the same weights: packed, and with its own eager attention."""
    packed_attention.register()
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(folder)
        made[family] = tuple(
            AutoModelForCausalLM.from_pretrained(folder, attn_implementation=kind, dtype=torch.float32)
            for kind in (packed_attention.NAME, "eager")
        )
        assert llama4.adapt(made[family][0]) == (family == "llama4")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[13], [4, 4, 4], [17, 3, 9, 16, 2, 1]])
def test_logits_and_gradients_equal_the_family_s_own(
    pairs: dict[str, tuple[Any, Any]], family: str, lengths: list[int]
) -> None:
    packed, plain = pairs[family]
    packed.zero_grad()
    plain.zero_grad()
    ids_P = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions_P = torch.cat([torch.arange(n) for n in lengths])
    packing = Packing(bounds_of(lengths), CPU)
    ours = packed(
        input_ids=ids_P[None], position_ids=positions_P[None], packing=packing, use_cache=False
    ).logits[0]
    theirs = torch.cat(
        [plain(input_ids=ids[None], use_cache=False).logits[0] for ids in ids_P.split(lengths)]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, a), b in zip(packed.named_parameters(), plain.parameters(), strict=True):
        scale = float(b.grad.abs().max()) + 1e-6
        assert float((a.grad - b.grad).abs().max()) / scale < 1e-4, name


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.none() | st.integers(1, 12),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.none() | st.floats(0.05, 0.5),
    st.none() | st.floats(0.3, 3.0),
)
def test_attention_equals_a_dense_mask(
    lengths: list[int],
    window: int | None,
    heads: tuple[int, int],
    scale: float | None,
    softcap: float | None,
) -> None:
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (torch.randn(1, h, total, 8, generator=generator) for h in (heads[0], heads[1], heads[1]))
    module = torch.nn.Module()
    packing = Packing(bounds_of(lengths), CPU)
    options: dict[str, Any] = {"scaling": scale, "sliding_window": window, "softcap": softcap}
    out, _ = attend(module, q, k, v, None, packing=packing, **options)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(total)
    visible = (segment[:, None] == segment[None]) & (at[:, None] >= at[None])
    if window is not None:
        visible &= at[:, None] - at[None] < window
    repeats = heads[0] // heads[1]
    scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * (8**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    dense = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v.repeat_interleave(repeats, 1)
    torch.testing.assert_close(out, dense.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_a_long_window_is_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
    packing = Packing([0, 50], CPU)
    whole, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=7, packing=packing)
    monkeypatch.setattr(packed_attention, "WINDOW_BLOCK", 8)
    blocks, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=7, packing=packing)
    torch.testing.assert_close(blocks, whole)


@pytest.mark.slow
def test_blocks_of_soft_capped_queries_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients do not depend on the block size, with and without a window."""
    q, k, v = inputs = [torch.randn(1, heads, 61, 8, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(1, 61, 4, 8)
    packing = Packing([0, 3, 40, 61], CPU)

    def run(window: int | None) -> list[torch.Tensor]:
        out, _ = attend(torch.nn.Module(), q, k, v, None, softcap=1.5, sliding_window=window, packing=packing)
        return [out, *torch.autograd.grad((out * weights).sum(), inputs)]

    for window in (None, 7):
        whole = run(window)
        for block in (1, 8, 32):
            monkeypatch.setattr(softcap, "QUERY_BLOCK", block)
            for a, b in zip(run(window), whole, strict=True):
                torch.testing.assert_close(a, b)
        monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("bounds", [[0, 5], [0, 256], [0, 90, 91, 300, 301, 700], [0, 128, 256, 400]])
def test_what_flex_attention_is_given_means_the_same(bounds: list[int], window: int | None) -> None:
    """Uncompiled on a CPU, which uses both functions; our block mask is compared with torch's."""
    packing, total = Packing(bounds, CPU), bounds[-1]
    q, k, v = (torch.randn(total, heads, 16) for heads in (4, 2, 2))
    options: dict[str, Any] = {"scale": 0.3, "softcap": 0.8, "window": window, "packing": packing}
    ours = softcap.softcapped_attention(q, k, v, fused=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that it is slow without a compiler
        theirs = softcap.flex_attention_of(flex_attention, q, k, v, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    mask = softcap.block_mask(packing, window)
    wanted = create_block_mask(mask.mask_mod, None, None, total, total, "cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(wanted, name)), name
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(mask, f"{kind}_num_blocks")[0, 0].tolist()
        listed, expected = (getattr(m, f"{kind}_indices")[0, 0] for m in (mask, wanted))
        for row, count in enumerate(counts):
            assert torch.equal(listed[row, :count], expected[row, :count]), kind


@pytest.mark.slow
def test_compiled_once_for_all_packings_and_windows_but_the_first_length() -> None:
    counter = CompileCounter()
    run = torch.compile(flex_attention, fullgraph=True, backend=counter)
    for bounds in ([0, 300], [0, 20, 700], [0, 500, 501, 1024], [0, 129]):
        packing = Packing(bounds, CPU)
        q, k, v = (torch.randn(bounds[-1], heads, 16) for heads in (4, 2, 2))
        for window in (None, 100, 30):
            options: dict[str, Any] = {"scale": 0.3, "softcap": 0.8, "window": window, "packing": packing}
            ours = softcap.softcapped_attention(q, k, v, fused=False, **options)
            theirs = softcap.flex_attention_of(run, q, k, v, **options)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 2


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 12))
def test_chunks_begin_anew_in_every_sequence(lengths: list[int], size: int) -> None:
    packing = Packing(bounds_of(lengths), CPU)
    chunks = packing.chunked(size)
    assert chunks.longest <= size
    assert packing.chunked(size) is chunks
    positions = torch.cat([torch.arange(n) for n in lengths])
    assert torch.equal(packing.positions, positions)
    assert torch.equal(chunks.positions, positions % size)


def test_changing_one_sequence_leaves_the_others_bit_equal(pairs: dict[str, tuple[Any, Any]]) -> None:
    packed, _ = pairs["gemma3"]
    lengths = [9, 6, 8]
    ids_P = torch.randint(0, VOCABULARY, (sum(lengths),))
    positions_P = torch.cat([torch.arange(n) for n in lengths])[None]
    packing = Packing(bounds_of(lengths), CPU)

    def hidden(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output = packed.model(
                input_ids=ids[None], position_ids=positions_P, packing=packing, use_cache=False
            )
            return output.last_hidden_state[0]

    other = ids_P.clone()
    other[9:15] = (other[9:15] + 1) % VOCABULARY
    before, after = hidden(ids_P), hidden(other)
    assert torch.equal(before[:9], after[:9])
    assert torch.equal(before[15:], after[15:])
    assert not torch.equal(before[9:15], after[9:15])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "mask"),
        ({"is_causal": False}, "causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"packing": None}, "packing"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 2, 4, 8)
    arguments = {"attention_mask": None, "packing": Packing([0, 4], CPU)} | options
    with pytest.raises(ModelError, match=message):
        attend(torch.nn.Module(), q, q, q, **arguments)


def test_families_with_other_attention_are_refused_before_loading() -> None:
    class Chunked(torch.nn.Module):
        _supports_flash_attn = True

    with pytest.raises(ModelError, match="chunked"):
        packed_attention.check_family(Chunked, Llama4TextConfig(layer_types=["full_attention"] * 48))  # type: ignore[arg-type]

    class Plain(torch.nn.Module):
        _supports_flash_attn = False

    with pytest.raises(ModelError, match="flash attention"):
        packed_attention.check_family(Plain, object())  # type: ignore[arg-type]


def test_attention_sinks_are_refused_by_the_layer_that_has_them() -> None:
    packed_attention.register()
    config = GptOssConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation=packed_attention.NAME,
    )
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ModelError, match="s_aux"):
        GptOssForCausalLM(config)(input_ids=ids, packing=Packing([0, 4], CPU), use_cache=False)


@pytest.mark.parametrize("release", ["2.11", "2.12"])
def test_the_cuda_kernel_gets_keys_and_values_as_they_are(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """Grouped queries need no repeated keys and values; torch 2.11 has no flag that allows it."""
    calls: list[dict[str, Any]] = []

    def earlier(
        q: Tensor, k: Tensor, v: Tensor, *at: Any, scale: Any = None, window_size: Any = (-1, -1)
    ) -> Tensor:
        calls.append({"heads": (q.shape[1], k.shape[1], v.shape[1]), "window": window_size})
        return torch.zeros_like(q)

    def later(
        q: Tensor, k: Tensor, v: Tensor, *at: Any, scale: Any = None, window_size: Any = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return earlier(q, k, v, *at, scale=scale, window_size=window_size)

    monkeypatch.setattr(packed_attention, "_varlen", lambda: earlier if release == "2.11" else later)
    packed_attention._varlen_arguments.cache_clear()
    packing = Packing([0, 3, 7], torch.device("cpu"))
    for heads in (4, 2):
        q, k, v = torch.zeros(7, 4, 8), torch.zeros(7, heads, 8), torch.zeros(7, heads, 8)
        packed_attention._varlen_attention(q, k, v, 0.5, None, packing)
    packed_attention._varlen_arguments.cache_clear()
    assert calls == [{"heads": (4, h, h), "window": (-1, 0)} for h in (4, 2)]
