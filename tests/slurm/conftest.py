"""Clusters shared by the tests of a module: one at a time, because all use the same network and ports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orhpc.launch.slurm.features import SINCE
from tests.slurm.cluster import Cluster, can_limit_memory, leave_out, missing, release, running_cluster


def _cluster(**settings: bool) -> Iterator[Cluster]:
    if problem := missing():
        leave_out(f"tests/slurm needs a cluster: {problem}")
    if settings.get("expedited") and (release() or SINCE) < SINCE:
        pytest.skip("needs SLURM 25.11 or newer: bash tests/slurm/newest.sh")
    # A short path: Unix socket paths are limited to 107 characters.
    root = Path(tempfile.mkdtemp(prefix="orhpc-slurm-"))
    root.chmod(0o755)
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
    """A cluster that preempts only with SIGTERM, and enforces memory limits."""
    yield from _cluster(user_signal=False, memory_limits=can_limit_memory())


@pytest.fixture(scope="module")
def expediting_cluster() -> Iterator[Cluster]:
    """A cluster that requeues jobs ahead of the queue after a node failure."""
    yield from _cluster(expedited=True)


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder for the test's runs that all nodes share; the test's jobs are ended after it."""
    (name,) = {"cluster", "plain_cluster", "expediting_cluster"}.intersection(request.fixturenames)
    cluster: Cluster = request.getfixturevalue(name)
    folder = cluster.shared / request.node.name
    folder.mkdir()
    yield folder
    cluster.end_jobs()
