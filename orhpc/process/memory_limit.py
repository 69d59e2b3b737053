"""The memory of this node for this job, what of it is free, and the processes that its limit has killed.

SLURM reports kills only after a step has ended, if at all; the counter of the job's control group is updated
at once.  See ``memory.events`` in the kernel's cgroup-v2.rst, and ``memory.oom_control`` of version 1
(memory.rst), which counts only in the group of the killed process.
"""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_VERSION_2 = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


_MACHINE = Path("/proc/meminfo")


def memory_bytes(own: Path = _OWN, root: Path = _ROOT, machine: Path = _MACHINE) -> int:
    """The smaller of this node's memory and the job's limit, in bytes; 0 if neither is known."""
    sizes = _of_machine("MemTotal", machine)
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits = [group / "memory.max" for group in _up_to_the_job(root, path)]
        elif "memory" in controllers.split(","):
            limits = [g / "memory.limit_in_bytes" for g in _up_to_the_job(root / "memory", path)]
        else:
            continue
        sizes += [int(text) for limit in limits if (text := _text(limit).strip()).isdigit()]
    return min(sizes, default=0)


def free_bytes(own: Path = _OWN, root: Path = _ROOT, machine: Path = _MACHINE) -> int:
    """Memory that this node's part of the job can still allocate, in bytes; 0 if it is not known.

    Pages of files can be reclaimed, but not those of shared memory (``memory.stat`` in the kernel's
    cgroup-v2.rst; ``total_cache`` and ``total_shmem`` in version 1).
    """
    sizes = _of_machine("MemAvailable", machine)
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups, names, file, shared = _up_to_the_job(root, path), _VERSION_2, "file", "shmem"
        elif "memory" in controllers.split(","):
            groups, names = _up_to_the_job(root / "memory", path), _VERSION_1
            file, shared = "total_cache", "total_shmem"
        else:
            continue
        for group in groups:
            limit, used = (_text(group / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
                reclaimable = max(0, int(stat.get(file, 0)) - int(stat.get(shared, 0)))
                sizes.append(max(0, int(limit) - int(used) + reclaimable))
    return min(sizes, default=0)


def _of_machine(name: str, machine: Path) -> list[int]:
    found = re.search(rf"^{name}: +(\d+) kB$", _text(machine), re.MULTILINE)
    return [int(found[1]) << 10] if found else []


def oom_kills(own: Path = _OWN, root: Path = _ROOT) -> int:
    """OOM kills so far in this process's control groups up to its job's; 0 without such a limit."""
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups, name = _up_to_the_job(root, path), "memory.events"
        elif "memory" in controllers.split(","):
            groups, name = _up_to_the_job(root / "memory", path), "memory.oom_control"
        else:
            continue
        if counts := [int(m[1]) for group in groups if (m := _COUNT.search(_text(group / name)))]:
            return max(counts)
    return 0


def machine_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """OOM kills so far of any process of this machine, by a job's limit or for lack of memory."""
    return sum(int(m[1]) for m in [_COUNT.search(_text(vmstat))] if m)


def kills() -> tuple[int, int]:
    """:func:`oom_kills` and :func:`machine_kills`."""
    return oom_kills(), machine_kills()


def verdict_since(before: tuple[int, int], now: tuple[int, int], node: str) -> str | None:
    """One line if :func:`kills` of a node rose from ``before`` to ``now``, else None."""
    if now[0] > before[0]:
        return _by_limit(node, now[0] - before[0])
    return _by_machine(node, now[1] - before[1]) if now[1] > before[1] else None


def _by_limit(node: str, count: int) -> str:
    return f"{node}: the kernel killed {count} of the job's processes for exceeding its memory"


def _by_machine(node: str, count: int) -> str:
    return f"{node}: the kernel killed {count} processes for lack of memory"


def _up_to_the_job(root: Path, path: str) -> list[Path]:
    """The control group of a path and its ancestors, up to and including the SLURM job's group."""
    parts = [p for p in path.split("/") if p]
    jobs = [i for i, part in enumerate(parts) if re.fullmatch(r"job_\d+", part)]
    if not jobs:
        return []
    return [root.joinpath(*parts[:end]) for end in range(len(parts), jobs[0], -1)]


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class MemoryWatch:
    """Reports processes that were killed for memory since this object was created."""

    def __init__(self) -> None:
        self._before = oom_kills()
        self._machine_before = machine_kills()

    def verdict(self, node: str) -> str | None:
        """One line if the job's limit caused kills since the last call, else None."""
        now, before = oom_kills(), self._before
        self._before = now
        if now <= before:
            return None
        return _by_limit(node, now - before)

    def verdict_on_machine(self, node: str) -> str | None:
        """One line if the kernel has killed any process on this machine for memory, else None.

        Evidence about a process that ended by SIGKILL: a job without a limit is killed only when the machine
        runs out of memory.
        """
        killed = machine_kills() - self._machine_before
        return _by_machine(node, killed) if killed > 0 else None
