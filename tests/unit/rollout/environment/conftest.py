"""The OpenReward server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served import Served, serve
from tests.unit.rollout.environment.kit import Dialogue, Plain, WhoDunIt


@pytest.fixture
def served() -> Iterator[Served]:
    WhoDunIt.runs = {}
    WhoDunIt.release.clear()
    with serve(WhoDunIt, Plain, Dialogue) as running:
        yield running
        WhoDunIt.release.set()
