"""The values of a sweep on the command line: how they are split, combined and named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config.base import NAME
from orhpc.errors import ConfigError
from orhpc.launch.sweep.values import combine, name_of, split_overrides, split_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-6", ["1e-6"]),
        ("1e-6,1e-5", ["1e-6", "1e-5"]),
        ("[a,b]", ["[a,b]"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("[[1,2],[3]],null", ["[[1,2],[3]]", "null"]),
        ("{a: 1, b: 2},{a: 2}", ["{a: 1, b: 2}", "{a: 2}"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("['a,]b', c],d", ["['a,]b', c]", "d"]),
        ("it's,that's", ["it's", "that's"]),
        ("true, false", ["true", "false"]),
        ("", [""]),
    ],
)
def test_commas_inside_quotes_and_brackets_do_not_separate(text: str, values: list[str]) -> None:
    assert split_values(text, "k") == values


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["a.b=1,,2"], "an empty value"),
        (["a.b=1,"], "an empty value"),
        (["a.b=[1,2"], "a bracket is not closed"),
        (['a.b="x,y'], "a quote is not closed"),
        (["a.b=1,1"], "the value 1 appears twice"),
        (["a.b=1,2", "a.b=3"], "given twice"),
        (["run.name=a,b"], "each element of a sweep gets its own"),
    ],
)
def test_what_has_no_clear_meaning_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_overrides(overrides)


def test_values_are_combined_or_paired() -> None:
    varied = {"a": ["1", "2"], "b": ["x", "y", "z"]}
    assert split_overrides(["a=1,2", "c=[3,4]"]) == (["c=[3,4]"], {"a": ["1", "2"]})
    assert [tuple(row.values()) for row in combine(varied)] == [
        ("1", "x"), ("1", "y"), ("1", "z"), ("2", "x"), ("2", "y"), ("2", "z"),
    ]  # fmt: skip
    assert combine({"a": ["1", "2"], "b": ["x", "y"]}, zipped=True) == [
        {"a": "1", "b": "x"}, {"a": "2", "b": "y"},
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="a has 2, b has 3"):
        combine(varied, zipped=True)
    with pytest.raises(ConfigError, match="no setting has several values"):
        combine({})


def test_a_random_choice_is_a_part_of_the_grid_and_the_same_for_the_same_seed() -> None:
    varied = {"a": ["1", "2", "3"], "b": ["x", "y"]}
    grid = combine(varied)
    chosen = [combine(varied, number=4, seed=seed) for seed in range(20)]
    assert all(len(rows) == 4 and all(row in grid for row in rows) for rows in chosen)
    assert combine(varied, number=4, seed=7) == chosen[7]
    assert len({str(rows) for rows in chosen}) > 5
    assert combine(varied, number=6) == grid
    with pytest.raises(ConfigError, match="not between 1 and the 6 combinations"):
        combine(varied, number=7)
    huge = {f"k{i}": [str(n) for n in range(100)] for i in range(20)}
    assert len(combine(huge, number=5)) == 5
    with pytest.raises(ConfigError, match="are more than 1000; --random N"):
        combine(huge)


def test_a_name_says_the_values() -> None:
    assert name_of({"train.lr": "1e-6", "run.seed": "0"}, ()) == "lr-1e-6_seed-0"
    assert name_of({"model.path": "Qwen/Qwen3-0.6B"}, ()) == "path-Qwen3-0.6B"
    assert name_of({"a.x": "1", "b.x": "2"}, ()) == "a.x-1_b.x-2"
    first = name_of({"a.x": "[1,2]"}, ())
    other = name_of({"a.x": "[1 2]"}, {first})
    assert other != first
    assert name_of({"a.x": "y" * 300}, ()) != name_of({"a.x": "y" * 301}, ())


@given(st.dictionaries(st.text(min_size=1), st.text(), min_size=1, max_size=5))
def test_any_values_give_a_name_that_a_run_may_have(values: dict[str, str]) -> None:
    name = name_of(values, ())
    assert NAME.fullmatch(name)
    assert len(name) <= 80
