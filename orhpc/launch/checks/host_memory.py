"""Check that a node has enough host memory for the plan; otherwise the kernel would kill the job."""

from __future__ import annotations

from orhpc.config import Config
from orhpc.errors import ModelError
from orhpc.plan.memory import GIB
from orhpc.plan.run_plan import DEFAULT_DEVICE_GIB, check_host, host_parts, make_plan
from orhpc.process.memory_limit import memory_bytes


def check(config: Config) -> str:
    """Return a line with the host memory that this node has and needs.

    Raises:
        PreflightError: it has less than it needs.
    """
    own = config.placement.host_memory_gib
    available = memory_bytes() if own is None else int(own * GIB)
    if not available:
        return "the available memory is not known"
    has = f"{available / GIB:.0f} GiB"
    if config.placement.device != "cuda":
        return has
    try:
        run = make_plan(config, DEFAULT_DEVICE_GIB)
    except ModelError as error:  # the model is not here yet, or the planner does not support its family
        return f"{has}; the need is not known: {error}"
    check_host(run, available)
    return f"{has}, {sum(host_parts(run).values()) / GIB:.0f} needed in addition to the processes"


def check_configured(config: Config) -> str:
    """Check before the job has nodes, when only ``placement.host_memory_gib`` gives their memory.

    Raises:
        PreflightError: the nodes have less than they need.
    """
    if config.placement.host_memory_gib is None:
        return "each node checks its own (placement.host_memory_gib: null)"
    return check(config)
