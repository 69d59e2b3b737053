"""Checks of a node at each start of the job, each with a one-line verdict."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT, NodeLost, OrhpcError, PreflightError, policy_of
from orhpc.launch.checks import commit_space, host_memory, internet
from orhpc.launch.command_line import nodes_of_job, split_command_line
from orhpc.launch.slurm.job import Job, this_node
from orhpc.process.ports import free_ports
from orhpc.rundir import RunDir

_COMMAND_TIMEOUT_S = 120.0
_LEAST_FREE = 2e9
_MOST_SKEW_S = 30.0
_NOT_THE_NODES = ("run directory", "internet", "memory")
"""Checks that any other node would fail too."""
_GPU_QUERY = "name,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"


class BadNode(NodeLost):
    """A node failed its health check: the job is requeued without it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check."""

    check: str
    good: bool
    line: str


def node_verdicts(config: Config, job: Job, folder: Path) -> list[Verdict]:
    """Run every check of this node; ``folder`` is on the shared filesystem."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("network", lambda: this_node(job, config.slurm.interface).address),
        ("disk", lambda: _disk([Path("/tmp"), Path("/dev/shm")])),  # noqa: S108 - only its free space is read
        ("run directory", lambda: commit_space.check(config, RunDir(folder))),
        ("memory", lambda: host_memory.check(config)),
        ("clock", lambda: _clock(folder)),
        ("internet", lambda: internet.survey(config).line),
        ("ports", lambda: f"{free_ports(300, '127.0.0.1')[0]} and others are free"),
    ]
    if config.placement.device == "cuda":
        checks.append(("gpus", lambda: _gpus(config.placement.devices_per_node)))
        checks.append(("nvlink", _nvlink))
    if config.slurm.health_command is not None:
        command = config.slurm.health_command
        checks.append(("health command", lambda: _health(command)))
    return [_verdict(name, check) for name, check in checks]


def require(config: Config, job: Job, rundir: RunDir) -> None:
    """Raise BadNode for the first failed check, or PreflightError if other nodes would fail it too."""
    for verdict in node_verdicts(config, job, rundir.path):
        if not verdict.good:
            kind = PreflightError if verdict.check in _NOT_THE_NODES else BadNode
            raise kind(f"{job.node_name}: {verdict.check}: {verdict.line}")


def _verdict(name: str, check: Callable[[], str]) -> Verdict:
    try:
        return Verdict(name, True, check())
    except (OrhpcError, OSError) as error:
        return Verdict(name, False, " ".join(str(error).split()))


def _disk(folders: Sequence[Path]) -> str:
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    short = [
        f"{folder} has {size / 1e9:.1f} GB free" for folder, size in free.items() if size < _LEAST_FREE / 10
    ]
    if short:
        raise PreflightError(short[0])
    return ", ".join(f"{folder} {size / 1e9:.0f} GB free" for folder, size in free.items())


def _clock(folder: Path) -> str:
    """Compare this node's clock with the modification time that the shared filesystem gives a new file."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as probe:
        before = time.time()
        probe.write(b"x")
        probe.flush()
        os.fsync(probe.fileno())
        stamp, after = os.fstat(probe.fileno()).st_mtime, time.time()
    skew = max(before - stamp, stamp - after, 0.0)
    if skew > _MOST_SKEW_S:
        raise PreflightError(f"{skew:.0f} s away from the clock of {folder}; is NTP running?")
    return f"within {max(skew, 0.1):.1f} s of the clock of {folder}"


def _nvlink() -> str:
    """Check for failed links: GPUs of one model must have equally many."""
    try:
        result = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, timeout=60, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        raise PreflightError("nvidia-smi does not answer") from None
    return nvlink_verdict(result.stdout)


def nvlink_verdict(status: str) -> str:
    """Check the output of ``nvidia-smi nvlink --status``.

    Raises:
        PreflightError: a GPU has fewer active links than another of its model.
    """
    active: dict[str, dict[str, int]] = {}
    gpu, model = "", ""
    for line in status.splitlines():
        if heading := re.match(r"GPU (\d+): ([^(]*)", line):
            gpu, model = heading[1], heading[2].strip()
            active.setdefault(model, {})[gpu] = 0
        elif gpu and re.match(r"\s+Link \d+: [\d.]+ GB/s", line):
            active[model][gpu] += 1
    for links in active.values():
        most = max(links.values())
        if short := [g for g, n in links.items() if n < most]:
            raise PreflightError(f"GPU {short[0]} has {links[short[0]]} active NVLinks, others have {most}")
    counts = {n for links in active.values() for n in links.values()}
    return f"{max(counts)} links a GPU are active" if counts and max(counts) else "no NVLink here"


def _gpus(wanted: int) -> str:
    command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise PreflightError("nvidia-smi is not installed") from None
    except subprocess.TimeoutExpired:
        raise PreflightError("nvidia-smi does not answer") from None
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines() if line.strip()]
    if result.returncode or len(rows) < wanted:
        why = f"; {' '.join(result.stderr.split())[:200]}" if result.stderr.strip() else ""
        raise PreflightError(f"found {len(rows)}, need {wanted}{why}")
    for index, (_, ecc, slow) in enumerate(rows):
        if ecc.isdigit() and int(ecc):
            raise PreflightError(f"GPU {index}: {ecc} uncorrected memory errors")
        if slow == "Active":
            raise PreflightError(f"GPU {index}: the hardware has slowed down its clocks")
    return f"{len(rows)} x {rows[0][0]}"


def _health(command: str) -> str:
    try:
        result = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PreflightError(f"no end within {_COMMAND_TIMEOUT_S:.0f} s") from None
    output = (result.stdout + result.stderr).strip().splitlines()
    if result.returncode:
        raise PreflightError(f"exit {result.returncode}: {output[-1][:200] if output else 'no output'}")
    return output[-1][:200] if output else "passed"


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m orhpc.launch.checks.preflight [CONFIG] [key=value ...]``: a line for each check."""
    try:
        path, overrides = split_command_line(sys.argv[1:] if arguments is None else arguments)
        job = Job.from_environment()
        config = load_config(path, [*overrides, nodes_of_job(path, overrides, job.nodes)])
        verdicts = node_verdicts(config, job, Path.cwd())
    except OrhpcError as error:
        print(f"orhpc: {error}", file=sys.stderr)
        return policy_of(error).exit_code
    for verdict in verdicts:
        print(
            f"{job.node_name}  {'ok ' if verdict.good else 'BAD'}  {verdict.check}: {verdict.line}",
            flush=True,
        )
    return EXIT_OK if all(v.good for v in verdicts) else EXIT_PREFLIGHT


if __name__ == "__main__":
    sys.exit(main())
