"""What an attempt that cannot start its parts means for the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orhpc.driver import attempt
from orhpc.driver.metrics import Phases
from orhpc.errors import EnvironmentUnavailable, OrhpcError, PreflightError
from tests.unit.driver.kit import make_run


@pytest.mark.parametrize(
    ("steps", "expected"), [(0, PreflightError), (7, EnvironmentUnavailable)], ids=["no step", "seven steps"]
)
def test_an_environment_that_is_away_ends_only_a_run_that_it_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, expected: type[OrhpcError]
) -> None:
    """A run may have made steps of which none is committed yet: copies in memory hold them."""
    run = make_run(tmp_path)
    for step in range(1, steps + 1):
        run.events.write("step", step=step, steps=9, seconds=1.0, phases={})
    assert run.rundir.lineage() == []

    async def away(*_: Any) -> Any:
        raise EnvironmentUnavailable("e: no answer")

    monkeypatch.setattr(attempt, "bring_up", away)
    with pytest.raises(expected):
        asyncio.run(attempt._bring_up(run, None, Phases()))
