"""The rollout record returns the recorded data, and detects when they are damaged."""

from __future__ import annotations

import contextlib
import errno
import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import RolloutSettings
from orhpc.driver.bring_up import finished_groups
from orhpc.errors import GroupDamaged, RecordError
from orhpc.rollout.producer import Position
from orhpc.rundir import RunDir, sealed_hdf5
from orhpc.rundir.record import RolloutFile, read_arrays, read_step, record_path, write_rollouts
from orhpc.train.fetch import fetch_arrays
from orhpc.types import FinishReason, Location, Rollout, RolloutEnd, Task, Turn
from orhpc.wire.routes import RouteShare


def make_rollout(
    group: int, sample: int, length: int, *, seed: int = 0, routes: bool = False, reward: float | None = 0.5
) -> Rollout:
    rng = np.random.default_rng([seed, group, sample])
    mask = rng.random(length) < 0.5
    return Rollout(
        id=f"{group}.{sample}",
        group_id=group,
        sample=sample,
        task=Task("org/env", "train", 7),
        seed=2**63 + group,
        tokens_T=rng.integers(0, 50_000, length, dtype=np.int32),
        loss_mask_T=mask,
        logprobs_T=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions_T=np.where(mask, 3, -1).astype(np.int32),
        end=RolloutEnd.TERMINAL if reward is not None else RolloutEnd.FAILED,
        reward=reward,
        turns=[Turn(1, 2, FinishReason.STOP, 3, tool_calls=1, malformed=2, reward=0.25)],
        messages=[{"role": "user", "content": "grüße\n\x00<|im_end|>"}],
        error=None if reward is not None else "it broke",
        routes=rng.integers(0, 255, (length - 1, 2, 3), dtype=np.uint8) if routes else None,
        seconds=1.5,
    )


