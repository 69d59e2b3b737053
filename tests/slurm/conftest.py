"""Clusters that the tests of a module share, and what they ask of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing, running_cluster

ASKED_FOR = "ORHPC_SLURM_TESTS"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these out unless asked for: the suite as a whole has yet to be seen to pass in one go."""
    if os.environ.get(ASKED_FOR) == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"not yet run as one suite; {ASKED_FOR}=1 runs it"))


def _cluster(**settings: bool) -> Iterator[Cluster]:
    if problem := missing():
        reason = f"tests/slurm needs a cluster: {problem}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    # Short: Unix sockets have 107 characters.
    root = Path(tempfile.mkdtemp(prefix="orhpc-slurm-"))
    try:
        with running_cluster(root, **settings) as cluster:
            yield cluster
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster that sends user signals before a preemption."""
    yield from _cluster()


@pytest.fixture(scope="module")
def plain_cluster() -> Iterator[Cluster]:
    """A cluster that preempts with SIGTERM alone, and enforces memory limits."""
    yield from _cluster(user_signal=False, memory_limits=True)
