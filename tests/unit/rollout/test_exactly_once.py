"""No prompt group is skipped, trained twice or chosen for its length, whatever interrupts the run.

The real producer and the real ledger, in the simulated time of ``benchmarks/heavy_tails.py``; the process is
killed at random places, and continues from a commit with what happens to be in the buffer.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.heavy_tails import MEDIAN_TOKENS, Engines, EngineWorker, lengths_of, simulated
from orhpc.config import RolloutSettings
from orhpc.driver.loop import note_fates
from orhpc.driver.memory_tries import SampleLimit
from orhpc.driver.state import State
from orhpc.errors import InfraError, RayLost, StopRequested
from orhpc.rollout.producer import Position, Producer, has_enough, is_stale
from orhpc.rollout.tasks import TaskSequence, TaskStream
from orhpc.rundir.prompt_ledger import PromptLedger, balance_of, read_lineage
from orhpc.types import GroupRequest, PromptGroup, RolloutEnd

UPDATE_S = 6.0


class Killed(Exception):
    """The process is gone."""


@dataclass
class Faults:
    """How often what happens."""

    seed: int
    killed: float = 0.0
    """Chance of each place of a step at which the process may be killed."""
    worker_lost: float = 0.0
    """Chance that a group's worker is lost."""
    failed: float = 0.0
    """Chance that a group's rollouts all fail."""
    unbuffered: float = 0.0
    """Chance that a finished group cannot be written to the buffer."""
    older_commit: float = 0.0
    """Chance that the newest commit is damaged, so that the run continues from the one before."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance


@dataclass
class Disk:
    """The part of a run directory that survives the process."""

    ledger: Path
    commits: list[tuple[int, Position]] = field(default_factory=lambda: [(0, Position())])
    buffer: dict[int, PromptGroup] = field(default_factory=dict)
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Groups by step of the lineage, apart from the ledger."""
    attempts: int = 0


class FaultyWorker(EngineWorker):
    """Writes finished groups to the buffer; loses some, and lets some fail."""

    def __init__(self, engines: Engines, disk: Disk, faults: Faults) -> None:
        super().__init__([engines], seed=3)
        self._disk, self._faults = disk, faults

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        if self._faults.happens(self._faults.worker_lost):
            raise RayLost("the worker is gone")
        group = await super().run_group(request)
        if self._faults.happens(self._faults.failed):
            lost = [replace(r, end=RolloutEnd.FAILED, reward=None, error="down") for r in group.rollouts]
            group = replace(group, rollouts=tuple(lost))
        if has_enough(group, 0.5) and not self._faults.happens(self._faults.unbuffered):
            self._disk.buffer[group.id] = group
        return group

    async def cancel(self, group_ids: Sequence[int]) -> None:
        for group in group_ids:
            self._disk.buffer.pop(group, None)


def resumed(disk: Disk, faults: Faults, of: RolloutSettings) -> tuple[int, Position, list[PromptGroup]]:
    """Choose a commit, and the buffered groups that are used: as orhpc.driver.bring_up does."""
    if len(disk.commits) > 1 and faults.happens(faults.older_commit):
        disk.commits.pop()
    version, position = disk.commits[-1]
    for group in list(disk.buffer.values()):
        wanted = group.id >= position.next_group or group.id in position.pending
        newest = max(v for r in group.rollouts for v, _ in r.version_tokens)
        if not wanted or newest > version or is_stale(group, version, of):
            del disk.buffer[group.id]
    return version, position, list(disk.buffer.values())


async def attempt(disk: Disk, faults: Faults, of: RolloutSettings, steps: int, *, every: int = 3) -> None:
    """Train from a commit to ``steps``, in the order of orhpc.driver.loop; raises Killed and others."""
    disk.attempts += 1
    version, position, finished = resumed(disk, faults, of)
    for step in [s for s in disk.trained if s > version]:
        del disk.trained[step]
    ledger = PromptLedger(disk.ledger, disk.attempts)
    ledger.start(version, position.next_group, position.pending)
    ledger.write()
    engines = Engines(slots=of.batch_size * of.n_samples)
    for older in range(version):
        engines.publish(older + 1)
    tasks = TaskSequence([TaskStream("e", "train", 10_000, 1.0)], seed=0)
    worker = FaultyWorker(engines, disk, faults)
    producer = Producer(of, tasks, [worker], seed=0, position=position, finished=finished)
    train = SimpleNamespace(replay_rollouts=None)
    run: Any = SimpleNamespace(ledger=ledger, config=SimpleNamespace(train=train))

    def perhaps_killed() -> None:
        if faults.happens(faults.killed):
            raise Killed

    def stop() -> bool:
        return faults.happens(faults.killed / 50)

    try:
        while version < steps:
            engines.resume()
            step_groups = await producer.collect(version, stop)
            await asyncio.sleep(UPDATE_S)
            perhaps_killed()
            version, position = version + 1, producer.position
            failed = faults.happens(faults.failed)
            note_fates(run, State(version, position), step_groups, SampleLimit(), skipped=failed)
            perhaps_killed()
            ledger.write()
            disk.trained[version] = [group.id for group in step_groups.groups]
            perhaps_killed()
            for group in [*step_groups.groups, *step_groups.dropped]:
                disk.buffer.pop(group.id, None)
            engines.publish(version)
            if version % every == 0 or version == steps:
                disk.commits.append((version, position))
    finally:
        buffer = dict(disk.buffer)
        await producer.cancel()
        disk.buffer = buffer  # a killed process removes nothing
        ledger.close()


