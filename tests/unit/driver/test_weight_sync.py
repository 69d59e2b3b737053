"""The driver describes a sync once to every rank, and knows afterwards which engines have failed in it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.config.engine import EngineSettings
from orhpc.driver.fleet.hang import UpdateLimit
from orhpc.driver.fleet.trainers import Trainers
from orhpc.driver.fleet.weight_sync import SYNCING, WeightSync
from orhpc.errors import InfraError, OrhpcError, RayLost, TrainerHangs, WeightSyncFailed
from orhpc.rollout.client import EngineClient, EnginePool
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.update_requests import SyncPlan, SyncReport, SyncSeconds

URLS = [f"http://10.0.0.{n}:80" for n in range(6)]
KEY = "the-key-of-the-engines"
WORLD = 4


class Answers:
    """Ranks that answer with these reports, or fail."""

    def __init__(self, failures: list[dict[str, str]], error: OrhpcError | None = None) -> None:
        self.ranks = [None] * WORLD
        self.plans: list[SyncPlan] = []
        self._failures, self._error = failures, error

    async def send_weights(self, plan: SyncPlan) -> list[SyncReport]:
        self.plans.append(plan)
        if self._error is not None:
            raise self._error
        return [
            SyncReport(100, SyncSeconds(gather=float(n)), failures)
            for n, failures in enumerate(self._failures)
        ]


def engines_of(
    pool: EnginePool, by_handle: dict[str, list[int]], by_broadcast: dict[str, int], **settings: Any
) -> Any:
    """Engines of one group that accept every call."""

    async def prepare_started() -> None: ...

    engine = EngineSettings(sync_timeout_s=9.0, **settings)
    return SimpleNamespace(
        pool=pool, by_handle=by_handle, by_broadcast=by_broadcast, group_name="group", key=KEY,
        prepare_started=prepare_started, config=SimpleNamespace(engine=engine),
    )  # fmt: skip


def sync(
    monkeypatch: pytest.MonkeyPatch,
    trainers: Any,
    down: list[str],
    *,
    sessions: bool = True,
    shared: bool = False,
    **settings: Any,
) -> tuple[EnginePool, list[str], dict[str, float]]:
    """Sync version 3; returns the pool, the versions that the engines were given, and the report.

    ``shared``: leave out the engines with dedicated devices.
    """
    versions: list[str] = []

    async def accepted(client: EngineClient, path: str, body: dict[str, Any]) -> None:
        if path == "/update_weight_version":
            versions.append(body["new_version"])

    monkeypatch.setattr(EngineClient, "_transfer", accepted)

    async def run() -> tuple[EnginePool, dict[str, float]]:
        pool = EnginePool(URLS, key=KEY, request_timeout_s=1, probes=False, target_only=True)
        for url in URLS:
            pool.client(url)._has_sessions = sessions
        for url in down:
            pool.mark_down(url, "it has ended")
        receiving = [url for url in URLS[2:] if url not in down and not shared]
        by_broadcast = {url: 1 + n for n, url in enumerate(receiving)}
        engines = engines_of(pool, {URLS[0]: [0, 1], URLS[1]: [2, 3]}, by_broadcast, **settings)
        try:
            return pool, await WeightSync(trainers, engines, Path("unused")).send(3)
        finally:
            trainers.pool = pool

    pool, report = asyncio.run(run())
    return pool, versions, report


@pytest.mark.parametrize("sessions", [True, False])
def test_the_plan_says_who_makes_which_requests(monkeypatch: pytest.MonkeyPatch, sessions: bool) -> None:
    trainers = Answers([{}] * WORLD)
    pool, versions, report = sync(monkeypatch, trainers, [], sessions=sessions)
    (sent,) = trainers.plans
    assert [(r.url, r.ranks, r.maps_memory) for r in sent.receivers] == [
        (URLS[0], (0, 1), True), (URLS[1], (2, 3), True),
        *((url, (rank,), False) for rank, url in enumerate(URLS[2:])),
    ]  # fmt: skip
    without = {"disable_draft_model": True}
    wanted = ({"selector": "target"},) * 2 if sessions else (without, {})
    assert (sent.receivers[0].fields, sent.receivers[2].fields) == wanted
    assert (sent.group_name, sent.timeout_s, sent.key) == ("group", 9.0, KEY)
    assert KEY not in repr(sent)
    assert report["sync_bytes"] == 100
    assert report["sync_seconds_gather"] == WORLD - 1
    assert {name for name in report if name.startswith("sync_seconds_")} >= {
        "sync_seconds_copy", "sync_seconds_engines", "sync_seconds_free",
    }  # fmt: skip
    assert set(versions) == {SYNCING, "3"}
    assert pool.published_version == 3


def test_ranks_know_the_experts_that_the_engine_rank_on_their_device_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainers = Answers([{}] * WORLD)
    own = {"tp": 2, "ep": 2, "sync_own_experts": True}
    sync(monkeypatch, trainers, [], shared=True, **own)
    sync(monkeypatch, trainers, [], **own)  # one broadcast is for all experts
    sync(monkeypatch, trainers, [], shared=True, tp=2, ep=2)
    sync(monkeypatch, trainers, [URLS[1]], shared=True, **own)  # an engine that is down changes no block
    blocks = ExpertBlocks(2, (0, 1, 0, 1))
    assert [plan.blocks for plan in trainers.plans] == [blocks, None, None, blocks]
    assert [receiver.url for receiver in trainers.plans[-1].receivers] == [URLS[0]]


def test_ranks_keep_what_they_sent_while_the_receivers_are_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have to allocate host memory for all weights again."""
    trainers = Answers([{}] * WORLD)
    sync(monkeypatch, trainers, [], delta_sync=True)
    sync(monkeypatch, trainers, [], delta_sync=True, shared=True)
    sync(monkeypatch, trainers, [])
    assert [plan.deltas for plan in trainers.plans] == [True, True, False]
    assert [plan.broadcasts for plan in trainers.plans] == [True, False, True]


