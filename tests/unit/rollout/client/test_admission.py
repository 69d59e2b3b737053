"""Requests wait for a place in the order in which their rollouts came."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config.files import load_config
from orhpc.rollout.client import EnginePool
from orhpc.rollout.client.admission import Admission
from orhpc.rollout.worker import max_in_flight
from orhpc.types import FinishReason, Generation, Sampling


def test_the_oldest_rollout_goes_first_even_if_it_asks_last() -> None:
    order: list[str] = []

    async def request(admission: Admission, name: str) -> None:
        async with admission.place(name):
            order.append(name)
            await asyncio.sleep(0)

    async def run() -> None:
        admission = Admission(1)
        await request(admission, "old")
        async with admission.place("other"):
            waiting = [asyncio.ensure_future(request(admission, name)) for name in ("new", "newer", "old")]
            await asyncio.sleep(0)
            order.clear()
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert order == ["old", "new", "newer"]


def test_a_pause_gives_no_place_and_keeps_the_order() -> None:
    order: list[str] = []

    async def request(admission: Admission, name: str) -> None:
        async with admission.place(name):
            order.append(name)

    async def run() -> None:
        admission = Admission(2)
        await request(admission, "old")
        async with admission.place("held"):
            admission.pause()
        waiting = [asyncio.ensure_future(request(admission, name)) for name in ("new", "newer", "old")]
        waiting[1].cancel()
        await asyncio.sleep(0.01)
        assert order == ["old"]
        admission.resume()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())
    assert order == ["old", "old", "new"]


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(" cpr")), min_size=1, max_size=40
    ),
)
def test_places_are_never_exceeded_nor_lost(places: int, requests: list[tuple[int, int, str]]) -> None:
    """Also if requests are cancelled, and places are withheld, at any moment."""
    inside = most = 0

    async def request(admission: Admission, rollout: int, turns: int) -> None:
        nonlocal inside, most
        async with admission.place(str(rollout)):
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    async def run() -> None:
        admission = Admission(places)
        running: list[asyncio.Task[None]] = []
        for rollout, turns, what in requests:
            running.append(asyncio.ensure_future(request(admission, rollout, turns)))
            await asyncio.sleep(0)
            if what == "c":
                running[len(running) // 2].cancel()
            elif what == "p":
                admission.pause()
            elif what == "r":
                admission.resume()
        admission.resume()
        await asyncio.gather(*running, return_exceptions=True)
        assert inside == 0
        # All places are free again: as many requests as places get in at once.
        again = [asyncio.ensure_future(request(admission, 9, 3)) for _ in range(places)]
        await asyncio.sleep(0)
        assert inside == places
        await asyncio.gather(*again)

    asyncio.run(run())
    assert most <= places


@pytest.mark.parametrize(("engines", "running", "expected"), [(1, 256, 80), (4, 256, 320), (1, 1, 1)])
def test_workers_together_keep_the_engines_full(engines: int, running: int, expected: int) -> None:
    config = load_config("configs/gpu-smollm2.yaml", [f"engine.max_running={running}"])
    assert max_in_flight(config, engines, workers=4) == expected


@pytest.mark.parametrize("waits_for", ["resume", "engine"])
def test_a_request_that_waits_at_a_stop_is_answered_as_aborted(waits_for: str) -> None:
    async def run() -> Generation:
        async with EnginePool(
            ["http://127.0.0.1:1"], key="k", request_timeout_s=5, max_in_flight=2, probes=False
        ) as pool:
            if waits_for == "resume":
                pool.pause()
            else:
                pool.mark_down("http://127.0.0.1:1", "it has ended")
            waiting = asyncio.ensure_future(
                pool.generate([1, 2, 3], Sampling(max_new_tokens=4), rid="r", affinity="a")
            )
            await asyncio.sleep(0.01)
            assert not waiting.done()
            await pool.abort_for_good(1.0)  # the engine is not there
            return await asyncio.wait_for(waiting, 1.0)

    generation = asyncio.run(run())
    assert (generation.finish_reason, len(generation.tokens_N)) == (FinishReason.ABORT, 0)
