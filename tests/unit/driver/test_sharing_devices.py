"""The order in which trainers, engines and workers hand over devices that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.driver.runtime import Runtime


class Recorded:
    """Records the names of the methods that are called; each returns an empty list."""

    def __init__(self, who: str, calls: list[str], **attributes: Any) -> None:
        self.__dict__ |= attributes
        self._who, self._calls = who, calls

    def __getattr__(self, name: str) -> Any:
        async def method(*arguments: Any, **_: Any) -> list[Any]:
            called = arguments[0].__name__ if name in ("call", "all") else name
            self._calls.append(f"{self._who} {called}")
            return []

        return method


def order(overrides: list[str], *, dedicated: list[str], down: Sequence[int] = ()) -> list[str]:
    calls: list[str] = []
    config = load_config("configs/tiny.yaml", overrides)
    engines: Any = Recorded(
        "engines", calls, shared=["http://a"], dedicated=dedicated, down=list(down),
        needs_shared_devices=False,
    )  # fmt: skip
    trainers: Any = Recorded("trainers", calls)
    workers: Any = Recorded("worker", calls)
    anything: Any = None

    async def rollouts() -> None:
        calls.append("rollouts")

    runtime = Runtime(config, anything, trainers, engines, workers, *[anything] * 6)
    runtime._reported_down = set(down)
    asyncio.run(runtime.while_serving(rollouts))
    return calls


@pytest.mark.parametrize("carries", ["rollout.partial=true", "rollout.max_staleness=1"])
def test_workers_send_nothing_to_engines_that_sleep(carries: str) -> None:
    assert order([carries], dedicated=[]) == [
        "trainers sleep", "engines resume_serving", "worker resume", "rollouts", "engines watch",
        "trainers measure_engines", "worker pause", "engines await_starts", "engines release",
        "trainers wake",
    ]  # fmt: skip


@pytest.mark.parametrize(("overrides", "dedicated"), [([], []), (["rollout.partial=true"], ["http://b"])])
def test_workers_go_on_if_nothing_is_carried_over_or_other_engines_serve(
    overrides: list[str], dedicated: list[str]
) -> None:
    assert not [call for call in order(overrides, dedicated=dedicated) if call.startswith("worker")]


def test_what_engines_use_is_not_measured_while_one_of_them_is_down() -> None:
    assert "trainers measure_engines" in order([], dedicated=[])
    assert "trainers measure_engines" not in order([], dedicated=[], down=[0])
