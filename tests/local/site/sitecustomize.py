"""Makes optimizer steps of the FSDP trainer fail in processes that a test starts, at chosen calls.

Python imports this at its start if this folder is on ``PYTHONPATH``.  ``ORHPC_TEST_FAULTS`` is a folder with
``plan.json``, for example ``{"3": "nan", "5": "oom"}``: the faults at the third and fifth optimizer step of a
rank, counted over all restarts.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

TRIGGER = "orhpc.train.fsdp.backend"


class _BeforeTrainer(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == TRIGGER:
            sys.meta_path.remove(self)
            _install(Path(os.environ["ORHPC_TEST_FAULTS"]))
        return None


def _install(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from orhpc.train.fsdp.optim import Optimizer

    plan = json.loads((folder / "plan.json").read_text())
    step = Optimizer.step

    def failing(self: Any, loss: Any) -> Any:
        calls = folder / f"calls.{dist.get_rank()}"
        with calls.open("a") as stream:
            stream.write("x")
        dist.barrier()  # else the driver may end a rank before it has counted this step
        fault = plan.get(str(calls.stat().st_size))
        if fault == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        if fault == "nan":
            for parameter in self._parameters.values():
                parameter.grad.mul_(float("nan"))
        return step(self, loss)

    Optimizer.step = failing


sys.meta_path.insert(0, _BeforeTrainer())
