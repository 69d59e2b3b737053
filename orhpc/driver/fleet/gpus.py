"""The use of all GPUs of the job during each step."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from orhpc.config import Config
from orhpc.driver.fleet.actors import call, spawn
from orhpc.driver.metrics import Phases
from orhpc.errors import OrhpcError
from orhpc.plan.placement import Placement
from orhpc.process.devices import visible_devices
from orhpc.process.gpu_usage import QUANTITIES, GpuSampler, Samples

log = logging.getLogger(__name__)
_ANSWER_S = 5.0
_SHOWN_PHASES = ("rollout", "update", "sync")


class GpuWatch:
    """An actor on each node that samples its GPUs."""

    def __init__(self, devices: int) -> None:
        """``devices``: number of GPUs of the job on this node."""
        self._problem = ""
        self._sampler: GpuSampler | None = None
        try:
            self._sampler = GpuSampler(visible_devices(range(devices), os.environ).split(","))
        except RuntimeError as error:
            self._problem = str(error)

    def take(self) -> Samples | str:
        """Samples since the last call; a string: why there are none."""
        return self._problem if self._sampler is None else self._sampler.take()


class Gpus:
    """All GPUs of the job: produces metrics of each step, and one line of ``gpus.jsonl``.

    It never fails a step: a node that does not answer is left out.
    """

    def __init__(self, watches: Mapping[str, ActorHandle[Any]], file: Path) -> None:
        """``watches``: one actor per node, by the node's name."""
        self._watches = dict(watches)
        self._file = file

    @classmethod
    def start(cls, config: Config, placement: Placement, ids: Sequence[str], file: Path) -> Gpus:
        """Start the actors; without GPUs there are none."""
        if config.placement.device != "cuda":
            return cls({}, file)
        devices = config.placement.devices_per_node
        return cls(
            {
                node.name: spawn(GpuWatch, ids[i], config.secret_sources, devices)
                for i, node in enumerate(placement.nodes)
            },
            file,
        )

    async def report(self, step: int, phases: Phases) -> dict[str, float]:
        """Append the step's line to the file and return its metrics; see :func:`usage_metrics`."""
        names = list(self._watches)
        answers = await asyncio.gather(*(self._ask(name) for name in names))
        samples = {n: a for n, a in zip(names, answers, strict=True) if a is not None and len(a.times_S)}
        if not samples:
            return {}
        line = json.dumps({"step": step, "nodes": {n: _of_step(s).tolist() for n, s in samples.items()}})
        try:
            await asyncio.to_thread(_append, self._file, line)
        except OSError as error:
            log.warning("the use of the GPUs in step %d is not recorded: %s", step, error)
        return usage_metrics(list(samples.values()), phases)

    def close(self) -> None:
        """Stop all actors."""
        for watch in self._watches.values():
            ray.kill(watch)

    async def _ask(self, node: str) -> Samples | None:
        """The samples of a node; a node that cannot give any is not asked again."""
        try:
            answer = await call(self._watches[node].take.remote(), f"GPUs of {node}", _ANSWER_S)
        except OrhpcError as error:
            answer = str(error)
        if isinstance(answer, Samples):
            return answer
        log.warning("the use of the GPUs of %s is not recorded: %s", node, answer)
        ray.kill(self._watches.pop(node))
        return None


def usage_metrics(nodes: Sequence[Samples], phases: Phases) -> dict[str, float]:
    """Metrics over all GPUs of a step, without those that no GPU reports.

    ``gpu_utilization``: mean over GPUs and time; ``gpu_utilization_lowest``: the least busy GPU's mean;
    ``gpu_utilization_PHASE``: mean during a phase; ``gpu_memory_used_gb``: the fullest GPU's maximum;
    ``gpu_power_w``: mean per GPU.
    """
    steps_GQ = np.concatenate([_of_step(samples) for samples in nodes])
    busy_G, memory_G, power_G = steps_GQ.T
    metrics = {
        "gpu_utilization": _mean(busy_G),
        "gpu_utilization_lowest": float(np.nanmin(busy_G)) if not np.isnan(busy_G).all() else np.nan,
        "gpu_memory_used_gb": float(np.nanmax(memory_G)) if not np.isnan(memory_G).all() else np.nan,
        "gpu_power_w": _mean(power_G),
    }
    for name in _SHOWN_PHASES:
        inside = [s.values_SGQ[_within(s.times_S, phases.spans(name)), :, 0].ravel() for s in nodes]
        metrics[f"gpu_utilization_{name}"] = _mean(np.concatenate(inside))
    return {name: value for name, value in metrics.items() if not np.isnan(value)}


def _of_step(samples: Samples) -> NDArray[np.float64]:
    """Mean utilization, largest memory and mean power of each GPU ``[G, 3]``."""
    assert QUANTITIES == ("utilization", "memory_gb", "power_w")
    busy_SG, memory_SG, power_SG = np.moveaxis(samples.values_SGQ, 2, 0)
    return np.stack([busy_SG.mean(0), memory_SG.max(0), power_SG.mean(0)], axis=1).astype(np.float64).round(3)


def _mean(values: NDArray[np.float32]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


def _within(times_S: NDArray[np.float64], spans: Sequence[tuple[float, float]]) -> NDArray[np.bool_]:
    inside_S = np.zeros(len(times_S), bool)
    for start, end in spans:
        inside_S |= (times_S >= start) & (times_S <= end)
    return inside_S


def _append(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
