"""Options and helpers of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("orhpc")
    group.addoption("--engine-url", help="run tests/protocol against this server instead of the cpu engine")
    group.addoption("--engine-key-file", help="file with the key of that server")
    group.addoption(
        "--engine-model", help="its model folder; without it, nothing is compared with transformers"
    )
    group.addoption("--engine-other", help="folder of other weights for it; without it, its weights stay")
    group.addoption("--engine-tolerance", default="1e-4", help="how far its log-probabilities may be off")
