"""Loads user functions, which a config names as ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from orhpc.errors import ConfigError
from orhpc.process.user_code import user_error


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        name: ``package.module:function``.
        setting: the config field that names it, for the error message.

    Raises:
        ConfigError: there is no such module or function.
        UserCodeError: importing the module raises.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{setting}: {name!r} is not package.module:function")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # the module may raise any exception
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            raise ConfigError(f"{setting}: {module} cannot be imported: {error}") from None
        failure = user_error(f"{setting}: {module} cannot be imported: it", error)
        raise failure from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{setting}: {module} has no function {attribute!r}")
    return found
