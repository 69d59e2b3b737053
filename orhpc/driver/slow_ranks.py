"""Reports trainer ranks that compute slower than their peers, and ends the attempt without their nodes."""

from __future__ import annotations

from orhpc.driver.fleet import Trainers
from orhpc.driver.fleet.pace_watch import STEPS, SlowRank
from orhpc.driver.run import Run
from orhpc.errors import SlowNode


def report_slow_ranks(run: Run, trainers: Trainers) -> None:
    """Report ranks that have become slow.

    Raises:
        SlowNode: the job is requeued without their nodes (``slurm.exclude_slow_nodes``).
    """
    leaves = run.config.slurm.exclude_slow_nodes and run.is_job
    lines = [_report(run, slow, leaves=leaves) for slow in trainers.paces.take()]
    if lines and leaves:
        raise SlowNode("; ".join(lines))


def _report(run: Run, slow: SlowRank, *, leaves: bool) -> str:
    place = run.placement.trainers[slow.rank]
    node = run.placement.nodes[place.node].name
    device = f"GPU {place.device} of {node}" if run.config.placement.device == "cuda" else node
    line = (
        f"trainer rank {slow.rank} ({device}) has computed {slow.ratio:.1f} times slower than the others for "
        f"{STEPS} steps"
    )
    run.events.write("slow_rank", rank=slow.rank, node=node, ratio=slow.ratio, excluded=leaves)
    run.notice(line if leaves else f"{line}; look at its clocks and temperature, or exclude {node}")
    return line
