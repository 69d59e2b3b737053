"""GPU numbers: from a device's place on the node to what CUDA calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orhpc.errors import PreflightError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(indices: Sequence[int], environment: Mapping[str, str]) -> str:
    """The value of ``CUDA_VISIBLE_DEVICES`` for a process that may use these devices of the job's.

    Inside a job that was given some of a node's GPUs the variable is set already; ``indices`` then
    count within it.

    Raises:
        PreflightError: the job was given fewer GPUs.
    """
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return ",".join(str(i) for i in indices)
    names = [name.strip() for name in given.split(",")]
    if max(indices) >= len(names):
        raise PreflightError(
            f"placement.devices_per_node: GPU {max(indices)} is asked for, "
            f"but {VARIABLE}={given} names {len(names)}"
        )
    return ",".join(names[i] for i in indices)
