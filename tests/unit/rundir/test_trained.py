"""What training computed for a step's rollouts is read as it was written, and damage is detected."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.errors import RecordError
from orhpc.rundir.trained import TrainedRollout, read_trained, write_trained

_VALUES = st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=30)
_ROLLOUTS = st.dictionaries(
    st.from_regex(r"[0-9]{1,6}\.[0-9]{1,3}", fullmatch=True),
    st.tuples(st.floats(-10, 10), _VALUES),
    max_size=6,
)


@pytest.mark.slow
@given(_ROLLOUTS)
def test_every_rollout_is_read_as_it_was_written(rollouts: dict[str, tuple[float, list[float]]]) -> None:
    written = {
        name: TrainedRollout(advantage, np.array(values, np.float32))
        for name, (advantage, values) in rollouts.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        write_trained(Path(folder), written)
        found = read_trained(Path(folder))
    assert found.keys() == written.keys()
    for name, rollout in found.items():
        assert rollout.advantage == written[name].advantage
        assert np.array_equal(rollout.logprobs_T, written[name].logprobs_T)


def test_a_step_with_a_critic_has_advantages_and_values_of_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = {
        f"0.{i}": TrainedRollout(0.5, *rng.normal(size=(3, length)).astype(np.float32))
        for i, length in enumerate((3, 1, 7))
    }
    write_trained(tmp_path, written)
    for name, rollout in read_trained(tmp_path).items():
        assert np.array_equal(rollout.advantages_T, written[name].advantages_T)
        assert np.array_equal(rollout.values_T, written[name].values_T)


def test_a_step_of_an_earlier_release_has_none(tmp_path: Path) -> None:
    assert read_trained(tmp_path) == {}


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    write_trained(tmp_path, {"0.0": TrainedRollout(0.5, np.array([0, -1], np.float32))})
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecordError, match=f"{path.name}.*damaged"):
        read_trained(tmp_path)
