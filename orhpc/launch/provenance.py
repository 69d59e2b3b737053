"""What an attempt ran: versions, the user's code with its changes, the machine, the seed, the first weights.

The first node writes ``attempts/NNN/provenance.json`` when the attempt begins, and, if the user's folder has
changes that are not committed to git, ``attempts/NNN/code.diff``.  What cannot be found out is null and never
stops a start.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from orhpc.config import Config
from orhpc.errors import ModelError
from orhpc.models.folders import find_model
from orhpc.process.driver_gpus import driver_gpus
from orhpc.process.secrets import redact
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.origin import PROVENANCE, origin_of_load, origin_of_model, provenance
from orhpc.rundir.sealed import write_sealed

PACKAGES = (
    *("torch", "transformers", "ray", "openreward", "submitit", "wandb", "h5py", "numpy", "pydantic"),
    *("safetensors", "tokenizers", "tensorboard", "mlflow-skinny", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("sglang", "sglang-router", "megatron-core", "transformer-engine", "reasoning-gym"),
)
_MOST_DIFF = 1 << 20
"""Bytes of the stored difference; more is cut off, and said so."""
_TIMEOUT_S = 10.0
_QUIET_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
"""git without the programs that a repository may name, and without writing to it."""


def write_provenance(attempt: Path, config: Config) -> None:
    """Write the files into an attempt's folder."""
    code = Path.cwd()
    record: dict[str, Any] = {
        "orhpc": {"version": _version("orhpc"), "commit": _commit(Path(__file__).parent)},
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "python": sys.version.split()[0],
        "interpreter": sys.executable,
        "host": socket.gethostname(),
        "platform": sysconfig.get_platform(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "gpus": gpus(),
        "command": [redact(word) for word in sys.argv],
        "code": {"folder": str(code), "commit": _commit(code), "changed": False},
        "seed": config.run.seed,
        "model": {"path": config.model.path, "revision": config.model.revision},
        "origin": _origin(RunDir(attempt.parents[1]), config),
    }
    if record["code"]["commit"] is not None and (difference := _difference(code)):
        record["code"]["changed"] = True
        write_atomic(attempt / "code.diff", difference)
    write_sealed(attempt / PROVENANCE, record)


def _origin(run: RunDir, config: Config) -> dict[str, Any] | None:
    """The commit or export of another run that this run started from; None: a base model.

    Once the run has a commit, it is what the first attempt recorded: the other run may have gone on.
    """
    lineage = run.lineage()
    if lineage and (known := provenance(run, lineage[-1].attempt)):
        return known.get("origin")
    if config.checkpoint.load is not None:
        return origin_of_load(Path(config.checkpoint.load))
    try:
        return origin_of_model(find_model(config.model.path, config.model.revision))
    except ModelError:
        return None


def gpus() -> list[dict[str, str]] | None:
    """Names, memory and driver of this machine's GPUs, by nvidia-smi; None without any."""
    found = [
        {"name": gpu.name, "memory": f"{gpu.memory_mib} MiB", "driver": gpu.driver} for gpu in driver_gpus()
    ]
    return found or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """The commit that a folder's repository has checked out; None outside a repository."""
    output = _output(*_QUIET_GIT, "-C", str(folder), "rev-parse", "HEAD")
    return output.strip() if output is not None else None


def _difference(folder: Path) -> str:
    """Changes of tracked files below a folder since the commit, and the names of untracked ones."""
    diff = ("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--", ".")
    changes = _output(*_QUIET_GIT, "-C", str(folder), *diff) or ""
    listed = _output(*_QUIET_GIT, "-C", str(folder), "ls-files", "--others", "--exclude-standard", "--", ".")
    untracked = "".join(f"# not tracked by git: {name}\n" for name in (listed or "").splitlines()[:1000])
    text = redact(untracked + changes)
    if len(text.encode()) <= _MOST_DIFF:
        return text
    cut = text.encode()[:_MOST_DIFF].decode(errors="ignore")
    return f"{cut}\n# cut off after {_MOST_DIFF} bytes\n"


def _output(*command: str) -> str | None:
    """Standard output of a program; None if it is missing, fails or takes too long."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
