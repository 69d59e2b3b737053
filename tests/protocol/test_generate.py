"""``/generate``: sampled tokens, their log-probabilities, and refused requests."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from orhpc.errors import ConfigError, PromptTooLong
from orhpc.rollout.client import EngineClient
from orhpc.types import FinishReason, Generation, Sampling

from .conftest import Server, prompt_of
from .tiny_models import EOS


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(server: Server, temperature: float) -> None:
    prompt = prompt_of(40, 1)
    sampling = Sampling(max_new_tokens=30, temperature=temperature, seed=5)
    got = server.generate(prompt, sampling)
    assert got.prompt_tokens == 40
    assert 1 <= len(got.tokens_N) <= 30
    server.assert_logprobs(got, prompt, temperature)


def test_greedy_takes_the_most_likely_token(server: Server) -> None:
    prompt = prompt_of(12, 2)
    got = server.generate(prompt, Sampling(max_new_tokens=12, temperature=0.0))
    scored = server.assert_logprobs(got, prompt)
    # Of two nearly tied tokens, either may be the most likely one.
    np.testing.assert_allclose(scored.logprobs_N, scored.best_N, atol=2 * server.tolerance, rtol=0)


def test_a_seed_samples_the_same_alone_and_in_any_batch(server: Server) -> None:
    prompts = [prompt_of(5 + 3 * i, 100 + i) for i in range(12)]
    settings = [
        Sampling(max_new_tokens=8 + i, temperature=(1.0, 0.7, 1.3)[i % 3], seed=900 + i) for i in range(12)
    ]

    async def alone(client: EngineClient) -> list[Generation]:
        return [
            await client.generate(p, s, rid=f"alone{i}")
            for i, (p, s) in enumerate(zip(prompts, settings, strict=True))
        ]

    async def together(client: EngineClient) -> list[Generation]:
        order = np.random.default_rng(0).permutation(12)
        jobs = [client.generate(prompts[i], settings[i], rid=f"together{i}") for i in order]
        done = await asyncio.gather(*jobs)
        return [done[list(order).index(i)] for i in range(12)]

    first = server.use(alone)
    server.post("/flush_cache")
    second = server.use(together)
    for prompt, setting, one, other in zip(prompts, settings, first, second, strict=True):
        assert one.tokens_N.tolist() == other.tokens_N.tolist()
        for got in (one, other):
            server.assert_logprobs(got, prompt, setting.temperature)


def test_different_seeds_sample_differently(server: Server) -> None:
    prompt = prompt_of(10, 3)
    outputs = {
        tuple(server.generate(prompt, Sampling(max_new_tokens=8, seed=s)).tokens_N.tolist()) for s in range(4)
    }
    assert len(outputs) == 4


def test_the_next_turn_reuses_the_last_one(server: Server) -> None:
    server.post("/flush_cache")
    prompt = prompt_of(30, 4)
    first = server.generate(prompt, Sampling(max_new_tokens=10, seed=1, temperature=1.0))
    turn = [*prompt, *first.tokens_N.tolist(), *prompt_of(9, 5)]
    reused = server.generate(turn, Sampling(max_new_tokens=10, seed=2))
    # The last sampled token has no keys and values yet.
    assert reused.cached_tokens >= len(prompt) + len(first.tokens_N) - 1
    server.post("/flush_cache")
    fresh = server.generate(turn, Sampling(max_new_tokens=10, seed=2))
    assert fresh.cached_tokens == 0
    server.assert_same(fresh, reused, turn, 10)
    server.assert_logprobs(reused, turn)


def test_a_group_shares_the_prefill_of_its_prompt(server: Server) -> None:
    server.post("/flush_cache")
    prompt = prompt_of(60, 6)

    async def group(client: EngineClient) -> list[Generation]:
        jobs = [
            client.generate(prompt, Sampling(max_new_tokens=12, seed=i), rid=f"group{i}") for i in range(6)
        ]
        return await asyncio.gather(*jobs)

    done = server.use(group)
    if server.own:
        assert sorted(g.cached_tokens for g in done) == [0, 59, 59, 59, 59, 59]
    for g in done:
        server.assert_logprobs(g, prompt)


def test_more_requests_than_slots_all_finish(server: Server) -> None:
    prompts = [prompt_of(20, 200 + i) for i in range(30)]

    async def crowd(client: EngineClient) -> list[Generation]:
        jobs = [
            client.generate(p, Sampling(max_new_tokens=6, seed=i), rid=f"crowd{i}")
            for i, p in enumerate(prompts)
        ]
        return await asyncio.gather(*jobs)

    for prompt, g in zip(prompts, server.use(crowd), strict=True):
        server.assert_logprobs(g, prompt)


def test_stop_tokens_end_a_generation_and_belong_to_it(server: Server) -> None:
    prompt = prompt_of(10, 7)
    free = server.generate(prompt, Sampling(max_new_tokens=12, temperature=0.0))
    tokens = free.tokens_N.tolist()
    stop = tokens[len(tokens) // 2]
    got = server.generate(prompt, Sampling(max_new_tokens=12, temperature=0.0, stop_token_ids=(stop, 3)))
    assert got.finish_reason is FinishReason.STOP
    assert got.tokens_N.tolist() == tokens[: tokens.index(stop) + 1]


def test_the_length_limit_is_distinguished(server: Server) -> None:
    got = server.generate(prompt_of(10, 8), Sampling(max_new_tokens=1, seed=1, temperature=0.0))
    assert len(got.tokens_N) == 1
    assert got.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert got.finish_reason is FinishReason.LENGTH or got.tokens_N[-1] == EOS


@pytest.mark.parametrize(
    "truncation", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=["top_k", "top_p", "min_p"]
)
def test_full_truncation_is_greedy_with_the_whole_distributions_logprob(
    server: Server, truncation: dict[str, float]
) -> None:
    if "min_p" in truncation and not server.own:
        pytest.skip("SGLang 0.5.16 ends itself when a request has both a seed and min_p")
    prompt = prompt_of(10, 9)
    greedy = server.generate(prompt, Sampling(max_new_tokens=8, temperature=0.0))
    got = server.generate(prompt, Sampling(max_new_tokens=8, temperature=1.0, seed=4, **truncation))
    assert got.tokens_N.tolist() == greedy.tokens_N.tolist()
    server.assert_logprobs(got, prompt)


def test_a_list_of_prompts_is_answered_with_a_list(server: Server) -> None:
    prompts = [prompt_of(6, 10), prompt_of(9, 11)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        "return_logprob": True,
    }
    answers = server.post("/generate", body).json()
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [6, 9]
    for prompt, answer in zip(prompts, answers, strict=True):
        pairs = answer["meta_info"]["output_token_logprobs"]
        assert [p[1] for p in pairs] == answer["output_ids"]
        one = server.generate(prompt, Sampling(max_new_tokens=4, temperature=0.0))
        assert one.tokens_N.tolist() == answer["output_ids"]


def test_the_context_may_be_filled_but_not_exceeded(dense: Server) -> None:
    if not dense.own:
        pytest.skip("SGLang keeps a reserve of its own")
    prompt = prompt_of(dense.context - 3, 12)
    got = dense.generate(prompt, Sampling(max_new_tokens=3, seed=1))
    assert len(got.tokens_N) <= 3
    with pytest.raises(PromptTooLong, match="context length"):
        dense.generate(prompt, Sampling(max_new_tokens=4))


def test_a_prompt_beyond_the_context_is_too_long(dense: Server) -> None:
    with pytest.raises(PromptTooLong):
        dense.generate(prompt_of(dense.context + 5, 13), Sampling(max_new_tokens=1))


BAD_BODIES = [
    ({}, "input_ids"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [3, "x"]}, "integers"),
    ({"input_ids": [3, 10**7]}, "ids are 0"),
    ({"input_ids": [3, -1]}, "ids are 0"),
    ({"input_ids": [3], "sampling_params": {"temprature": 1}}, "temprature"),
    ({"input_ids": [3], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [3], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [3], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [3], "sampling_params": {"max_new_tokens": -2}}, "max_new_tokens"),
    ({"input_ids": [3], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
    ({"input_ids": [3], "sampling_params": {"n": 2}}, "n=2"),
    ({"input_ids": [3], "sampling_params": {"stop": "x"}}, "stop"),
    ({"input_ids": [3], "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
    ({"input_ids": [3], "sampling_params": 5}, "sampling_params"),
    ({"input_ids": [3], "stream": True}, "stream"),
    ({"input_ids": [3], "top_logprobs_num": 2}, "top_logprobs_num"),
    ({"input_ids": [3], "nonsense": 1}, "nonsense"),
    ({"input_ids": [3], "rid": 5}, "rid"),
    ({"text": "hello"}, "text"),
    ([1, 2], "object"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES, ids=[named for _, named in BAD_BODIES])
def test_malformed_requests_are_refused_by_name(dense: Server, body: object, named: str) -> None:
    if not dense.own:
        pytest.skip("SGLang words its refusals otherwise, and can do some of these")
    answer = dense.post("/generate", body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_a_body_that_is_not_json_is_refused(dense: Server) -> None:
    assert dense.post("/generate", raw=b'{"input_ids": [1,').status_code in (400, 422)


def test_the_key_is_needed(dense: Server) -> None:
    if dense.key is None:
        pytest.skip("the server has no key")
    for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/abort_request"):
        for key in (None, "wrong", "\xff", dense.key + "x"):
            assert dense.post(path, {}, key=key).status_code == 401
    assert dense.get("/health", key=None).status_code == 200

    async def stranger() -> None:
        client = EngineClient(dense.url, key="wrong", request_timeout_s=10)
        try:
            with pytest.raises(ConfigError, match="key"):
                await client.generate([1, 2], Sampling(max_new_tokens=1), rid="x")
        finally:
            await client.close()

    asyncio.run(stranger())


def test_the_server_answers_while_the_model_computes(dense: Server) -> None:
    async def both(client: EngineClient) -> tuple[int, int]:
        jobs = [
            asyncio.create_task(
                client.generate(prompt_of(100, 300 + i), Sampling(max_new_tokens=80, seed=i), rid=f"busy{i}")
            )
            for i in range(8)
        ]
        answers = 0
        while not all(j.done() for j in jobs):
            await client.health()
            answers += 1
            await asyncio.sleep(0.005)
        done = await asyncio.gather(*jobs)
        return answers, sum(len(g.tokens_N) for g in done)

    answers, tokens = dense.use(both)
    assert tokens > 0
    # A server that computes in its event loop would answer only once everything is done.
    assert answers >= 5
