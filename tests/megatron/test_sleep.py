"""What a Megatron trainer frees before sleep, and how much of it is in host memory afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from orhpc.config import Config
from orhpc.models import read_shape
from orhpc.plan.layout import trainer_layout
from orhpc.plan.memory import rank_memory, trainer_demand
from orhpc.train.actor import TrainerRank
from orhpc.train.checkpoint.shards import CheckpointReader
from orhpc.train.megatron.scratch_tensors import CachedTensors
from orhpc.train.sleep.residence import asleep_bytes
from tests.megatron.kit import Case, case_config, planned, save_model
from tests.trainer_kit import make_samples, run_ranks

WEIGHTS = "model.safetensors"


def _two_steps(rank: int, world: int, port: int, folder: str, sleeps: bool) -> dict[str, Any]:
    """Body of the one rank: a step, optionally sleep, another step."""
    from tests.megatron import shim

    shim.install()
    config = case_config(Case("qwen3-moe", dtype="bfloat16"), world)
    # The model check at startup is a micro-batch too, which would create the tensors before the first step.
    unchecked = config.model.model_copy(update={"check": False})
    trainer = TrainerRank(config.model_copy(update={"model": unchecked}), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    backend: Any = trainer.backend
    dispatchers = [m.token_dispatcher for m in backend._models[0].modules() if hasattr(m, "token_dispatcher")]
    built = _tensors(dispatchers)
    steps = [trainer.step([planned(make_samples(8), 1)], step=0)]
    held = _tensors(dispatchers)
    if sleeps:
        trainer.sleep()
    left = _tensors(dispatchers)
    steps.append(trainer.step([planned(make_samples(8, seed=1), 1)], step=1))
    # On a GPU all of these tensors would be offloaded; here no tensor is on a device.
    state = [t for held in backend.optimizer.held() for t in held.tensors.values()]
    tensors = [*state, *(p.detach() for p in backend._models[0].parameters())]
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    shape = read_shape(folder)
    plan = rank_memory(shape, trainer_layout(config), trainer_demand(config), 0).kept
    trainer.close()
    times = ("seconds", "tokens_per_s")
    numbers = [{n: v for n, v in step.items() if not any(t in n for t in times)} for step in steps]
    asleep = asleep_bytes(config, folder, rank, world)
    return {
        "steps": numbers, "built": built, "held": held, "left": left, "kept": sum(kept.values()),
        "plan": (plan, asleep),
    }  # fmt: skip


def _tensors(owners: list[Any]) -> list[int]:
    """Count the tensors that each object holds."""
    return [sum(isinstance(v, torch.Tensor) for v in vars(owner).values()) for owner in owners]


@pytest.mark.slow
def test_nothing_of_the_last_micro_batch_is_held_asleep_and_the_next_step_is_the_same(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3-moe")
    awake, slept = (run_ranks(_two_steps, 1, str(tmp_path), sleeps)[0] for sleeps in (False, True))
    assert awake["left"] == awake["held"] == slept["held"]
    assert all(held > built for held, built in zip(slept["held"], slept["built"], strict=True))
    assert slept["left"] == slept["built"]
    assert slept["steps"] == awake["steps"]
    plan, asleep = slept["plan"]
    # The vocabulary of this small model is padded by more than one percent.
    assert plan <= slept["kept"] <= asleep
    assert slept["kept"] < 1.2 * plan


def test_quantized_weights_are_dropped_and_nothing_else_of_a_layer() -> None:
    """TransformerEngine's modules keep quantized weights in a dictionary from construction on."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    cache: dict[str, torch.Tensor] = {}
    layers[0]._fp8_workspaces = cache  # type: ignore[assignment]
    leftovers = CachedTensors(layers)
    cache["weight"] = torch.ones(2, 2)
    leftovers.drop()
    assert cache == {}
    assert layers[0]._fp8_workspaces is cache
    assert [len(list(layer.parameters())) for layer in layers] == [2, 2]


def _saves(rank: int, world: int, port: int, folder: str, backend: str, way: str) -> None:
    """Body of a rank: two steps with sleep in between, and a commit at every stage."""
    moves = way != "on a CPU"
    if backend == "megatron":
        from tests.megatron import shim

        shim.install()
    raw = case_config(Case("qwen3-moe"), world, backend).model_dump(mode="json")
    raw["checkpoint"]["spare_host_memory"] = way != "moves"
    config = Config.model_validate(raw)
    trainer = TrainerRank(config, folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    trainer.backend._offload.moves = moves  # type: ignore[attr-defined]
    trainer._shared_device.has_room = lambda: way.startswith("stays")  # type: ignore[method-assign]

    def save(name: str) -> None:
        (target := Path(folder) / way / name).mkdir(parents=True, exist_ok=True)
        trainer.save_begin(str(target))

    def saved() -> None:
        while trainer.save_poll() is None:
            time.sleep(0.01)

    for step in range(2):
        trainer.step([planned(make_samples(8, seed=step), config.data_ranks)], step=step)
        save(f"{step}-awake")
        trainer.release_gradients(all_moves=False)
        slept = trainer.sleep(all_moves=False)
        if way == "stays, then moves":  # an engine has ended and needs all the memory for its start
            assert slept["moved_bytes"] == 0
            slept = trainer.sleep(all_moves=True)
        assert (slept["moved_bytes"] > 0) == way.endswith("moves")
        gradients = slept["freed_bytes"] - slept["moved_bytes"]
        assert (gradients > 0) == (moves and backend == "megatron")
        saved()
        save(f"{step}-asleep")
        trainer.wake()
        saved()
        save(f"{step}-woken")  # while background copies are still running
        saved()
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_commits_are_the_same_awake_asleep_and_of_who_never_moved(tmp_path: Path, backend: str) -> None:
    """Sleep has no benefit on a CPU, so offloading is enabled explicitly."""
    save_model(tmp_path, "qwen3-moe")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(
        weights, tmp_path / WEIGHTS
    )  # so that no parameter is a view of the file, whose memory cannot be freed
    ways = ["on a CPU", "moves", "in spare memory it moves", "stays", "stays, then moves"]
    for way in ways:
        run_ranks(_saves, 1, str(tmp_path), backend, way)
    for step in range(2):
        readers = [
            CheckpointReader(tmp_path / way / f"{step}-{when}")
            for way in ways
            for when in ("awake", "asleep", "woken")
        ]
        names = list(readers[0].shapes)
        assert any("experts" in name for name in names)
        for name in names:
            first, *others = (reader.whole(name) for reader in readers)
            assert all(torch.equal(first, other) for other in others), (step, name)
    assert not torch.equal(
        *(CheckpointReader(tmp_path / "stays" / f"{step}-asleep").whole(names[0]) for step in range(2))
    )


def test_a_rank_of_a_pipeline_prepares_for_its_own_stage(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    config = case_config(Case("qwen3", {"pp": 2}), 2)
    stages = [
        rank_memory(read_shape(tmp_path), trainer_layout(config), trainer_demand(config), i) for i in (0, 1)
    ]
    first, last = (asleep_bytes(config, str(tmp_path), rank, 2) for rank in (0, 1))
    assert first - last == pytest.approx(1.01 * (stages[0].kept - stages[1].kept), abs=2)
    assert first != last


def test_of_a_family_without_a_plan_nothing_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    config = case_config(Case("qwen3"), 1, "fsdp")
    assert asleep_bytes(config, str(tmp_path), 0, 1) == 0
