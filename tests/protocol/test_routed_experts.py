"""Routed experts: equal to those of a forward pass, recorded once, and only the requested rows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from orhpc.errors import ConfigError
from orhpc.rollout.client import EngineClient
from orhpc.types import Generation, Sampling
from orhpc.wire.routes import RouteLog

from .conftest import Server, get_going, prompt_of


def test_routes_are_those_of_a_forward_pass(moe: Server) -> None:
    prompt = prompt_of(30, 50)
    got = moe.generate(prompt, Sampling(max_new_tokens=12, seed=1), routes_start=0)
    whole = [*prompt, *got.tokens_N.tolist()]
    assert got.routes is not None
    assert got.routes.dtype == np.uint8
    assert got.routes.shape[0] == len(whole) - 1
    if moe.reference().model.config.mlp_only_layers:
        assert got.routes[:, 0].max() == 0, "the first layer is dense"
    moe.assert_routes(got.routes, whole)


def test_only_the_requested_rows_are_returned(moe: Server) -> None:
    prompt = prompt_of(30, 51)
    sampling = Sampling(max_new_tokens=6, seed=1)
    got = moe.generate(prompt, sampling, routes_start=0)
    rest = moe.generate(prompt, sampling, routes_start=25).routes
    assert got.routes is not None and rest is not None
    assert rest.shape == got.routes[25:].shape
    if moe.own:
        np.testing.assert_array_equal(rest, got.routes[25:])
    else:  # the second prefill reused the first one's cache: split and rounding differ
        moe.assert_routes(np.concatenate([got.routes[:25], rest]), [*prompt, *got.tokens_N.tolist()])
    assert moe.generate(prompt, sampling, routes_start=None).routes is None


def test_turns_add_up_to_the_whole(moe: Server) -> None:
    moe.post("/flush_cache")
    log = RouteLog()
    context = prompt_of(20, 52)
    for turn in range(3):
        got = moe.generate(context, Sampling(max_new_tokens=6, seed=turn), routes_start=log.rows)
        assert got.routes is not None
        log.append(got.routes, got.routes_start)
        context = [*context, *got.tokens_N.tolist()]
        assert log.rows == len(context) - 1
        context += prompt_of(5, 60 + turn)
    whole = log.array()
    assert whole is not None
    moe.assert_routes(whole, context)


def test_a_group_that_shares_a_prefill_has_all_rows(moe: Server) -> None:
    moe.post("/flush_cache")
    prompt = prompt_of(40, 53)

    async def group(client: EngineClient) -> list[Generation]:
        jobs = [
            client.generate(prompt, Sampling(max_new_tokens=6, seed=i), rid=f"g{i}", routes_start=0)
            for i in range(4)
        ]
        return await asyncio.gather(*jobs)

    for got in moe.use(group):
        whole = [*prompt, *got.tokens_N.tolist()]
        assert got.routes is not None and len(got.routes) == len(whole) - 1
        moe.assert_routes(got.routes, whole)


def test_rows_recorded_before_a_retraction_stay(moe: Server) -> None:
    if not moe.own:
        pytest.skip("changes weights; only on an engine of our own")
    prompt = prompt_of(24, 54)

    async def run(client: EngineClient) -> Generation:
        job = asyncio.create_task(
            client.generate(prompt, Sampling(max_new_tokens=120, seed=2), rid="retracted", routes_start=0)
        )
        await get_going(client, 1)
        await client.pause_generation("retract")
        await client.update_weights_from_disk(str(moe.other), weight_version="1")
        await client.continue_generation()
        return await job

    try:
        got = moe.use(run)
        whole = [*prompt, *got.tokens_N.tolist()]
        assert got.routes is not None and len(got.routes) == len(whole) - 1
        old = np.sort(moe.reference().routing(whole[:-1]).experts_TLK, -1)
        same = (np.sort(got.routes, -1) == old).all(axis=(1, 2))
        # The prompt was computed with the old weights, the end with the new ones.
        assert same[: len(prompt)].all()
        assert not same[-5:].all()
    finally:
        moe.repair()


def test_an_aborted_request_keeps_its_rows(moe: Server) -> None:
    prompt = prompt_of(24, 55)
    before = moe.generate(prompt, Sampling(max_new_tokens=1)).routes

    async def run(client: EngineClient) -> Generation:
        job = asyncio.create_task(
            client.generate(prompt, Sampling(max_new_tokens=150, seed=3), rid="cut", routes_start=10)
        )
        await get_going(client, 1)
        await client.abort_request("cut")
        return await job

    got = moe.use(run)
    assert len(got.tokens_N)
    assert before is not None and got.routes is not None
    whole = [*prompt, *got.tokens_N.tolist()]
    assert got.routes_start == 10 and len(got.routes) == len(whole) - 1 - 10
    moe.assert_routes(np.concatenate([before[:10], got.routes]), whole)


def test_a_start_beyond_the_prompt_is_refused(moe: Server) -> None:
    with pytest.raises(ConfigError, match=r"beyond the prompt|higher than the"):
        moe.generate([3, 4, 5], Sampling(max_new_tokens=1), routes_start=4)


def test_a_dense_server_refuses_routes(dense: Server) -> None:
    if dense.moe:
        pytest.skip("the server has routes")
    body = {"input_ids": [3], "return_routed_experts": True, "sampling_params": {"max_new_tokens": 1}}
    answer = dense.post("/generate", body)
    if dense.own or answer.status_code != 200:
        assert answer.status_code == 400
    else:  # SGLang 0.5.16 answers without routes, which the client reports as RoutesMissing
        assert not answer.json()["meta_info"].get("routed_experts")
