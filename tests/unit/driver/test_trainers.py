"""How long the driver waits for trainer ranks that start, and what they recompute."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.config import Config
from orhpc.driver.bring_up import trainer_config
from orhpc.driver.fleet import trainers as module
from orhpc.driver.fleet.hang import UpdateLimit
from orhpc.driver.fleet.trainers import Trainers
from orhpc.errors import RayLost, TrainerHangs
from tests.model_configs import REAL
from tests.model_folder import write_model_folder

LIMIT_S = 0.05


class Starting:
    """Rank 0, whose process needs several times the limit of a recovery to answer."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: Any) -> Any:
            await asyncio.sleep(6 * LIMIT_S)
            return {"meeting_file": "/dev/shm/meeting"}.get(name)

        return SimpleNamespace(remote=answer)


@pytest.mark.slow
def test_a_rank_may_import_for_longer_than_a_recovery_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cold or busy filesystem."""
    monkeypatch.setattr(module, "RECOVERY_S", LIMIT_S)
    rank: Any = Starting()
    trainers = Trainers(lambda: [rank, rank], "127.0.0.1", UpdateLimit(None), None, one_node=True)
    asyncio.run(trainers._connect())
    assert trainers.ranks == [rank, rank]
    with pytest.raises(RayLost, match="no answer within"):
        asyncio.run(trainers._meeting(LIMIT_S))


@pytest.mark.slow
def test_an_update_that_hangs_is_found_after_a_stop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs does not stop, and the job must commit before it is killed."""
    asked: list[bool] = []

    async def request_stop() -> None:
        asked.append(True)

    async def hangs(*_: Any, **__: Any) -> list[Any]:
        await asyncio.sleep(60)
        return []

    async def report(*_: Any) -> Any:
        return SimpleNamespace(line="no answer from rank 1", text=lambda message: "")

    control = SimpleNamespace(remote=request_stop)
    rank: Any = SimpleNamespace(request_stop=SimpleNamespace(options=lambda **_: control))
    trainers = Trainers(lambda: [rank, rank], "127.0.0.1", UpdateLimit(0.5), None, one_node=True)
    trainers.ranks = [rank, rank]
    monkeypatch.setattr(module.ray, "put", lambda value: value)
    monkeypatch.setattr(module.hang, "report", report)
    monkeypatch.setattr(trainers, "all", hangs)
    plan: Any = SimpleNamespace(tokens=10, minibatches=())

    async def step() -> None:
        await asyncio.wait_for(trainers.step(plan, step=1, stop=lambda: True), 20)

    with pytest.raises(TrainerHangs, match="no answer from rank 1"):
        asyncio.run(step())
    assert asked == [True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_recovery_in_place_leaves_the_engines_group(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast in it may have failed for lack of memory, of a single rank as well."""
    calls: list[str] = []

    async def answers(_: float, method: Any, *__: Any) -> list[bool]:
        calls.append(method.__name__)
        return [True] * ranks

    async def nothing(*_: Any) -> int:
        return 0

    rank: Any = SimpleNamespace()
    trainers = Trainers(lambda: [rank] * ranks, "127.0.0.1", UpdateLimit(None), None, one_node=True)
    trainers.ranks = [rank] * ranks
    monkeypatch.setattr(trainers, "all_within", answers)
    monkeypatch.setattr(trainers, "_abandon_collectives", nothing)
    monkeypatch.setattr(trainers, "_meeting", nothing)
    assert asyncio.run(trainers.recover())
    several = ["leave_groups", "rejoin", "recover"]
    assert calls == (["leave_weight_group", "recover"] if ranks == 1 else several)


@pytest.mark.slow
def test_the_time_of_a_suspension_is_no_time_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``scontrol suspend``: the clock goes on, and no rank hangs."""
    clock = SimpleNamespace(now=0.0)

    def monotonic() -> float:
        clock.now += 0.01
        return clock.now

    async def suspended(*_: Any, **__: Any) -> list[Any]:
        await asyncio.sleep(0.3)
        clock.now += 10_000.0
        await asyncio.sleep(0.3)
        return [{"loss": 1.0}]

    limit = UpdateLimit(5.0)
    trainers = Trainers(lambda: [], "127.0.0.1", limit, None, one_node=True)
    trainers.ranks = [SimpleNamespace()]  # type: ignore[list-item]
    noted: list[float] = []
    monkeypatch.setattr(limit, "note", lambda tokens, seconds: noted.append(seconds))
    monkeypatch.setattr(module.ray, "put", lambda value: value)
    monkeypatch.setattr(module.hang, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(trainers, "all", suspended)
    plan: Any = SimpleNamespace(tokens=10, minibatches=())
    assert asyncio.run(trainers.step(plan, step=1)) == {"loss": 1.0}
    assert 0.0 < noted[0] < 5.0


def test_a_rank_that_never_answers_a_short_call_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.sleep(60)

    rank: Any = SimpleNamespace(wake=SimpleNamespace(remote=never))
    monkeypatch.setattr(module, "COLLECTIVE_TIMEOUT_S", 0.1)
    trainers = Trainers(
        lambda: [rank], "127.0.0.1", UpdateLimit(None), None, one_node=True, save_timeout_s=0.1
    )
    trainers.ranks = [rank]
    with pytest.raises(RayLost, match="trainer wake 0: no answer within"):
        asyncio.run(trainers.all(module.TrainerRank.wake))


@pytest.mark.parametrize(
    ("device", "model", "told"),
    [
        ("cuda", "Qwen3-8B", "full, the first LAYERS layers (70 GiB a device, placement.device_memory_gib)"),
        ("cpu", "Qwen3-8B", "full (devices are processes)"),
        ("cuda", None, "full, because the memory cannot be planned: "),
    ],
)
def test_what_is_recomputed_automatically_is_in_the_log(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    device: str,
    model: str | None,
    told: str,
) -> None:
    content = {"model_type": "other"} if model is None else REAL[model][0]
    tree = {
        "environments": {"none": {"url": "http://127.0.0.1:9"}},
        "rollout": {"max_total_tokens": 8192},
        "train": {"backend": "fsdp", "gradient_checkpointing": "auto"},
        "placement": {"device": device, "device_memory_gib": 70},
        "engine": {"backend": "cpu" if device == "cpu" else "sglang"},
    }
    folder = write_model_folder(tmp_path / "model", content)
    with caplog.at_level(logging.INFO):
        train = trainer_config(Config.model_validate(tree), str(folder)).train
    assert train.gradient_checkpointing
    assert (train.recompute_layers is not None) == ("LAYERS" in told)
    assert f"recomputation: {told.replace('LAYERS', str(train.recompute_layers))}" in caplog.text


def test_a_choice_of_the_user_is_not_told_as_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {
        "environments": {"none": {"url": "http://127.0.0.1:9"}},
        "train": {"backend": "fsdp", "gradient_checkpointing": False},
        "placement": {"device_memory_gib": 70},
    }
    folder = write_model_folder(tmp_path / "model", {"model_type": "other"})
    with caplog.at_level(logging.INFO):
        trainer_config(Config.model_validate(tree), str(folder))
    assert "weights are gathered for every micro-batch, because the memory cannot be planned" in caplog.text
    assert "recomputation" not in caplog.text
