"""Rollout scheduling with heavy-tailed lengths, in simulated time: the real producer, modelled engines.

    python benchmarks/heavy_tails.py [--steps 60] [--groups 32] [--samples 8] [--only partial] [--out FILE]

Response lengths are lognormal with p99 / p50 = 8, the same for a task in all rows.  Every rollout in flight
gets one token per decoding iteration, which takes ``BASE_S + n * PER_ROLLOUT_S`` with n rollouts (the two
constants are of a mixture of 30 billion parameters on four H200, benchmarks/RESULTS.md).  An update takes
``UPDATE_S`` per token.  In ``colocated`` placement engines stand still during it; in ``split`` they generate.
In ``mixed`` placement the trainers' devices are lent: as many slots again generate on them, but not during an
update, for which their rollouts move to the other engines.

Columns: trained tokens per second relative to the ideal, in which every slot of the engines is always used
and no token is thrown away; share of slots that are empty while engines may generate; share of the generated
tokens that are not trained on; mean and largest age of the trained tokens in policy versions; mean length of
the trained rollouts relative to the mean of all tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import heapq
import itertools
import logging
import math
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from orhpc.config import RolloutSettings
from orhpc.rollout.producer import Producer
from orhpc.rollout.tasks import TaskSequence, TaskStream
from orhpc.types import GroupRequest, Location, PromptGroup, RolloutEnd, RolloutSummary

T = TypeVar("T")

BASE_S = 0.008
PER_ROLLOUT_S = 5e-5
UPDATE_S = 5e-5
MEDIAN_TOKENS = 400
SIGMA = math.log(8) / 2.3263  # of the lognormal distribution: p99 / p50 = 8
TASKS = 100_000
ALL = {"stale_tokens": "train"}
"""Tokens of all ages are trained on."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "colocated, synchronous": ("colocated", {}),
    "colocated, oversample 1.25": ("colocated", {"oversample": 1.25}),
    "colocated, oversample 1.5": ("colocated", {"oversample": 1.5}),
    "colocated, oversample 1.5, partial": ("colocated", {"oversample": 1.5, "partial": True}),
    "colocated, oversample 2, partial": ("colocated", {"oversample": 2, "partial": True}),
    "colocated, oversample 2, partial, all trained": ("colocated", {"oversample": 2, "partial": True} | ALL),
    "colocated, oversample 3, partial, all trained": ("colocated", {"oversample": 3, "partial": True} | ALL),
    "colocated, staleness 1, regenerated": ("colocated", {"max_staleness": 1, "stale_tokens": "regenerate"}),
    "colocated, staleness 4, regenerated": ("colocated", {"max_staleness": 4, "stale_tokens": "regenerate"}),
    "colocated, staleness 1": ("colocated", {"max_staleness": 1}),
    "colocated, staleness 4": ("colocated", {"max_staleness": 4}),
    "colocated, staleness 4, all trained": ("colocated", {"max_staleness": 4, "stale_tokens": "train"}),
    "colocated, staleness 8": ("colocated", {"max_staleness": 8}),
    "split, synchronous": ("split", {}),
    "split, oversample 1.5": ("split", {"oversample": 1.5}),
    "split, oversample 1.5, partial": ("split", {"oversample": 1.5, "partial": True}),
    "split, oversample 2, partial, all trained": ("split", {"oversample": 2, "partial": True} | ALL),
    "split, staleness 4, regenerated": ("split", {"max_staleness": 4, "stale_tokens": "regenerate"}),
    "split, staleness 1": ("split", {"max_staleness": 1}),
    "split, staleness 4": ("split", {"max_staleness": 4}),
    "split, staleness 4, all trained": ("split", {"max_staleness": 4, "stale_tokens": "train"}),
    "split, staleness 8": ("split", {"max_staleness": 8}),
    "mixed, synchronous": ("mixed", {}),
    "mixed, oversample 2, partial, all trained": ("mixed", {"oversample": 2, "partial": True} | ALL),
    "mixed, staleness 4": ("mixed", {"max_staleness": 4}),
    "mixed, staleness 4, all trained": ("mixed", {"max_staleness": 4, "stale_tokens": "train"}),
}


