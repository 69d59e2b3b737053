"""Long rollouts are trained on as often as short ones; and the simulation that shows it."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.heavy_tails import Engines, measure, simulated


def measured(placement: str = "colocated", **changes: object) -> dict[str, float]:
    return simulated(measure(placement, dict(changes), steps=40, groups=16, samples=8, slots=128, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_long_rollouts_are_trained_on_as_often_as_short_ones(placement: str) -> None:
    masked = measured(placement, max_staleness=2)
    again = measured(placement, max_staleness=2, stale_tokens="regenerate")
    assert masked["length_bias"] == pytest.approx(1, abs=0.06)
    assert again["length_bias"] < masked["length_bias"] - 0.06  # what masking is for
    assert masked["of_ideal"] > again["of_ideal"]
    assert masked["age_max"] <= 2


@pytest.mark.slow
def test_nothing_is_thrown_away_if_old_tokens_are_trained_on() -> None:
    everything = measured(max_staleness=2, stale_tokens="train")
    synchronous = measured()
    # Rollouts that are still in flight at the end have been generated and not trained on.
    assert everything["thrown_away"] < 0.05
    assert everything["of_ideal"] > 0.9 > 2 * synchronous["of_ideal"]
    assert everything["age_max"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_partial_rollouts_keep_what_oversampling_throws_away(placement: str) -> None:
    again = measured(placement, oversample=2)
    carried = measured(placement, oversample=2, partial=True, stale_tokens="train")
    masked = measured(placement, oversample=2, partial=True)
    assert again["thrown_away"] > 0.6
    assert carried["thrown_away"] < 0.06  # in flight at the end
    assert carried["of_ideal"] > 2 * again["of_ideal"]
    assert again["thrown_away"] > masked["thrown_away"]
    assert (again["age_max"], masked["age_max"]) == (0, 1)
    assert carried["length_bias"] == pytest.approx(1, abs=0.06)


@pytest.mark.slow
def test_the_trainers_devices_help_while_they_are_lent() -> None:
    changes = {"max_staleness": 4, "stale_tokens": "train"}
    alone, helped = measured("split", **changes), measured("mixed", **changes)
    assert helped["tokens_s"] > 1.15 * alone["tokens_s"]
    assert helped["thrown_away"] < 0.05
    assert helped["of_ideal"] <= 1.02


def test_the_simulated_engines_take_the_time_of_their_iterations() -> None:
    async def two() -> tuple[float, list[tuple[int, float]]]:
        engines, loop = Engines(slots=2), asyncio.get_running_loop()
        engines.resume()
        long, short = (
            asyncio.ensure_future(engines.generate(100)),
            asyncio.ensure_future(engines.generate(40)),
        )
        await short
        engines.pause()
        engines.publish(1)
        await asyncio.sleep(5)
        engines.resume()
        versions = await long
        return loop.time(), versions

    seconds, versions = simulated(two())
    assert seconds == pytest.approx(40 * (0.008 + 2 * 5e-5) + 5 + 60 * (0.008 + 5e-5), abs=1e-3)
    assert versions == [(0, pytest.approx(40)), (1, pytest.approx(60))]
