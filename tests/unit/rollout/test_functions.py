"""Functions that a config names are found, or refused in one line."""

from __future__ import annotations

import json

import pytest

from orhpc.errors import ConfigError
from orhpc.rollout.functions import load_function


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "package.module:function"),
        ("json:", "package.module:function"),
        ("no.such.module:f", "cannot be imported"),
        ("json:no_such_function", "no function"),
        ("json:__doc__", "no function"),
    ],
)
def test_a_missing_function_gives_a_one_line_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(name, "rollout.custom_reward")
    assert str(caught.value).startswith("rollout.custom_reward: ")
    assert "\n" not in str(caught.value)


def test_a_function_is_found() -> None:
    assert load_function("json:dumps", "x") is json.dumps
