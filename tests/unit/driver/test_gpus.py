"""The use of the GPUs: numbers of a step, and its line in the file; GPUs themselves are not here."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.driver.fleet import gpus
from orhpc.driver.fleet.gpus import Gpus, usage_metrics
from orhpc.driver.metrics import Phases
from orhpc.errors import RayLost
from orhpc.process.gpu_usage import GpuSampler, Samples


class _Phases(Phases):
    """Phases at given times."""

    def __init__(self, **spans: tuple[float, float]) -> None:
        super().__init__()
        self._spans = {name: [span] for name, span in spans.items()}


def _samples(busy_SG: list[list[float]]) -> Samples:
    """One sample a second from second 0; memory is the number of the sample, power 100 W per GPU index."""
    values = [[[busy, float(s), 100.0 * g] for g, busy in enumerate(row)] for s, row in enumerate(busy_SG)]
    return Samples(np.arange(len(busy_SG), dtype=np.float64), np.array(values, np.float32))


def test_the_numbers_of_a_step() -> None:
    nodes = [_samples([[0.0, 0.5], [1.0, 0.5], [1.0, 0.5]]), _samples([[0.2, 0.2]])]
    found = usage_metrics(nodes, _Phases(rollout=(-0.5, 0.5), update=(0.6, 5.0)))
    assert found["gpu_utilization"] == pytest.approx((2 / 3 + 0.5 + 0.2 + 0.2) / 4, abs=1e-3)
    assert found["gpu_utilization_lowest"] == pytest.approx(0.2)
    assert found["gpu_utilization_rollout"] == pytest.approx((0.0 + 0.5 + 0.2 + 0.2) / 4)
    assert found["gpu_utilization_update"] == pytest.approx(0.75)
    assert "gpu_utilization_sync" not in found  # it did not run
    assert found["gpu_memory_used_gb"] == 2.0
    assert found["gpu_power_w"] == pytest.approx(50.0)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=2, max_size=2), min_size=1))
def test_a_gpu_that_does_not_report_is_left_out(busy_SG: list[list[float]]) -> None:
    found = usage_metrics([_samples(busy_SG)], _Phases())
    assert all(math.isfinite(value) for value in found.values())


class _Call:
    def __init__(self, node: str) -> None:
        self.node = node

    def remote(self) -> str:
        return self.node


class _Watch:
    def __init__(self, node: str) -> None:
        self.take = _Call(node)


def test_a_node_that_does_not_answer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"one": _samples([[0.5]]), "two": "NVML: no driver", "three": RayLost("gone")}
    asked: list[str] = []
    killed: list[Any] = []

    async def call(node: str, what: str, timeout_s: float) -> Any:
        asked.append(node)
        if isinstance(answers[node], Exception):
            raise answers[node]
        return answers[node]

    monkeypatch.setattr(gpus, "call", call)
    monkeypatch.setattr(gpus.ray, "kill", killed.append)
    watches: Any = {name: _Watch(name) for name in answers}
    fleet = Gpus(watches, tmp_path / "gpus.jsonl")
    for step in (1, 2):
        assert asyncio.run(fleet.report(step, Phases()))["gpu_utilization"] == 0.5
    assert sorted(asked) == ["one", "one", "three", "two"]
    assert len(killed) == 2
    lines = [json.loads(line) for line in (tmp_path / "gpus.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "nodes": {"one": [[0.5, 0.0, 0.0]]}} for step in (1, 2)]


def test_without_nvml_there_is_one_clear_error() -> None:
    try:
        GpuSampler(["0"])
    except RuntimeError as error:
        assert str(error).startswith("NVML: ")
    else:
        pytest.skip("this machine has a GPU")
