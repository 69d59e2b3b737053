"""Task order of a run: the task of the n-th prompt group depends only on task counts, weights and seed.

The data position of a run is therefore a single number, the id of the next group.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orhpc.errors import ConfigError
from orhpc.types import Task

_MIXED = 0.1
"""Share of an epoch by which a task is moved at most, if the easy ones come first."""


@dataclass(frozen=True, slots=True)
class TaskStream:
    """Tasks of one split of one environment."""

    environment: str
    split: str
    count: int
    """Number of tasks in the split, after any limit."""
    weight: float
    """Relative frequency of groups drawn from this stream."""
    easy_first: bool = False
    """Whether the first epoch goes roughly from the first task to the last."""
    indices: tuple[int, ...] | None = None
    """Indices in the split of the ``count`` tasks, in their order; None: the first ones."""


def streams(
    counts: Mapping[tuple[str, str], int],
    weights: Mapping[str, float],
    easy_first: Collection[str] = (),
    listed: Mapping[tuple[str, str], Sequence[int]] | None = None,
) -> list[TaskStream]:
    """One stream per ``(environment, split)``; splits share an environment's weight by task count.

    Args:
        counts: number of tasks.
        weights: of the environments.
        easy_first: environments whose first epoch goes from the first task to the last.
        listed: the indices of the tasks, where they are not the first ones.

    Raises:
        ConfigError: a split is empty.
    """
    totals: dict[str, int] = {}
    for (environment, split), count in counts.items():
        if count < 1:
            raise ConfigError(f"environments.{environment}.splits: {split!r} has no tasks")
        totals[environment] = totals.get(environment, 0) + count
    return [
        TaskStream(
            environment,
            split,
            count,
            weights[environment] * count / totals[environment],
            environment in easy_first,
            tuple(listed[environment, split]) if listed else None,
        )
        for (environment, split), count in sorted(counts.items())
    ]


class TaskSequence:
    """The infinite sequence of tasks of a run.

    After any number of groups, the number drawn from each stream differs from its exact share by at most
    one task; within a stream, each epoch is a new permutation.
    """

    def __init__(self, of: list[TaskStream], seed: int) -> None:
        self._streams = of
        self._seed = seed
        total = sum(s.weight for s in of)
        self._shares = [s.weight / total for s in of]
        # Of each group so far: numbers only, since a resumed run passes over all groups before its own.
        self._stream_of, self._index_of = array("H"), array("q")
        self._taken = [0] * len(of)
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}

    @property
    def environments(self) -> set[str]:
        """Names of the environments from which tasks are drawn."""
        return {stream.environment for stream in self._streams}

    def task(self, group_id: int) -> Task:
        """The task of a group; ids start at 0."""
        while len(self._stream_of) <= group_id:
            self._pick()
        stream = self._streams[self._stream_of[group_id]]
        index = self._index_of[group_id]
        if stream.indices is not None:
            index = stream.indices[index]
        return Task(stream.environment, stream.split, index)

    def _pick(self) -> None:
        due, chosen, furthest = len(self._stream_of) + 1, 0, -math.inf
        for number, share in enumerate(self._shares):
            behind = share * due - self._taken[number]
            if behind > furthest:
                chosen, furthest = number, behind
        stream, taken = self._streams[chosen], self._taken[chosen]
        self._taken[chosen] += 1
        epoch, place = divmod(taken, stream.count)
        order = self._orders.get((chosen, epoch))
        if order is None:
            generator = np.random.default_rng([self._seed, chosen, epoch])
            order = self._orders[chosen, epoch] = _order(stream, epoch, generator)
            self._orders.pop((chosen, epoch - 1), None)
        self._stream_of.append(chosen)
        self._index_of.append(int(order[place]))


def _order(stream: TaskStream, epoch: int, generator: np.random.Generator) -> NDArray[np.int64]:
    if epoch or not stream.easy_first:
        return generator.permutation(stream.count)
    # Neighbors in the sorted order differ by one, so no task overtakes one that is a tenth away.
    places = np.arange(stream.count) + generator.random(stream.count) * _MIXED * stream.count
    return np.argsort(places, kind="stable")
