"""A trainer rank fails in the step for which it was armed, as a real one does, and not afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orhpc.errors import NonFinite, OutOfMemory
from orhpc.train.actor import TrainerRank
from orhpc.train.fault_injection import FaultyTrainerRank
from tests.trainer_kit import plan as plan_of

KINDS = {"nan_gradient": NonFinite, "trainer_oom": OutOfMemory}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_armed_step_fails_and_the_next_succeeds(kind: str, make: Callable[..., TrainerRank]) -> None:
    rank = make()
    rank.__class__ = FaultyTrainerRank  # the driver chooses the class before it starts a rank
    assert isinstance(rank, FaultyTrainerRank)
    plan = plan_of(0)
    rank.arm(kind)
    with pytest.raises(KINDS[kind]):
        rank.step(plan, step=0)
    assert rank.holds_whole_step()
    assert rank.step(plan, step=0)["grad_norm"] > 0
