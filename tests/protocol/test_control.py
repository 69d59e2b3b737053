"""Abort, pause, flush, release and resume."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orhpc.errors import EngineUnavailable
from orhpc.rollout.client import EngineClient
from orhpc.types import FinishReason, Generation, Sampling

from .conftest import Server, get_going, prompt_of

LONG = 150
"""Number of tokens of a generation that is still running when the test acts."""


def prompts(count: int) -> list[list[int]]:
    return [prompt_of(20, 400 + i) for i in range(count)]


async def while_generating(
    client: EngineClient, count: int, act: Callable[[], Awaitable[None]]
) -> list[Generation]:
    """Start generations, act once they are running, and return their answers."""
    jobs = [
        asyncio.create_task(client.generate(p, Sampling(max_new_tokens=LONG, seed=i), rid=f"long{i}"))
        for i, p in enumerate(prompts(count))
    ]
    await get_going(client, count)
    await act()
    return await asyncio.gather(*jobs)


def full(server: Server, count: int) -> list[Generation]:
    """The answers to the same generations without interruption."""

    async def run(client: EngineClient) -> list[Generation]:
        return [
            await client.generate(p, Sampling(max_new_tokens=LONG, seed=i), rid=f"full{i}")
            for i, p in enumerate(prompts(count))
        ]

    return server.use(run)


def assert_prefixes(server: Server, got: list[Generation], whole: list[Generation]) -> None:
    for i, (part, all_of_it) in enumerate(zip(got, whole, strict=True)):
        tokens = part.tokens_N.tolist()
        assert tokens
        if server.own:  # see Server.assert_same
            assert tokens == all_of_it.tokens_N.tolist()[: len(tokens)]
        server.assert_logprobs(part, prompts(4)[i])


def test_an_aborted_request_returns_its_prefix(dense: Server) -> None:
    whole = full(dense, 2)

    async def abort(client: EngineClient) -> list[Generation]:
        return await while_generating(client, 2, lambda: client.abort_request("long0"))

    got = dense.use(abort)
    assert got[0].finish_reason is FinishReason.ABORT
    assert len(got[0].tokens_N) < len(whole[0].tokens_N)
    dense.assert_same(got[1], whole[1], prompts(2)[1], LONG)
    assert_prefixes(dense, got, whole)


def test_abort_all(dense: Server) -> None:
    async def abort(client: EngineClient) -> list[Generation]:
        return await while_generating(client, 4, lambda: client.abort_request(abort_all=True))

    got = dense.use(abort)
    assert [g.finish_reason for g in got] == [FinishReason.ABORT] * 4
    assert_prefixes(dense, got, full(dense, 4))


def test_pause_abort_ends_requests_and_holds_new_ones(dense: Server) -> None:
    async def run(client: EngineClient) -> list[Generation]:
        got = await while_generating(client, 3, lambda: client.pause_generation("abort"))
        late = asyncio.create_task(client.generate([5, 6, 7], Sampling(max_new_tokens=2, seed=1), rid="late"))
        await asyncio.sleep(0.3)
        assert not late.done()
        await client.continue_generation()
        await asyncio.wait_for(late, 30)
        return got

    got = dense.use(run)
    assert {g.finish_reason for g in got} == {FinishReason.ABORT}
    assert_prefixes(dense, got, full(dense, 3))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_can_leave_no_trace(dense: Server, mode: str) -> None:
    whole = full(dense, 3)

    async def run(client: EngineClient) -> list[Generation]:
        async def interrupt() -> None:
            await client.pause_generation(mode)
            await asyncio.sleep(0.2)
            if mode == "retract" and dense.own:  # SGLang 0.5.16 also waits for the retracted requests
                await client.flush_cache()
            await client.continue_generation()

        return await while_generating(client, 3, interrupt)

    got = dense.use(run)
    for prompt, one, other in zip(prompts(3), got, whole, strict=True):
        dense.assert_same(one, other, prompt, LONG)


def test_a_cache_in_use_is_not_flushed(dense: Server) -> None:
    async def run(client: EngineClient) -> int:
        status = 0

        async def flush() -> None:
            nonlocal status
            await client.pause_generation("in_place")
            status = (await asyncio.to_thread(dense.post, "/flush_cache")).status_code
            await client.abort_request(abort_all=True)
            await client.continue_generation()

        await while_generating(client, 2, flush)
        return status

    assert dense.use(run) == 400
    assert dense.post("/flush_cache").status_code == 200


def test_an_unknown_pause_mode_is_refused(dense: Server) -> None:
    assert dense.post("/pause_generation", {"mode": "sometimes"}).status_code in (400, 422)
    assert dense.generate([3, 4], Sampling(max_new_tokens=1, seed=0)).prompt_tokens == 2


def test_a_client_that_goes_away_frees_its_slot(dense: Server) -> None:
    if not dense.own:
        pytest.skip("reads the cpu engine's queue")

    async def run(client: EngineClient) -> None:
        job = asyncio.create_task(client.generate([9] * 20, Sampling(max_new_tokens=LONG), rid="gone"))
        await asyncio.sleep(0.05)
        job.cancel()
        for _ in range(200):
            state = (await client.server_info())["internal_states"][0]
            if state["num_running_reqs"] == state["num_waiting_reqs"] == 0:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the request is still running")

    dense.use(run)


def test_released_memory_serves_again_after_a_sync(ours: Server) -> None:
    prompt = prompt_of(20, 20)
    before = ours.generate(prompt, Sampling(max_new_tokens=8, seed=3))

    async def cycle(client: EngineClient) -> None:
        await client.pause_generation("abort")
        await client.release_memory_occupation(["kv_cache", "weights"])
        await client.continue_generation()
        await client.health()
        with pytest.raises(EngineUnavailable, match="released"):
            await client.generate(prompt, Sampling(max_new_tokens=1), rid="asleep")
        await client.resume_memory_occupation(["weights"])
        with pytest.raises(EngineUnavailable):
            await client.generate(prompt, Sampling(max_new_tokens=1), rid="half awake")
        await client.resume_memory_occupation(["kv_cache"])
        with pytest.raises(EngineUnavailable, match="complete update"):
            await client.generate(prompt, Sampling(max_new_tokens=1), rid="without weights")
        await client.update_weights_from_disk(str(ours.folder), weight_version="4")

    ours.use(cycle)
    after = ours.generate(prompt, Sampling(max_new_tokens=8, seed=3))
    assert after.tokens_N.tolist() == before.tokens_N.tolist()
    assert (before.version, after.version) == (0, 4)


def test_the_cache_alone_can_be_released(mutable: Server) -> None:
    async def cycle(client: EngineClient) -> None:
        await client.release_memory_occupation(["kv_cache"])
        await client.resume_memory_occupation(["kv_cache"])

    prompt = prompt_of(20, 21)
    before = mutable.generate(prompt, Sampling(max_new_tokens=8, seed=3))
    mutable.use(cycle)
    after = mutable.generate(prompt, Sampling(max_new_tokens=8, seed=3))
    assert after.cached_tokens == 0
    mutable.assert_same(after, before, prompt, 8)


def test_memory_in_use_is_not_released(dense: Server) -> None:
    if not dense.own:
        pytest.skip("SGLang asserts")

    async def run(client: EngineClient) -> int:
        status = 0

        async def release() -> None:
            nonlocal status
            await client.pause_generation("in_place")
            status = (await asyncio.to_thread(dense.post, "/release_memory_occupation")).status_code
            await client.abort_request(abort_all=True)
            await client.continue_generation()

        await while_generating(client, 1, release)
        return status

    assert dense.use(run) == 400
    assert dense.post("/release_memory_occupation", {"tags": ["soul"]}).status_code == 400


def test_information_and_health(dense: Server) -> None:
    async def run(client: EngineClient) -> None:
        await client.health()
        await client.health_generate()
        assert "weight_version" in await client.server_info()
        assert "model_path" in await client.model_info()

    dense.use(run)