class _JumpingSelector(selectors.SelectSelector):
    """Returns at once and adds the timeout to the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that nothing will do")
        self.now += max(0.0, timeout)
        return super().select(0)


class _SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only where it would wait."""

    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def simulated(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end in simulated time."""
    loop = _SimulatedLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class Engines:
    """All engines as one: each rollout in a slot gets a token per iteration; the others wait in order."""

    slots: int
    version: int = 0
    paused: bool = True
    generated: float = 0.0
    """Tokens generated so far by all rollouts."""
    slot_seconds: float = 0.0
    """Seconds that slots were in use."""
    serving_seconds: float = 0.0
    _served: float = 0.0
    """Tokens that a rollout would have that has been in a slot from the start."""
    _published: list[float] = field(default_factory=lambda: [0.0])
    """``_served`` at the publication of each version."""
    _since: float = 0.0
    _running: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    _waiting: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)
    _began: dict[int, float] = field(default_factory=dict)
    _evicted: dict[int, float] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def advance(self) -> None:
        """Give the rollouts in slots the tokens of the time since the last call, and plan the next end."""
        now = asyncio.get_running_loop().time()
        elapsed, self._since = now - self._since, now
        n = len(self._running)
        if not self.paused:
            self.serving_seconds += elapsed
            self.slot_seconds += elapsed * n
            if n:
                tokens = elapsed / self._iteration_s(n)
                self._served += tokens
                self.generated += tokens * n
        while self._running and self._running[0][0] <= self._served + 1e-6:
            _, _, future = heapq.heappop(self._running)
            if not future.done():
                future.set_result(None)
        while self._waiting and len(self._running) < self.slots and not self.paused:
            length, future = self._waiting.pop(0)
            self._start(length, future)
        self._plan_next()

    def _iteration_s(self, n: int) -> float:
        return BASE_S + n * PER_ROLLOUT_S

    def _start(self, length: float, future: asyncio.Future[None]) -> None:
        self._began[id(future)] = self._served
        heapq.heappush(self._running, (self._served + length, next(self._ids), future))

    def _plan_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self.paused:
            wait = (self._running[0][0] - self._served) * self._iteration_s(len(self._running))
            self._timer = asyncio.get_running_loop().call_later(max(wait, 1e-6), self.advance)

    async def generate(self, length: float) -> list[tuple[int, float]]:
        """Generate a rollout, or a part of it until :meth:`evict`.

        Returns its policy versions, oldest first, with their numbers of tokens.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((length, future))
        self.advance()
        try:
            await future
        except asyncio.CancelledError:
            self._waiting = [entry for entry in self._waiting if entry[1] is not future]
            self._running = [entry for entry in self._running if entry[2] is not future]
            heapq.heapify(self._running)
            self._began.pop(id(future), None)
            self.advance()
            raise
        began = self._began.pop(id(future), self._served)
        end = min(began + length, self._evicted.pop(id(future), math.inf))
        bounds = [*self._published, math.inf]
        counts = [max(0.0, min(end, bounds[v + 1]) - max(began, bounds[v])) for v in range(len(bounds) - 1)]
        return [(v, count) for v, count in enumerate(counts) if count > 0]

    def evict(self) -> None:
        """End all generations with what they have so far."""
        self.advance()
        for future in [*(entry[2] for entry in self._running), *(entry[1] for entry in self._waiting)]:
            if not future.done():
                self._evicted[id(future)] = self._served
                future.set_result(None)
        self._running, self._waiting = [], []
        self._plan_next()

    @property
    def load(self) -> int:
        """Rollouts that are in slots or wait for one."""
        return len(self._running) + len(self._waiting)

    def pause(self) -> None:
        self.advance()
        self.paused = True
        self._plan_next()

    def resume(self) -> None:
        self.advance()
        self.paused = False
        self.advance()

    def publish(self, version: int) -> None:
        self.advance()
        self.version = version
        self._published.append(self._served)


class EngineWorker:
    """A rollout worker whose rollouts have one turn of a length that belongs to the task and sample."""

    up = True

    def __init__(self, engines: Sequence[Engines], seed: int) -> None:
        self._engines, self._seed = engines, seed

    async def _generate(self, length: int) -> tuple[tuple[int, int], ...]:
        """Generate on the engines that have least to do; those that stand still get nothing new."""
        made: dict[int, float] = {}
        while (left := length - sum(made.values())) > 1e-3:
            serving = [engines for engines in self._engines if not engines.paused] or self._engines
            for version, count in await min(serving, key=lambda engines: engines.load).generate(left):
                made[version] = made.get(version, 0.0) + count
        return tuple((version, round(count)) for version, count in made.items() if count >= 0.5)

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        lengths = lengths_of(request.id, request.n_samples, self._seed)
        made = await asyncio.gather(*(self._generate(int(length)) for length in lengths))
        rollouts: list[RolloutSummary] = []
        for sample, (length, versions) in enumerate(zip(lengths, made, strict=True)):
            rollouts.append(
                RolloutSummary(
                    id=f"{request.id}.{sample}", group_id=request.id, sample=sample, task=request.task,
                    length=int(length) + 1,
                    response_tokens=int(length), end=RolloutEnd.TERMINAL, reward=float(sample % 2),
                    min_version=versions[0][0], turns=1, tool_calls=0, malformed=0, seconds=0.0, worker=0,
                    location=Location(), version_tokens=versions,
                )
            )  # fmt: skip
        return PromptGroup(request.id, request.task, tuple(rollouts))

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """The producer has cancelled the tasks, which frees their slots."""


def lengths_of(group: int, samples: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Response lengths of a group: half of the variance is the task's, half the sample's."""
    rng = np.random.default_rng((seed, group))
    task = rng.normal(0, SIGMA / math.sqrt(2))
    values = np.exp(math.log(MEDIAN_TOKENS) + task + rng.normal(0, SIGMA / math.sqrt(2), samples))
    return np.clip(values, 8, 64 * MEDIAN_TOKENS).astype(np.int64)


@dataclass(frozen=True)
class Row:
    """What one variant gave."""

    variant: str
    of_ideal: float
    tokens_s: float
    empty_slots: float
    thrown_away: float
    age_mean: float
    age_max: int
    length_bias: float


async def measure(
    placement: str, changes: dict[str, Any], *, steps: int, groups: int, samples: int, slots: int, seed: int
) -> dict[str, float]:
    """Run a number of steps after a tenth of them, which are left out of the figures."""
    settings = RolloutSettings.model_validate(
        {"batch_size": groups, "n_samples": samples, "max_response_tokens": 64 * MEDIAN_TOKENS,
         "max_total_tokens": 65 * MEDIAN_TOKENS} | changes
    )  # fmt: skip
    fleet = [Engines(slots) for _ in range(2 if placement == "mixed" else 1)]
    shared = {"colocated": fleet, "split": [], "mixed": fleet[1:]}[placement]
    worker = EngineWorker(fleet, seed)
    tasks = TaskSequence([TaskStream("simulated", "train", TASKS, 1.0)], seed=seed)
    producer = Producer(settings, tasks, [worker], seed=seed)
    loop = asyncio.get_running_loop()
    warm_up = steps // 10
    ages: list[tuple[int, int]] = []
    trained = began = generated = 0.0
    slot_seconds = serving = 0.0
    lengths: list[int] = []
    for step in range(steps + warm_up):
        if step == warm_up:
            began, trained = loop.time(), 0.0
            generated, slot_seconds, serving = _work_of(fleet)
            ages, lengths = [], []
        for engines in fleet:
            engines.resume()
        step_groups = await producer.collect(step)
        rollouts = [r for group in step_groups.groups for r in group.trainable]
        tokens = sum(r.response_tokens for r in rollouts)
        for engines in shared:
            engines.pause()
            if placement == "mixed":
                engines.evict()
        await asyncio.sleep(tokens * UPDATE_S)
        oldest = step - settings.max_age if settings.stale_tokens == "mask" else 0
        made = [(step - v, n) for r in rollouts for v, n in r.version_tokens if v >= oldest]
        ages += made
        lengths += [r.response_tokens for r in rollouts]
        trained += sum(n for _, n in made)
        for engines in fleet:
            engines.publish(step + 1)
    for engines in fleet:
        engines.advance()
    seconds = loop.time() - began
    await producer.cancel()
    everyone = np.concatenate([lengths_of(group, samples, seed) for group in range(2000)])
    end = _work_of(fleet)
    return {
        "of_ideal": trained / seconds * _ideal_s(placement, slots),
        "tokens_s": trained / seconds,
        "empty_slots": 1 - (end[1] - slot_seconds) / ((end[2] - serving) * slots),
        "thrown_away": 1 - min(1.0, trained / (end[0] - generated)),
        "age_mean": sum(a * n for a, n in ages) / sum(n for _, n in ages),
        "age_max": max(a for a, _ in ages),
        "length_bias": float(np.mean(lengths) / everyone.mean()),
    }


def _ideal_s(placement: str, slots: int) -> float:
    """Seconds per token if every slot that may generate always does, and every token is trained on."""
    per_token_s = (BASE_S + slots * PER_ROLLOUT_S) / slots
    if placement == "colocated":
        return per_token_s + UPDATE_S
    return max(UPDATE_S, per_token_s if placement == "split" else (per_token_s + UPDATE_S) / 2)


def _work_of(fleet: Sequence[Engines]) -> tuple[float, float, float]:
    """Tokens, seconds of used slots and seconds of serving so far."""
    return (
        sum(engines.generated for engines in fleet),
        sum(engines.slot_seconds for engines in fleet),
        sum(engines.serving_seconds for engines in fleet),
    )


def main() -> None:
    logging.disable(logging.WARNING)  # a line for each group that is generated again
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of the variants to run")
    parser.add_argument("--out", type=Path, help="also write the rows as CSV")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'':46} of ideal  tokens/s  empty slots  thrown away  age: mean  largest  length/mean")
    for name, (placement, changes) in VARIANTS.items():
        if options.only not in name:
            continue
        found = simulated(
            measure(
                placement, changes, steps=options.steps, groups=options.groups, samples=options.samples,
                slots=options.groups * options.samples, seed=options.seed,
            )
        )  # fmt: skip
        row = Row(variant=name, **found)  # pyright: ignore[reportArgumentType]
        rows.append(row)
        print(
            f"{name:46} {row.of_ideal:8.1%} {row.tokens_s:9,.0f} {row.empty_slots:12.1%} "
            f"{row.thrown_away:12.1%} {row.age_mean:10.2f} {row.age_max:8} {row.length_bias:12.2f}",
            flush=True,
        )
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Row.__dataclass_fields__)
            writer.writerows([getattr(row, n) for n in Row.__dataclass_fields__] for row in rows)


if __name__ == "__main__":
    main()
