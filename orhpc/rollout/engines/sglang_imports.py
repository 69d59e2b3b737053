"""What happens when SGLang's processes import modules; SGLang offers no other place for it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from orhpc.process import start_gate

MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
"""Imported by each process that loads a model, as the last module before it uses its GPU
(``srt/managers/tp_worker.py``, SGLang 0.5.16 and 0.5.23)."""


def hide_megatron() -> None:
    """Let ``import megatron`` fail in this process, as if megatron-core were not installed.

    SGLang's dumper of tensors (``srt/debug_utils/dumper.py``) imports it where it is installed, for the ranks
    of trainers.  In engines this only costs seconds of their start and memory.
    """
    sys.modules["megatron"] = None  # type: ignore[assignment]


def wait_before_loading_models() -> None:
    """Let this process wait at its gate (:mod:`orhpc.process.start_gate`), if it is about to load a model."""
    if start_gate.VARIABLE in os.environ:
        sys.meta_path.insert(0, AfterImport(MODEL_RUNNER, start_gate.wait_at_gate))


def wrap_method(module: Any, kind: str, method: str, wrapper: Callable[..., Any]) -> None:
    """Let a method of the class ``module.kind`` be ``wrapper(own, self, *args, **kwargs)``.

    ``own``: the method as SGLang has it.  Releases without the class or the method are left alone.
    """
    owner = getattr(module, kind, None)
    own = getattr(owner, method, None)
    if owner is None or own is None:
        return

    @functools.wraps(own)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(own, self, *args, **kwargs)

    setattr(owner, method, wrapped)


class AfterImport(MetaPathFinder):
    """Calls a function when a module has been imported for the first time; for ``sys.meta_path``."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            self._function()

        setattr(spec.loader, "exec_module", execute_and_call)  # noqa: B010
        return spec
