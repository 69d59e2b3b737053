"""The arguments with which each node of an engine is started, from the placement."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orhpc.config import Config
from orhpc.driver.fleet.engine_places import engine_at
from orhpc.plan.placement import Node, plan
from orhpc.rollout.engines.process import server_environment
from orhpc.rollout.engines.sglang_command import EnginePart

HOSTS = tuple(Node(f"n{i}", f"10.0.0.{i + 1}", 16) for i in range(4))


def parts_of(placement: dict[str, Any], tp: int) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """For each engine its URL and, per node, the arguments of its process."""
    config = Config.model_validate(
        {"placement": placement, "engine": {"tp": tp}, "environments": {"a/b": {"serve": "letters"}}}
    )
    placed = plan(config, HOSTS)
    ports = {(e.index, n): (20000 + e.index, 21000 + e.index) for e in placed.engines for n in e.nodes}
    ids = [f"id{i}" for i in range(len(HOSTS))]
    found = []
    for place in placed.engines:
        engine = engine_at(config, placed, ids, "/model", Path("/logs"), "key", place, ports)
        started = []
        for starter in engine.starters:
            assert isinstance(starter, partial)
            started.append(starter.args)
        found.append((engine.url, started))
    return found


def test_an_engine_of_two_nodes_is_one_server_with_a_process_on_each() -> None:
    first, second = parts_of({"nodes": 4, "devices_per_node": 4}, tp=8)
    for number, (url, started) in enumerate((first, second)):
        home = 2 * number
        assert url == f"http://10.0.0.{home + 1}:{20000 + number}"
        assert [args[1] for args in started] == [f"id{home}", f"id{home + 1}"]
        for rank, args in enumerate(started):
            _, _, _, _, model, address, port, key, log, index, _, part = args
            assert (model, address, port, key, index) == (
                "/model", f"10.0.0.{home + rank + 1}", 20000 + number, "key", number,
            )  # fmt: skip
            assert log == f"/logs/engine_{number:03d}{'_1' if rank else ''}.log"
            assert part == EnginePart(
                devices=(0, 1, 2, 3),
                node_rank=rank,
                nnodes=2,
                rendezvous=f"10.0.0.{home + 1}:{21000 + number}",
                shares=True,
            )


def test_engines_on_one_node_have_separate_devices_and_ports() -> None:
    found = parts_of({"nodes": 1, "devices_per_node": 4, "mode": "split", "engine_devices": 2}, tp=1)
    parts = [args[-1] for _, started in found for args in started]
    assert parts == [
        EnginePart(devices=(2,), rendezvous="10.0.0.1:21000"),
        EnginePart(devices=(3,), rendezvous="10.0.0.1:21001"),
    ]


def test_only_engines_on_shared_devices_release_their_memory() -> None:
    mixed = {"nodes": 1, "devices_per_node": 4, "mode": "mixed", "trainer_devices": 2, "engine_devices": 4}
    parts = [args[-1] for _, started in parts_of(mixed, tp=2) for args in started]
    assert [(p.devices, p.shares) for p in parts] == [((0, 1), True), ((2, 3), False)]


def test_a_server_has_the_right_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(threads: int | None = None, **model: str) -> dict[str, str]:
        content = {
            "model": model,
            "environments": {"a/b": {"serve": "letters"}},
            "engine": {"threads": threads},
        }
        config = Config.model_validate(content)
        return server_environment(config, EnginePart(devices=(2,)))

    dumps, wanted = "SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
    for name in (
        "CUDA_VISIBLE_DEVICES", "TRITON_F32_DEFAULT", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP", dumps, wanted,
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    usual = given()
    assert usual["CUDA_VISIBLE_DEVICES"] == "2"
    assert usual["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == "1"
    assert usual[dumps] == "0"
    assert "TRITON_F32_DEFAULT" not in usual
    assert given(dtype="float32")["TRITON_F32_DEFAULT"] == "ieee"
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")  # the user's own value is kept
    assert given(dtype="float32")["TRITON_F32_DEFAULT"] == "tf32x3"
    monkeypatch.setenv("OMP_NUM_THREADS", "64")  # the job's, for its trainers
    assert given()["OMP_NUM_THREADS"] == "1"
    assert given(threads=8)["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv(wanted, "1")  # then SGLang waits for crash dumps
    assert dumps not in given()