def test_engines_that_are_down_are_left_out_and_the_others_spread_over_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainers = Answers([{}] * WORLD)
    sync(monkeypatch, trainers, [URLS[0], URLS[3], URLS[4]])
    assert [(r.url, r.ranks) for r in trainers.plans[0].receivers] == [
        (URLS[1], (2, 3)), (URLS[2], (0,)), (URLS[5], (2,)),
    ]  # fmt: skip


def test_an_engine_that_failed_is_down_and_no_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = Answers([{}, {URLS[1]: "engine 1: gone"}, {}, {URLS[4]: "engine 4 answered 500"}])
    with pytest.raises(WeightSyncFailed, match="version 3 failed: engine 1: gone; engine 4 answered 500"):
        sync(monkeypatch, trainers, [])
    pool: EnginePool = trainers.pool  # type: ignore[attr-defined]
    assert list(pool.down()) == [URLS[1], URLS[4]]
    assert pool.published_version is None


@pytest.mark.parametrize("error", [RayLost("the actor died"), InfraError("another rank failed")])
def test_a_rank_that_fails_is_the_trainers_failure(
    monkeypatch: pytest.MonkeyPatch, error: OrhpcError
) -> None:
    """To repeat the sync helps only after the trainers have been restarted."""
    with pytest.raises(type(error), match=str(error)):
        sync(monkeypatch, Answers([], error), [])


# --- ranks that hang ----------------------------------------------------------------------------------


class Actor:
    """A rank whose sync takes ``seconds``; ``progress``: how often a bucket is done in that time."""

    def __init__(self, seconds: float, progress_s: float) -> None:
        self._seconds, self._progress_s, self._began = seconds, progress_s, time.monotonic()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: Any) -> Any:
            if name == "send_weights":
                await asyncio.sleep(self._seconds)
                return SyncReport(1, SyncSeconds(), {})
            if name == "stacks":
                return 'File "orhpc/train/weights/sender.py", line 1'
            assert name == "sync_progress"
            self.asked += 1
            return int((time.monotonic() - self._began) / self._progress_s)

        bound: Any = SimpleNamespace(remote=answer)
        bound.options = lambda **_: bound
        return bound


def send(actor: Actor, timeout_s: float) -> list[SyncReport]:
    trainers = Trainers(lambda: [], "127.0.0.1", UpdateLimit(None), None, one_node=True)
    trainers.ranks = [actor]  # type: ignore[list-item]
    return asyncio.run(trainers.send_weights(SyncPlan((), "", timeout_s, KEY)))


@pytest.mark.slow
def test_ranks_that_get_no_further_hang() -> None:
    with pytest.raises(TrainerHangs, match=r"a bucket of the weight sync .* \(0.4 s.*busy: rank 0") as raised:
        send(Actor(60.0, progress_s=1000.0), timeout_s=0.2)
    assert "sender.py" in raised.value.stacks


@pytest.mark.slow
def test_a_long_sync_goes_on_while_buckets_are_done() -> None:
    actor = Actor(1.5, progress_s=0.1)
    assert send(actor, timeout_s=0.2) == [SyncReport(1, SyncSeconds(), {})]
    assert actor.asked > 2


def test_a_short_sync_costs_one_call_a_rank() -> None:
    actor = Actor(0.0, progress_s=1.0)
    send(actor, timeout_s=600.0)
    assert actor.asked == 0
