"""Which finished prompt groups are trained on: ``rollout.filter`` as a function of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from orhpc.config.rollout import GROUP_FILTERS
from orhpc.errors import UserCodeError
from orhpc.process.user_code import user_error
from orhpc.rollout.functions import load_function
from orhpc.types import PromptGroup

GroupFilter = Callable[[PromptGroup], bool]
"""Returns whether a group is trained on; raises UserCodeError."""


def load_filter(setting: str) -> GroupFilter | None:
    """Return the user's filter; None if ``setting`` is not a function.

    Raises:
        ConfigError: there is no such function.
        UserCodeError: importing its module raises.
    """
    if setting in GROUP_FILTERS:
        return None
    function: Callable[[PromptGroup], Any] = load_function(setting, "rollout.filter")
    what = f"rollout.filter: {setting}"

    def keep(group: PromptGroup) -> bool:
        try:
            found = function(group)
        except Exception as error:
            raise user_error(what, error) from error
        if not isinstance(found, bool | np.bool_):  # comparisons of numpy's numbers give the latter
            raise UserCodeError(f"{what} returned {repr(found)[:40]}, which is neither True nor False")
        return bool(found)

    return keep
