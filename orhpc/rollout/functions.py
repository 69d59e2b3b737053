"""Functions of the user's, named in a config as ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from orhpc.errors import ConfigError


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Return the function.

    Args:
        name: ``package.module:function``.
        setting: the config field that names it, for the error message.

    Raises:
        ConfigError: there is no such function, or importing its module fails.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{setting}: {name!r} is not package.module:function")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # the module may raise whatever it likes
        raise ConfigError(
            f"{setting}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{setting}: {module} has no function {attribute!r}")
    return found
