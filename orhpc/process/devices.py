"""GPU numbering: from a device's index on the node to the name that CUDA uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orhpc.errors import PreflightError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(indices: Sequence[int], environment: Mapping[str, str]) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a process that may use these devices of the job.

    If a job got only some of a node's GPUs, the variable is already set; ``indices`` then
    refer to its entries.

    Raises:
        PreflightError: the job has fewer GPUs.
    """
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return ",".join(str(i) for i in indices)
    names = [name.strip() for name in given.split(",")]
    if max(indices) >= len(names):
        raise PreflightError(
            f"placement.devices_per_node: GPU {max(indices)} is requested, "
            f"but {VARIABLE}={given} names {len(names)}"
        )
    return ",".join(names[i] for i in indices)
