"""Files that a profiled step writes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.train.profile import covered, traced


def config(ranks: list[int]) -> Config:
    placement = {"device": "cpu", "devices_per_node": 4}
    environments = {"a/b": {"serve": "letters"}}
    train = {"profile_ranks": ranks}
    engine = {"backend": "cpu", "tp": 1}
    return Config.model_validate(
        {"placement": placement, "environments": environments, "train": train, "engine": engine}
    )


def work() -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)


def test_the_ranks_asked_for_write_and_no_others(tmp_path: Path) -> None:
    for rank in range(4):
        with traced(config([1, 3]), str(tmp_path / "step_2"), rank):
            work()
    names = {p.name for p in (tmp_path / "step_2").iterdir()}
    assert names == {"rank_001.txt", "rank_001.json.gz", "rank_003.txt", "rank_003.json.gz"}
    assert "aten::mm" in (tmp_path / "step_2" / "rank_003.txt").read_text()
    with traced(config([1]), "", 1):
        work()


def test_what_fails_is_not_traced_and_what_cannot_be_written_does_not_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), traced(config([0]), str(tmp_path / "step_2"), 0):
        work()
        _ = 1 // 0
    assert not (tmp_path / "step_2").exists()
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING), traced(config([0]), str(tmp_path / "file" / "step_2"), 0):
        work()
    assert "no trace of rank 0" in caplog.text


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.profile_ranks: ranks are 0 to 3"):
        config([4])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_what_intervals_cover(pairs: list[tuple[int, int]]) -> None:
    spans = [(min(pair), max(pair)) for pair in pairs]
    assert covered(spans) == len({i for a, b in spans for i in range(a, b)})
