"""Lanes of GPUs in the report: one per GPU, or per node in large jobs."""

from __future__ import annotations

import json
from pathlib import Path

from orhpc.commands.report.gpu_lanes import gpu_lanes
from orhpc.rundir import RunDir


def _run(folder: Path, attempts: dict[int, list[str]]) -> RunDir:
    run = RunDir(folder)
    run.create()
    for number, lines in attempts.items():
        run.begin_attempt(kind="local")
        (run.attempt(number) / "gpus.jsonl").write_text("\n".join(lines))
    return run


def _line(step: int, **nodes: list[list[float]]) -> str:
    return json.dumps({"step": step, "nodes": nodes})


def test_of_a_repeated_step_the_last_time_is_shown_and_a_torn_line_is_not(tmp_path: Path) -> None:
    first = [_line(1, a=[[0.1, 10, 300]]), _line(2, a=[[0.2, 20, 300]])]
    second = [_line(2, a=[[0.9, 30, 300]], b=[[0.5, float("nan"), 100]]), '{"step": 3, "nodes": {"a": [[0.']
    found = gpu_lanes(_run(tmp_path / "run", {1: first, 2: second}))
    assert found["steps"] == [1, 2]
    assert found["lanes"] == ["a GPU 0", "b GPU 0"]
    assert found["utilization"] == [[0.1, 0.9], [None, 0.5]]
    assert found["memory"] == [[10, 30], [None, None]]


def test_a_large_job_has_a_lane_per_node(tmp_path: Path) -> None:
    gpus = [[0.5, 40.0, 300.0]] * 7 + [[0.25, 60.0, 300.0]]
    found = gpu_lanes(_run(tmp_path / "run", {1: [_line(1, **{f"n{i}": gpus for i in range(9)})]}))
    assert found["per_node"]
    assert found["lanes"] == [f"n{i}" for i in range(9)]
    assert found["utilization"] == [[0.25]] * 9
    assert found["memory"] == [[60]] * 9


def test_a_long_run_is_thinned_evenly(tmp_path: Path) -> None:
    steps = range(1, 1001)
    found = gpu_lanes(_run(tmp_path / "run", {1: [_line(s, a=[[0.5, 1, 1]]) for s in steps]}))
    assert found["steps"][0] == 1
    assert found["steps"][-1] == 1000
    assert len(found["steps"]) == 300


def test_a_run_without_gpus_has_no_lanes(tmp_path: Path) -> None:
    assert gpu_lanes(_run(tmp_path / "run", {1: []})) == {}
