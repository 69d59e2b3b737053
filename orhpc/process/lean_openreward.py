"""Import openreward without two SDKs of model providers, of which it needs the names of types.

``openreward`` (0.1.167) imports anthropic and google.genai to annotate functions that convert messages of
these providers (``openreward/api/rollouts``); this project calls none of them.  The two are 3,300 of the
4,700 modules that openreward's environments load, more than half of the time that takes and 60 of 150 MB.
While openreward is imported here, placeholders stand for those that have not been imported yet.  They are
removed afterwards, so the code of an environment imports the real SDKs.

Import this module before openreward.  :mod:`orhpc.environments` and :mod:`orhpc.rollout.environment` do it
for their modules that use it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)
_NAMES_OF_TYPES = ("anthropic.types", "google.genai", "google.genai.types")
"""Modules of which openreward uses names in annotations only."""


class _Placeholder(ModuleType):
    """A module with every name: of its submodules that are loaded, else ``Any``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", Any)


def import_without(modules: Sequence[str], package: str) -> None:
    """Import a package; imports of ``modules`` in it give placeholders, if they have not been loaded yet.

    If the package needs more than names of them, it is imported with the real modules.
    """
    if package in sys.modules:
        return
    try:
        with _placeholders(modules):
            importlib.import_module(package)
    except (AttributeError, ImportError, TypeError) as error:
        log.debug("%s is imported whole: %s: %s", package, type(error).__name__, error)
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            del sys.modules[name]
        importlib.import_module(package)


@contextmanager
def _placeholders(modules: Sequence[str]) -> Iterator[None]:
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update({name: _Placeholder(name) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


os.environ.setdefault("OPENREWARD_DISABLE_UPDATE_CHECK", "1")  # a request to the package index
import_without(_NAMES_OF_TYPES, "openreward")