def same(a: Rollout, b: Rollout) -> bool:
    for name in Rollout.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            if not (np.array_equal(x, y) and x.dtype == y.dtype):
                return False
        elif x != y:
            return False
    return True


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 9),
)
def test_a_record_is_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, bool, bool]], seed: int
) -> None:
    path = tmp_path_factory.mktemp("record") / "a001.worker_000.h5"
    rollouts = [
        make_rollout(i // 2, i % 2, length, seed=seed, routes=routes, reward=0.5 if scored else None)
        for i, (length, routes, scored) in enumerate(shapes)
    ]
    write_rollouts(path, rollouts, trained=[rollouts[0].id])
    with RolloutFile(path) as record:
        assert len(record) == len(rollouts)
        for row, rollout in enumerate(rollouts):
            assert same(record.rollout(row), rollout)
            summary = record.summary(row)
            assert (summary.length, summary.response_tokens) == (rollout.length, rollout.response_tokens)
            assert summary.reward == rollout.reward
            assert record.trained(row) == (row == 0)
            arrays = read_arrays(summary.location.file or "", summary.location.row)
            assert np.array_equal(arrays["tokens_T"], rollout.tokens_T)


def test_routes_are_omitted_if_not_requested(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    write_rollouts(path, [make_rollout(0, 0, 9, routes=True)], routes=False)
    with RolloutFile(path) as record:
        assert record.routes(0) is None


def test_a_pipeline_stage_reads_only_its_own_layers(tmp_path: Path) -> None:
    rollout = make_rollout(0, 0, 9, routes=True)
    path = record_path(tmp_path, 1, 0)
    write_rollouts(path, [rollout])
    arrays = read_arrays(str(path), 0, routes=RouteShare(1, (1,)))
    assert rollout.routes is not None
    np.testing.assert_array_equal(arrays["routes"], rollout.routes[:, 1:])


def test_the_newest_attempt_s_record_of_a_step_is_read(tmp_path: Path) -> None:
    old, new = make_rollout(0, 0, 5, seed=1), make_rollout(0, 0, 6, seed=2)
    write_rollouts(record_path(tmp_path, 1, 0), [old], trained=["0.0"])
    write_rollouts(record_path(tmp_path, 2, 0), [new, make_rollout(1, 0, 4)], trained=["0.0"])
    write_rollouts(record_path(tmp_path, 2, 1), [make_rollout(0, 1, 7)], trained=["0.1"])
    assert [(s.id, s.length) for s in read_step(tmp_path)] == [("0.0", 6), ("0.1", 7)]
    assert len(read_step(tmp_path, trained_only=False)) == 3


def test_a_changed_byte_is_an_error_not_other_data(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    rollout = make_rollout(0, 0, 4000)
    write_rollouts(path, [rollout])
    clean = path.read_bytes()
    refused = changed = 0
    for at in range(0, len(clean), 997):
        data = bytearray(clean)
        data[at] ^= 0x40
        path.write_bytes(data)
        try:
            tokens = read_arrays(str(path), 0)["tokens_T"]
            changed += not np.array_equal(tokens, rollout.tokens_T)
        except RecordError:
            refused += 1
    assert refused > 0
    assert changed == 0


@pytest.mark.parametrize("content", [None, b"", b"not hdf5 at all"])
def test_a_file_that_is_not_a_record_gives_one_clear_error_line(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "x.h5"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=r"x\.h5: "):
        RolloutFile(path)


def test_an_empty_folder_is_not_a_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="contains no rollout record"):
        read_step(tmp_path)


class _Full(sealed_hdf5._Target):
    """A file on a disk with a limited number of free bytes."""

    room = 0

    def _write_some(self, data: memoryview) -> int:
        if self._failed is not None:
            return super()._write_some(data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = super()._write_some(data[: self.room])
        self.room -= done
        return done


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(0, 100), st.binary(min_size=1, max_size=60)), min_size=1, max_size=12),
)
def test_data_refused_by_a_full_disk_can_still_be_read(room: int, writes: list[tuple[int, bytes]]) -> None:
    """HDF5 reads back its own data; after a refused write it must find the same data."""
    reference = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, _Full(Path(folder, "x"), "w+") as target:
        target.room = room
        for place, data in writes:
            for file in (reference, target):
                file.seek(place)
                assert file.write(data) == len(data)
                assert file.tell() == place + len(data)
        target.seek(0)
        assert target.read() == reference.getvalue()
        refused = sum(len(data) for _, data in writes) > room
        expected = pytest.raises(OSError, match="No space left") if refused else contextlib.nullcontext()
        with expected, target.reporting_failure():
            pass


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("stored") / "group_3.h5"
    write_rollouts(path, [make_rollout(3, i, 40 + i, routes=True) for i in range(4)], trained={"3.1"})
    return path.read_bytes()


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_changed_byte_at_any_position_is_detected(stored: bytes, data: st.DataObject) -> None:
    """Without a checksum of index and texts, 24 of 1,500 single flips changed training data silently."""
    place = data.draw(st.integers(0, len(stored) - 1))
    other = data.draw(st.integers(1, 255))
    changed = bytearray(stored)
    changed[place] ^= other
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "group_3.h5")
        path.write_bytes(changed)
        with pytest.raises(RecordError, match=r"group_3\.h5.*damaged"):
            RolloutFile(path)


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1, -45])
def test_a_truncated_file_is_detected(stored: bytes, tmp_path: Path, kept: float) -> None:
    path = tmp_path / "group_3.h5"
    path.write_bytes(stored[: int(kept * len(stored)) if isinstance(kept, float) else kept])
    with pytest.raises(RecordError, match="damaged"):
        RolloutFile(path)


def test_a_damaged_buffered_group_is_generated_again(stored: bytes, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    good, bad = run.buffer / "group_3.h5", run.buffer / "group_4.h5"
    good.write_bytes(stored)
    bad.write_bytes(stored[:2000] + bytes([stored[2000] ^ 4]) + stored[2001:])
    with pytest.raises(GroupDamaged, match=r"group_4\.h5.*rolled out again"):
        fetch_arrays(Location(file=str(bad), row=0))
    with pytest.raises(RecordError, match="damaged"):
        fetch_arrays(Location(file=str(bad.rename(tmp_path / "a001.worker_000.h5")), row=0))
    (tmp_path / "a001.worker_000.h5").rename(bad)
    assert [g.id for g in finished_groups(run, Position(next_group=3), 3, RolloutSettings())] == [3]
    assert not bad.exists()
    assert good.exists()


def test_a_summary_counts_the_tokens_of_each_policy_version(tmp_path: Path) -> None:
    rollouts = [make_rollout(3, sample, 40) for sample in range(2)]
    sampled = np.flatnonzero(rollouts[0].loss_mask_T)
    rollouts[0].versions_T[sampled[:4]] = 1
    write_rollouts(tmp_path / "group_3.h5", rollouts)
    with RolloutFile(tmp_path / "group_3.h5") as record:
        several, one = record.summary(0), record.summary(1)
    assert several.version_tokens == ((1, 4), (3, len(sampled) - 4))
    assert [several.tokens_since(version) for version in (1, 2, 4)] == [len(sampled), len(sampled) - 4, 0]
    assert one.version_tokens == ()
    assert [one.tokens_since(version) for version in (3, 4)] == [one.response_tokens, 0]
