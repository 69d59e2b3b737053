"""Functions that a config names are found, or refused in one line."""

from __future__ import annotations

import json

import pytest

from orhpc.errors import ConfigError
from orhpc.rollout.functions import load_function


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", "package.module:function"),
        ("json:", "package.module:function"),
        ("no.such.module:f", "cannot be imported"),
        ("json:no_such_function", "no function"),
        ("json:__doc__", "no function"),
    ],
)
def test_a_function_that_is_not_there_is_one_clear_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_function(name, "rollout.custom_reward")
    assert str(caught.value).startswith("rollout.custom_reward: ")
    assert "\n" not in str(caught.value)


def test_a_function_is_found() -> None:
    assert load_function("json:dumps", "x") is json.dumps
