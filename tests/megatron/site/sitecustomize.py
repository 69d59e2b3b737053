"""Installs the CPU shim in processes that a test starts, if they use the Megatron trainer.

Python imports this at startup if this folder is on ``PYTHONPATH``.  It waits until the Megatron
backend is first imported, and prepares the process just before.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

TRIGGER = "orhpc.train.megatron.backend"
ROOT = Path(__file__).parents[3]


class _BeforeMegatron(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == TRIGGER:
            sys.meta_path.remove(self)
            _install("shim")
            if "ORHPC_TEST_SLEPT" in os.environ:
                _install("moving")
        return None


def _install(name: str) -> None:
    spec = importlib.util.spec_from_file_location(f"orhpc_test_{name}", ROOT / f"tests/megatron/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()


sys.meta_path.insert(0, _BeforeMegatron())
