"""What training computed for the rollouts of a step: advantages, log-probabilities, a critic's values.

One file beside the step's rollout records (:mod:`orhpc.rundir.record`), written after the update.  Only a
step with a critic has the arrays ``advantages`` and ``values``; earlier releases read its file without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from orhpc.rundir.sealed_hdf5 import open_hdf5, read_dataset, write_dataset, write_hdf5
from orhpc.types import Float32Array

FORMAT = "orhpc-trained-1"
_NAME = "trained.h5"
_INDEX = np.dtype([("offset", "i8"), ("length", "i8"), ("advantage", "f8")])


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """One rollout as the update used it."""

    advantage: float
    """Of each of its trained tokens, without the KL penalty of ``algorithm.use_kl_reward``; if
    :attr:`advantages_T` is there, its mean, with the penalty."""
    logprobs_T: Float32Array
    """The trainer's log-probability of each token under the weights at the start of the step; 0 where the
    loss mask is False.  Aligned with ``Rollout.tokens_T``."""
    advantages_T: Float32Array | None = None
    """Of each token, in the same form; None without a critic."""
    values_T: Float32Array | None = None
    """The critic's value before each token, under its weights at the start of the step; None without one."""


def write_trained(folder: Path, rollouts: Mapping[str, TrainedRollout]) -> None:
    """Write the file of one step; either all rollouts have advantages and values of their tokens, or none.

    Raises:
        StorageRefused: the filesystem refuses writes; the folder is unchanged.
    """

    def write(file: h5py.File) -> None:
        index = np.zeros(len(rollouts), _INDEX)
        offset = 0
        for row, rollout in zip(index, rollouts.values(), strict=True):
            length = len(rollout.logprobs_T)
            row["offset"], row["length"], row["advantage"] = offset, length, rollout.advantage
            offset += length
        file.create_dataset("index", data=index)
        file.create_dataset("id", data=list(rollouts), dtype=h5py.string_dtype())
        parts = {
            "logprobs": [rollout.logprobs_T for rollout in rollouts.values()],
            "advantages": [r.advantages_T for r in rollouts.values() if r.advantages_T is not None],
            "values": [r.values_T for r in rollouts.values() if r.values_T is not None],
        }
        for name, arrays in parts.items():
            if arrays or name == "logprobs":
                write_dataset(file, name, np.concatenate([np.zeros(0, np.float32), *arrays]))

    write_hdf5(folder / _NAME, FORMAT, write)


def read_trained(folder: Path) -> dict[str, TrainedRollout]:
    """Read the file of one step, by rollout id; empty if the step has none, as in runs of earlier releases.

    Raises:
        RecordError: the file is damaged.
        StorageRefused: the filesystem refuses to read it.
    """
    path = folder / _NAME
    if not path.exists():
        return {}
    with open_hdf5(path, FORMAT) as file:
        index = read_dataset(file, path, "index")
        ids = [name.decode() for name in read_dataset(file, path, "id")]
        arrays = [read_dataset(file, path, "logprobs")]
        arrays += [read_dataset(file, path, name) for name in ("advantages", "values") if name in file]
    found: dict[str, TrainedRollout] = {}
    for name, row in zip(ids, index, strict=True):
        own = slice(int(row["offset"]), int(row["offset"] + row["length"]))
        found[name] = TrainedRollout(float(row["advantage"]), *(array[own] for array in arrays))
    return found
