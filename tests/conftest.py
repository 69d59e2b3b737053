"""Options and helpers of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.frozen import freeze_libraries

# Hypothesis' deadline measures the load of the machine, not the code.
settings.register_profile("orhpc", deadline=None)
settings.load_profile("orhpc")

_OF_THE_PROCESS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ORHPC_ACCESS")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore what a trainer rank or a command in the test's own process sets for good."""
    before = {name: os.environ.get(name) for name in _OF_THE_PROCESS}
    umask = os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which every test is left out."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None


def pytest_collection_finish() -> None:
    """Spare each collection of garbage the modules that all tests have imported."""
    freeze_libraries()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("orhpc")
    group.addoption("--engine-url", help="run tests/protocol against this server instead of the cpu engine")
    group.addoption("--engine-key-file", help="file with the key of that server")
    group.addoption(
        "--engine-model", help="its model folder; without it, nothing is compared with transformers"
    )
    group.addoption("--engine-other", help="folder of other weights for it; without it, its weights stay")
    group.addoption("--engine-tolerance", default="1e-4", help="how far its log-probabilities may be off")
    group.addoption(
        "--engine-router-margin",
        default="1e-5",
        help="how much better, in a router's logits, an expert may be that it did not take",
    )
