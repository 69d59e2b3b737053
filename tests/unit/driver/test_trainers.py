"""How long the driver waits for trainer ranks that start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.driver.fleet import trainers as module
from orhpc.driver.fleet.hang import UpdateLimit
from orhpc.driver.fleet.trainers import Trainers
from orhpc.errors import RayLost

LIMIT_S = 0.05


class Starting:
    """Rank 0, whose process needs several times the limit of a recovery to answer."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: Any) -> Any:
            await asyncio.sleep(6 * LIMIT_S)
            return {"meeting_file": "/dev/shm/meeting"}.get(name)

        return SimpleNamespace(remote=answer)


def test_a_rank_may_import_for_longer_than_a_recovery_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cold or busy filesystem."""
    monkeypatch.setattr(module, "RECOVERY_S", LIMIT_S)
    rank: Any = Starting()
    trainers = Trainers(lambda: [rank, rank], "127.0.0.1", UpdateLimit(None), None, one_node=True)
    asyncio.run(trainers._connect())
    assert trainers.ranks == [rank, rank]
    with pytest.raises(RayLost, match="no answer within"):
        asyncio.run(trainers._meeting(LIMIT_S))
