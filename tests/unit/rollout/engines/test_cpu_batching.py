"""Sampling and continuous batching of the cpu engine, without HTTP."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig, PreTrainedModel

from orhpc.errors import ModelError
from orhpc.rollout.engines.cpu.batcher import Batcher
from orhpc.rollout.engines.cpu.kv_cache import make_plan
from orhpc.rollout.engines.cpu.model import SlotModel, _refuse_unsupported
from orhpc.rollout.engines.cpu.protocol import EngineRequest
from orhpc.rollout.engines.cpu.sampling import BLOCK, TOP_K_ALL, SamplingParams, race_noise, sample

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 300, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def random_model(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_follow_the_distribution() -> None:
    """Chi-square test over a vocabulary of several blocks, the last one incomplete."""
    size, draws = BLOCK * 2 + 40, 40_000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(size, generator=generator) * 2
    counts = np.zeros(size)
    for first in range(0, draws, 1000):
        params = [SamplingParams(temperature=1.5, seed=first + i) for i in range(1000)]
        tokens, _ = sample(logits.repeat(1000, 1), params, [7] * 1000)
        counts += np.bincount(tokens, minlength=size)
    expected = torch.softmax(logits.double() / 1.5, 0).numpy() * draws
    likely = expected >= 5
    rest = [counts[~likely].sum(), expected[~likely].sum()]
    statistic = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    statistic += (rest[0] - rest[1]) ** 2 / rest[1]
    freedom = int(likely.sum())
    # The seeds are fixed; a deviation of six standard deviations of chi-square would show a biased sampler.
    assert abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)


def test_random_numbers_of_positions_and_seeds_are_independent() -> None:
    pairs = [(s, p) for s in range(30) for p in range(30)]
    noise = np.stack([race_noise(s, p, 64) for s, p in pairs])
    assert len({row.tobytes() for row in noise}) == len(pairs)
    correlation = np.corrcoef(noise)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.75
    assert abs(correlation.mean()) < 1e-3
    assert abs(noise.mean() - 1.0) < 0.02


logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=40)


@pytest.mark.slow
@given(logit_rows, st.floats(0.3, 3), st.integers(0, 1000))
def test_logprobs_are_those_of_the_scaled_distribution(
    row: list[float], temperature: float, seed: int
) -> None:
    logits = torch.tensor([row, row[::-1]])
    wanted = torch.log_softmax(logits.double() / temperature, -1)
    params = [SamplingParams(temperature=temperature, seed=seed), SamplingParams(top_k=1)]
    tokens, logprobs = sample(logits.clone(), params, [3, 3])
    assert logprobs[0] == pytest.approx(float(wanted[0, tokens[0]]), abs=2e-5)
    greedy = torch.log_softmax(logits[1].double(), -1)
    assert logprobs[1] == pytest.approx(float(greedy.max()), abs=2e-5)


@given(
    logit_rows, st.floats(0.05, 1), st.sampled_from([TOP_K_ALL, 1, 2, 5]), st.floats(0, 1),
    st.integers(0, 10_000),
)  # fmt: skip
@example(row=[-2.611425564680303e-08, 0.0, 0.0, 0.0], top_p=0.125, top_k=TOP_K_ALL, min_p=0.0, seed=0)
def test_truncation_keeps_the_tokens_of_top_k_top_p_and_min_p(
    row: list[float], top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits = torch.tensor(row)
    # In the engine's float32: logits that differ by less than its rounding are ties, which may all be kept.
    p = (logits - logits.max()).exp().double().numpy()
    p /= p.sum()
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    (token,), (logprob,) = sample(logits[None].clone(), [params], [1])
    above = p[p > p[token]].sum()
    rank = int((p > p[token]).sum())
    slack = 1e-6
    assert above <= top_p + slack
    assert rank < top_k
    assert p[token] >= min_p * p.max() - slack
    assert logprob == pytest.approx(math.log(p[token]), abs=2e-5)


@pytest.mark.slow
def test_truncated_samples_follow_the_renormalized_distribution() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    draws = 20_000
    params = [SamplingParams(top_p=0.75, seed=i) for i in range(draws)]
    tokens, _ = sample(logits.repeat(draws, 1), params, [0] * draws)
    counts = np.bincount(tokens, minlength=4) / draws
    # 0.75 keeps each token whose more likely tokens have at most that mass: the first three.
    np.testing.assert_allclose(counts, [4 / 9, 3 / 9, 2 / 9, 0], atol=0.02)


# --- batching -------------------------------------------------------------------------------------


def reference(model: PreTrainedModel, request: EngineRequest) -> np.ndarray:
    ids = torch.tensor([request.context])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double() / request.params.temperature
    rows = torch.log_softmax(logits, -1)[len(request.prompt) - 1 : -1]
    return rows.gather(1, ids[0, len(request.prompt) :, None])[:, 0].numpy()


def make_request(prompt: list[int], params: SamplingParams) -> EngineRequest:
    loop = asyncio.new_event_loop()
    try:
        return EngineRequest("r", prompt, params, True, None, loop.create_future())
    finally:
        loop.close()


def deepseek() -> DeepseekV3Config:
    return DeepseekV3Config(
        **COMMON, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1, n_shared_experts=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, Batcher]:
    """The same small model on its own and in a batcher with three slots."""
    # Two config objects, because the slotted model sets its attention implementation in its config.
    plain, slotted = (random_model(LlamaConfig(**COMMON, num_key_value_heads=2)) for _ in range(2))
    return plain, Batcher(SlotModel(slotted, 3, 64))


events = st.lists(
    st.tuples(
        st.sampled_from(["new", "continue", "sibling", "abort", "retract", "flush"]),
        st.integers(0, 5),
        st.integers(1, 12),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events)
def test_any_history_gives_the_logprobs_of_a_forward_pass(
    pair: tuple[PreTrainedModel, Batcher], history: list[tuple[str, int, int, int]]
) -> None:
    """For any reuse, copy, eviction, abort or recomputation of the cache, each token's log-probability equals
    that of a plain forward pass over its context."""
    plain, batcher = pair
    requests: list[EngineRequest] = []
    for kind, steps, length, seed in history:
        rng = np.random.default_rng(seed)
        fresh = rng.integers(0, 300, length).tolist()
        params = SamplingParams(max_new_tokens=length, temperature=0.8 + 0.1 * (seed % 5), seed=seed)
        finished = [r for r in requests if r.finish_reason]
        if kind == "abort":
            batcher.abort(lambda r, seed=seed: r.params.seed % 2 == seed % 2, "test")
        elif kind == "retract":
            batcher.retract()
        elif kind == "flush":
            assert batcher.flush() == (not batcher.running)
        else:
            prompt = fresh
            if finished and kind == "continue":
                prompt = [*finished[seed % len(finished)].context, *fresh]
            elif requests and kind == "sibling":
                prompt = requests[seed % len(requests)].prompt
            if len(prompt) + length <= 64:
                requests.append(make_request(prompt, params))
                batcher.submit(requests[-1])
        for _ in range(steps):
            if batcher.busy:
                batcher.step()
    while batcher.busy:
        batcher.step()
    for request in requests:
        assert request.finish_reason is not None
        assert len(request.logprobs) == len(request.output)
        if request.finish_reason["type"] != "abort":
            assert len(request.output) == request.params.max_new_tokens
        if request.output:
            np.testing.assert_allclose(request.logprobs, reference(plain, request), atol=1e-4, rtol=0)


def test_a_family_with_compressed_attention_and_experts_runs() -> None:
    """DeepSeek-V3: keys and values of different sizes, routers with groups."""
    plain = random_model(deepseek())
    batcher = Batcher(SlotModel(random_model(deepseek()), 2, 48, record_routes=True))
    rng = np.random.default_rng(0)
    requests = [
        make_request(rng.integers(0, 300, 10 + i).tolist(), SamplingParams(max_new_tokens=8, seed=i))
        for i in range(3)
    ]
    for request in requests:
        request.routes_start = 0
        batcher.submit(request)
    while batcher.busy:
        batcher.step()
    for request in requests:
        np.testing.assert_allclose(request.logprobs, reference(plain, request), atol=1e-4, rtol=0)
        assert request.routes is not None
        assert request.routes.shape == (request.length - 1, 2, 2)
        assert request.routes[:, 0].max() == 0
        assert (request.routes[:, 1, 0] != request.routes[:, 1, 1]).all()


def test_non_finite_weights_fail_their_requests_and_free_the_cache() -> None:
    model, plain = (random_model(LlamaConfig(**COMMON, num_key_value_heads=2)) for _ in range(2))
    batcher = Batcher(SlotModel(model, 2, 64))
    value = model.model.layers[0].self_attn.v_proj.weight
    before = value.detach().clone()

    def run(seed: int, length: int) -> EngineRequest:
        prompt = np.random.default_rng(seed).integers(0, 300, length).tolist()
        request = make_request(prompt, SamplingParams(max_new_tokens=4, seed=seed))
        batcher.submit(request)
        return request

    with torch.no_grad():
        value.fill_(float("nan"))
    broken = [run(i, 40) for i in range(2)]
    while batcher.busy:
        batcher.step()
    assert all(r.error is not None and "not finite" in str(r.error) for r in broken)
    with torch.no_grad():
        value.copy_(before)
    # Different lengths, so that one context is padded with leftover values of the other slot.
    whole = [run(2, 5), run(3, 30)]
    while batcher.busy:
        batcher.step()
    for request in whole:
        np.testing.assert_allclose(request.logprobs, reference(plain, request), atol=1e-4, rtol=0)


def test_a_long_prompt_does_not_block_other_requests() -> None:
    config = LlamaConfig(**{**COMMON, "max_position_embeddings": 2048}, num_key_value_heads=2)
    batcher = Batcher(SlotModel(random_model(config), 2, 1600))
    short = make_request([1, 2, 3], SamplingParams(max_new_tokens=20, seed=1))
    batcher.submit(short)
    batcher.step()
    batcher.step()
    before = len(short.output)
    rng = np.random.default_rng(0)
    batcher.submit(
        make_request(rng.integers(0, 300, 1500).tolist(), SamplingParams(max_new_tokens=1, seed=2))
    )
    for _ in range(3):
        batcher.step()
    assert len(short.output) == before + 3


def test_sliding_windows_are_refused() -> None:
    model = random_model(MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8))
    with pytest.raises(ModelError, match="sliding"):
        _refuse_unsupported(model)
        SlotModel(model, 1, 16)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=12), st.integers(0, 3))
def test_segments_cover_every_row_once(lengths: list[int], gap: int) -> None:
    decode = [(i + (gap if i >= len(lengths) // 2 else 0), n) for i, n in enumerate(lengths)]
    plan = make_plan(decode, [], 4096, torch.float32)
    rows = [r for s in plan.segments for r in range(s.first_row, s.first_row + s.count)]
    assert rows == list(range(len(decode)))
    for s in plan.segments:
        for i in range(s.count):
            slot, position = decode[s.first_row + i]
            assert slot == s.first_slot + i
            visible = s.length if s.bias is None else int((s.bias[i, 0, 0] == 0).sum())
            assert visible == position + 1
