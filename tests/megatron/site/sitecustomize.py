"""Puts the CPU shim under the Megatron trainer in processes that a test starts, and under nothing else.

Python imports this at its start where this folder is on ``PYTHONPATH``.  It waits until the Megatron
backend is first imported, and prepares the process just before.
"""

from __future__ import annotations

import importlib.util
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
            file = ROOT / "tests/megatron/shim.py"
            spec = importlib.util.spec_from_file_location("orhpc_test_shim", file)
            assert spec is not None and spec.loader is not None
            shim = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(shim)
            shim.install()
        return None


sys.meta_path.insert(0, _BeforeMegatron())
