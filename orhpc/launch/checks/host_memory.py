"""Whether a node holds in memory what the plan puts there; where not, the kernel would end the job."""

from __future__ import annotations

from orhpc.config import Config
from orhpc.errors import ModelError
from orhpc.launch.checks.memory_limit import memory_bytes
from orhpc.plan.memory import GIB
from orhpc.plan.run_plan import DEFAULT_DEVICE_GIB, check_host, host_parts, make_plan


def check(config: Config) -> str:
    """Say what this node has and needs.

    Raises:
        PreflightError: it has less.
    """
    own = config.placement.host_memory_gib
    there = memory_bytes() if own is None else int(own * GIB)
    if not there:
        return "nobody says how much there is"
    has = f"{there / GIB:.0f} GiB"
    if config.placement.device != "cuda":
        return has
    try:
        run = make_plan(config, DEFAULT_DEVICE_GIB)
    except ModelError as error:  # not here yet, or of a family that nothing is planned of
        return f"{has}; what is needed is not known: {error}"
    check_host(run, there)
    return f"{has}, {sum(host_parts(run).values()) / GIB:.0f} needed beside what processes take"


def check_told(config: Config) -> str:
    """The same before there are nodes: of theirs, only ``placement.host_memory_gib`` can tell here.

    Raises:
        PreflightError: they have less than they need.
    """
    if config.placement.host_memory_gib is None:
        return "each node looks at its own (placement.host_memory_gib: null)"
    return check(config)
