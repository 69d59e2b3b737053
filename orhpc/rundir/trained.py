"""What training computed for the rollouts of a step: advantages and the trainer's log-probabilities.

One file beside the step's rollout records (:mod:`orhpc.rundir.record`), written after the update.
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
    """Of each of its sampled tokens."""
    logprobs_T: Float32Array
    """The trainer's log-probability of each token under the weights at the start of the step; 0 where the
    loss mask is False.  Aligned with ``Rollout.tokens_T``."""


def write_trained(folder: Path, rollouts: Mapping[str, TrainedRollout]) -> None:
    """Write the file of one step.

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
        arrays = [rollout.logprobs_T for rollout in rollouts.values()]
        write_dataset(file, "logprobs", np.concatenate([np.zeros(0, np.float32), *arrays]))

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
        logprobs = read_dataset(file, path, "logprobs")
    return {
        name: TrainedRollout(
            advantage=float(row["advantage"]),
            logprobs_T=logprobs[int(row["offset"]) : int(row["offset"] + row["length"])],
        )
        for name, row in zip(ids, index, strict=True)
    }