async def whole_run(disk: Disk, faults: Faults, of: RolloutSettings, steps: int) -> None:
    """Start again until all steps are trained."""
    while disk.commits[-1][0] < steps:
        try:
            await attempt(disk, faults, of, steps)
        except (Killed, InfraError, StopRequested):
            continue


@pytest.fixture(scope="module", autouse=True)
def _no_power_failure() -> Iterator[None]:
    """Only processes are killed here, so nothing has to wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def settings_of(**changes: object) -> RolloutSettings:
    return RolloutSettings.model_validate(
        {"batch_size": 6, "n_samples": 2, "max_refills": 9, "max_response_tokens": 64 * MEDIAN_TOKENS,
         "max_total_tokens": 65 * MEDIAN_TOKENS, "failing_environment_after": 10_000} | changes
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    oversample=st.sampled_from([1.0, 1.5]),
    partial=st.booleans(),
    max_carried_steps=st.sampled_from([2, 32]),
    max_staleness=st.sampled_from([0, 1, 3]),
    stale_tokens=st.sampled_from(["mask", "train", "regenerate"]),
    killed=st.sampled_from([0.0, 0.05, 0.15]),
)
def test_no_task_is_skipped_and_none_is_trained_twice(
    tmp_path_factory: pytest.TempPathFactory, seed: int, killed: float, **changes: object
) -> None:
    disk = Disk(tmp_path_factory.mktemp("run") / "prompts.jsonl")
    faults = Faults(
        seed, killed, worker_lost=0.01, failed=0.05, unbuffered=0.2, older_commit=0.3 if killed else 0.0
    )
    simulated(whole_run(disk, faults, settings_of(**changes), steps=12))
    lineage = read_lineage(disk.ledger)
    balance = balance_of(lineage, disk.buffer)
    assert balance.problems == []
    assert (balance.step, sorted(lineage.steps)) == (12, list(range(1, 13)))
    # The same without the ledger.
    trained = [group for groups in disk.trained.values() for group in groups]
    assert len(trained) == len(set(trained))
    skipped = balance.dropped["update_skipped"]
    assert balance.trained == len(trained) - skipped
    _, position = disk.commits[-1]
    assert balance.started == position.next_group
    assert balance.waiting + balance.pending == len(position.pending)


def trained_lengths(folder: Path, faults: Faults, **changes: object) -> list[int]:
    """Lengths of all rollouts that a run of 100 steps trains on."""
    disk = Disk(folder / f"{faults.killed}.jsonl")
    of = settings_of(batch_size=8, n_samples=4, **changes)
    simulated(whole_run(disk, faults, of, steps=100))
    assert balance_of(read_lineage(disk.ledger), disk.buffer).problems == []
    trained = [group for groups in disk.trained.values() for group in groups]
    return [int(length) for group in trained for length in lengths_of(group, 4, 3)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    return trained_lengths(tmp_path_factory.mktemp("undisturbed"), Faults(1))


def p_value(sample: list[int], other: list[int], *, one_sided: bool = False) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test for large samples.

    ``one_sided``: against values of ``sample`` that are smaller (J. L. Hodges, The significance probability
    of the Smirnov two-sample test, Arkiv för Matematik 3, 1958, equation 5.3).
    """
    places = np.unique([*sample, *other])
    n, m = len(sample), len(other)
    above = np.searchsorted(np.sort(sample), places, "right") / n
    above -= np.searchsorted(np.sort(other), places, "right") / m
    z = math.sqrt(n * m / (n + m)) * float(max(0.0, above.max()) if one_sided else np.abs(above).max())
    if one_sided:
        larger, smaller = max(n, m), min(n, m)
        return math.exp(-2 * z * z - 2 * z * (larger + 2 * smaller) / math.sqrt(n * m * (n + m)) / 3)
    signs = np.array([1.0, -1.0] * 50)
    return float(np.clip(2 * (signs * np.exp(-2 * (z * np.arange(1, 101)) ** 2)).sum(), 0.0, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"oversample": 1.5},
        {"oversample": 2, "partial": True},
        {"max_staleness": 1},
        {"max_staleness": 3, "stale_tokens": "train"},
    ],
)
def test_lengths_of_an_interrupted_run_are_those_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: list[int], changes: dict[str, object]
) -> None:
    faults = Faults(2, killed=0.05, worker_lost=0.002, failed=0.02, unbuffered=0.1, older_commit=0.3)
    interrupted = trained_lengths(tmp_path, faults, **changes)
    # Most groups are the same in both, so the distributions differ less than those of independent samples.
    assert p_value(interrupted, undisturbed) > 0.5


@pytest.mark.slow
def test_the_comparison_of_lengths_notices_a_preference_for_short_ones(
    tmp_path: Path, undisturbed: list[int]
) -> None:
    biased = trained_lengths(tmp_path, Faults(2), max_staleness=2, stale_tokens="regenerate")
    assert p_value(biased, undisturbed, one_sided=True) < 0.02
