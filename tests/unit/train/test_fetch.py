"""Arrays of rollouts whose worker has died come from the run's buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import OwnerDiedError

from orhpc.errors import RayLost
from orhpc.rundir.record import write_rollouts
from orhpc.train import fetch
from orhpc.train.fetch import fetch_arrays
from orhpc.types import Location
from tests.unit.rundir.test_record import make_rollout


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The references that Ray was asked for; the owner of those named ``dead`` has died."""
    references: list[str] = []

    def get(reference: str, timeout: float) -> dict[str, Any]:
        references.append(reference)
        if reference.startswith("dead"):
            raise OwnerDiedError("0" * 56, "", "")
        return {"tokens_T": np.arange(3)}

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(fetch, "_files_first_until", 0.0)
    return references


def test_after_the_first_lost_object_files_are_read_at_once(tmp_path: Path, asked: list[str]) -> None:
    """Ray takes a second for each object that died with its owner; a step has thousands."""
    rollouts = [make_rollout(3, sample, 20) for sample in range(4)]
    write_rollouts(tmp_path / "group_3.h5", rollouts)
    for row, rollout in enumerate(rollouts):
        arrays = fetch_arrays(Location(file=str(tmp_path / "group_3.h5"), row=row, arrays=f"dead {row}"))
        np.testing.assert_array_equal(arrays["tokens_T"], rollout.tokens_T)
        np.testing.assert_array_equal(arrays["logprobs_T"], rollout.logprobs_T)
    assert asked == ["dead 0"]
    assert fetch_arrays(Location(arrays="alive"))["tokens_T"].tolist() == [0, 1, 2]  # it has no file


def test_a_living_worker_s_arrays_are_not_read_from_its_file(asked: list[str]) -> None:
    arrays = fetch_arrays(Location(file="/there/is/none.h5", row=0, arrays="alive"))
    assert arrays["tokens_T"].tolist() == [0, 1, 2]


def test_arrays_that_are_nowhere_are_lost(asked: list[str]) -> None:
    with pytest.raises(RayLost, match="gone from the object store"):
        fetch_arrays(Location(arrays="dead"))
