"""Engines release memory only when their GPU is idle; stand-ins for torch and the saver note the order."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from orhpc.rollout.engines.sglang_command import SLEEPER


def test_every_release_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    saver = SimpleNamespace(pause=lambda tag=None: events.append(tag))
    package = ModuleType("torch_memory_saver")
    package.torch_memory_saver = saver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", package)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("idle"))
    module, _, name = SLEEPER.rpartition(".")
    install = getattr(importlib.import_module(module), name)
    for _ in range(2):  # a restarted driver does so again
        install(nn.Linear(1, 1), [])
    saver.pause(tag="kv_cache")
    saver.pause("weights")
    saver.pause()
    assert events == ["idle", "kv_cache", "idle", "weights", "idle", None]
    with pytest.raises(ValueError, match="loads nothing"):
        install(nn.Linear(1, 1), [("a", torch.zeros(1))])
