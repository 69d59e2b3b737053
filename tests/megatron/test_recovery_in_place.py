"""A Megatron trainer that runs out of memory continues in its process, if it is a single rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from orhpc.errors import InfraError, OutOfMemory
from orhpc.process import state_folder
from orhpc.train.actor import TrainerRank
from orhpc.train.checkpoint.copy_files import CopyId
from tests.megatron.kit import Case, case_config, save_model
from tests.trainer_kit import plan, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def fails(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def failure_of(rank: TrainerRank, ranks: int) -> str:
    try:
        rank.step(plan(1, ranks=ranks), step=2)
    except (OutOfMemory, InfraError) as error:
        return type(error).__name__
    return "none"


def _recovers(rank: int, world: int, port: int, folder: str, out: str) -> Any:
    """The second layer fails in the backward pass; afterwards the step is as undisturbed."""
    from tests.megatron import shim

    shim.install()
    os.environ[state_folder.VARIABLE] = out
    config = case_config(Case("qwen3"), world)
    trainer = TrainerRank(config, folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 100)
    trainer.build()
    trainer.step(plan(0, ranks=config.data_ranks), step=1)
    copy = CopyId(1, "mark")
    trainer.copy_state(copy)
    undisturbed = trainer.step(plan(1, ranks=config.data_ranks), step=2)
    trainer.restore_copy(copy)
    backend: Any = trainer.backend

    def on_output(_: Any, __: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        if found.requires_grad:
            found.register_hook(fails)

    module = [m for m in backend._models[0].modules() if type(m).__name__ == "TransformerLayer"][-1]
    hook = module.register_forward_hook(on_output)
    failed = failure_of(trainer, config.data_ranks)
    hook.remove()
    with pytest.raises(InfraError, match="cannot change its process groups"):
        trainer.leave_groups()
    whole = trainer.recover()
    again = trainer.step(plan(1, ranks=config.data_ranks), step=2)
    trainer.close()
    return failed, whole, undisturbed["grad_norm"], again["grad_norm"]


def test_the_step_is_repeated_with_the_same_gradient(tmp_path: Path) -> None:
    """Several ranks are restarted at once instead: megatron-core's modules keep their process groups."""
    save_model(tmp_path / "model", "qwen3")
    (tmp_path / "state").mkdir()
    ((failed, whole, undisturbed, again),) = run_ranks(
        _recovers, 1, str(tmp_path / "model"), str(tmp_path / "state"), timeout_s=240
    )
    assert (failed, whole) == ("OutOfMemory", True)
    assert again == undisturbed
