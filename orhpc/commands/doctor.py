"""``orhpc doctor [CONFIG]``: report missing or incompatible software, and the commands that install it.

On a login node it reports whether jobs can be submitted and models fetched; on a machine with GPUs, or inside
a job (``srun orhpc doctor``), whether jobs can run.  It loads neither torch nor ray: versions come from the
metadata of the installed packages.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT, OrhpcError
from orhpc.launch.checks import commit_space, internet
from orhpc.launch.command_line import split_command_line
from orhpc.launch.slurm import scheduler
from orhpc.models.folders import has_hub_token, hub_cache
from orhpc.models.hub import offline_variable
from orhpc.plan.layout import CUBLAS_AT_ONCE
from orhpc.process.driver_gpus import driver_gpus

_LEAST_FILES = 4096
_LEAST_SHM = 8 << 30
_DRIVER_OF_CUDA = {12: 525, 13: 580}
"""Oldest driver branch of each major release of CUDA (NVIDIA's CUDA compatibility guide, minor version
compatibility)."""
_HOPPER = 9.0
_LARGE = ("torch", "transformers", "sglang", "ray", "megatron.core", "transformer_engine")
"""Packages with thousands of modules, which the processes of a run import."""
_NEWER = {"python_version": "3.13", "python_full_version": "3.13.0"}
"""A Python version for which every extra has its packages."""
_EXTRAS = {
    "run": "the nodes of a job",
    "sglang": "engines on GPUs",
    "megatron": "train.backend: megatron",
    "router": "spreading requests over several engines",
    "gym": "environments.*.serve: reasoning-gym",
    "data": "environments.*.data: datasets, and the verifier math",
    "tensorboard": "tensorboard.enabled",
    "mlflow": "mlflow.enabled",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the output."""

    verdict: Literal["ok", "--", "BAD"]
    """``--``: absent, but not needed here."""
    what: str
    line: str


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments", nargs="*", metavar="CONFIG | key=value", help="report what this config needs"
    )
    parser.set_defaults(run=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Print one line per finding; return 3 when something needed here is missing."""
    config = load_config(*split_command_line(options.arguments)) if options.arguments else None
    good = True
    for finding in examine(config):
        print(f"{finding.verdict:<4} {finding.what}: {finding.line}", flush=True)
        good &= finding.verdict != "BAD"
    return EXIT_OK if good else EXIT_PREFLIGHT


def examine(config: Config | None) -> Iterator[Finding]:
    """Yield all findings: Python, packages, GPUs, machine, SLURM, model cache, external servers."""
    role = "a node of a job" if "SLURM_JOB_ID" in os.environ else "not inside a job"
    release = importlib.metadata.version("orhpc")
    yield Finding("ok", "orhpc", f"{release}, Python {sys.version.split()[0]} ({sys.executable}), {role}")
    needed = _extras_needed(config)
    for extra in _EXTRAS:
        yield _extra(extra, extra in needed)
    yield from _conflicts()
    yield from _cublas()
    yield from _bytecode()
    yield from _gpus(config)
    yield from _machine()
    yield _slurm()
    yield _hub()
    if config is not None:
        yield _attempt("internet", lambda: internet.survey(config).line)


# --- packages -------------------------------------------------------------------------------------


def _extras_needed(config: Config | None) -> set[str]:
    """Extras that this machine must have, from the config, or from whether it has GPUs or runs a job."""
    runs_here = "SLURM_JOB_ID" in os.environ or shutil.which("nvidia-smi") is not None
    if config is None:
        return {"run", "sglang"} if shutil.which("nvidia-smi") else {"run"} if runs_here else set()
    if not runs_here and shutil.which("sbatch") is not None:
        return set()
    wanted = {"run"}
    wanted |= {"sglang"} if config.engine.backend == "sglang" else set()
    wanted |= {"megatron"} if config.train.backend == "megatron" else set()
    wanted |= {"data"} if any(e.data is not None for e in config.environments.values()) else set()
    wanted |= {"tensorboard"} if config.tensorboard.enabled else set()
    wanted |= {"mlflow"} if config.mlflow.enabled else set()
    served = [settings.serve for settings in config.environments.values()]
    return wanted | ({"gym"} if "reasoning-gym" in served else set())


def _extra(extra: str, needed: bool) -> Finding:
    missing, wrong = missing_and_wrong("orhpc", extra)
    what = f"orhpc[{extra}]"
    if not missing and not wrong:
        return Finding("ok", what, f"is installed, for {_EXTRAS[extra]}")
    problems = [f"missing {', '.join(missing)}"] if missing else []
    problems += [f"too old or too new: {', '.join(wrong)}"] if wrong else []
    return Finding(
        "BAD" if needed else "--", what, f"{'; '.join(problems)}; for {_EXTRAS[extra]}: {_install(extra)}"
    )


def _install(extra: str) -> str:
    if extra in ("sglang", "megatron"):
        build = "NVTE_FRAMEWORK=pytorch " if extra == "megatron" else ""
        how = " --no-build-isolation" if extra == "megatron" else ""
        both = "gpu,megatron" if extra == "megatron" else "gpu"
        return f"{build}pip install{how} 'orhpc[{both}]' -c \"$(orhpc files torch-2.11.txt)\""
    return f"pip install 'orhpc[{extra}]'"


def missing_and_wrong(package: str, extra: str) -> tuple[list[str], list[str]]:
    """Packages of an extra that are not installed, and those installed in an unsupported version."""
    missing: list[str] = []
    wrong: list[str] = []
    for requirement in _requirements(package):
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra, **_NEWER}):
            continue
        if not requirement.marker.evaluate({"extra": extra}):
            wanted = re.search(r'python_version (>= "[\d.]+")', str(requirement.marker))
            asked = wanted[1].replace('"', "") if wanted else str(requirement.marker)
            wrong.append(f"Python {sys.version.split()[0]} ({requirement.name} wants {asked})")
            continue
        if (
            requirement.marker.evaluate({"extra": "", **_NEWER})
            or canonicalize_name(requirement.name) == package
        ):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found} (wants {requirement.specifier})")
    return missing, wrong


def _requirements(package: str) -> list[Requirement]:
    found: list[Requirement] = []
    for text in importlib.metadata.requires(package) or []:
        try:
            found.append(Requirement(text))
        except InvalidRequirement:  # old packages have requirements that PEP 508 does not allow
            continue
    return found


def _conflicts() -> Iterator[Finding]:
    """Incompatible versions among the packages that a run depends on."""
    checked = (
        "orhpc",
        "sglang",
        "transformers",
        "torch",
        "ray",
        "openreward",
        "transformer-engine",
        "megatron-core",
    )
    problems: list[str] = []
    for package in checked:
        if not _is_installed(package):
            continue
        for requirement in _requirements(package):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if not _is_installed(requirement.name):
                continue
            found = importlib.metadata.version(requirement.name)
            if not requirement.specifier.contains(found, prereleases=True):
                problems.append(f"{package} wants {requirement.name}{requirement.specifier}, here is {found}")
    if problems:
        sets = "torch-2.11.txt and torch-2.14.txt (orhpc files) are sets that resolve"
        yield Finding("BAD", "versions", f"{'; '.join(problems[:5])}; {sets}")
    else:
        versions = [f"{p} {importlib.metadata.version(p)}" for p in checked[1:] if _is_installed(p)]
        yield Finding("ok", "versions", f"{', '.join(versions) or 'no packages'} are compatible")


def _cublas() -> Iterator[Finding]:
    """Name a cuBLAS that multiplies by a mixture's experts one by one in FP8, and more slowly in bfloat16."""
    if not (_is_installed("transformer-engine") and _is_installed("nvidia-cublas")):
        return
    found, least = importlib.metadata.version("nvidia-cublas"), ".".join(map(str, CUBLAS_AT_ONCE))
    if Version(found) < Version(least):
        yield Finding(
            "--",
            "cuBLAS",
            f"{found}: Megatron trains mixtures of experts faster with {least} or newer, and needs it for "
            f"precision: fp8: pip install --no-deps 'nvidia-cublas>={least}'",
        )


def _bytecode() -> Iterator[Finding]:
    """Name large packages without bytecode, whose modules every process compiles again."""
    folders = {name: Path(path).parent for name in _LARGE if (path := _origin(name)) is not None}
    compiled = {
        name: Path(importlib.util.cache_from_source(f / "__init__.py")) for name, f in folders.items()
    }
    bare = [name for name, path in compiled.items() if not path.exists()]
    if bare:
        command = f"{sys.executable} -m compileall -q -j 0 {' '.join(str(folders[n]) for n in bare)}"
        unset = "; PYTHONDONTWRITEBYTECODE must not be set then" if sys.dont_write_bytecode else ""
        yield Finding(
            "--",
            "bytecode",
            f"none of {', '.join(bare)}, so that every process of a run first compiles their modules, for "
            "seconds: "
            f"{command} (where these folders can be written: for an image when it is built){unset}",
        )


def _origin(module: str) -> str | None:
    """File of a package, which is not imported; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # there is not even its parent
        return None
    return None if spec is None else spec.origin


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- the machine ----------------------------------------------------------------------------------


def _gpus(config: Config | None) -> Iterator[Finding]:
    wanted = config is not None and config.placement.device == "cuda" and "SLURM_JOB_ID" in os.environ
    found = driver_gpus()
    if not found:
        yield Finding("BAD" if wanted else "--", "GPUs", "none here (nvidia-smi shows none)")
        return
    gpu = found[0]
    size = f"{gpu.memory_mib / 1024:.1f} GiB"
    yield Finding("ok", "GPUs", f"{len(found)} x {gpu.name}, {size}, driver {gpu.driver}")
    if float(gpu.capability) < _HOPPER:
        yield Finding(
            "--", "FP8", f"compute capability {gpu.capability}: precision: fp8 and fp8-rollout need 9.0"
        )
    if (cuda := _cuda_of_torch()) is None:
        if _is_installed("torch"):
            yield Finding(
                "BAD", "torch", "is a build without CUDA: install it from an index with CUDA builds"
            )
    elif (oldest := _DRIVER_OF_CUDA.get(int(cuda.split(".")[0]), 0)) > int(gpu.driver.split(".")[0]):
        line = f"{gpu.driver} is older than {oldest}, which torch's CUDA {cuda} needs"
        yield Finding("BAD", "driver", line)
    else:
        yield Finding("ok", "CUDA", f"torch's {cuda} and driver {gpu.driver}")
    compilers = {name: shutil.which(name) for name in ("nvcc", "gcc", "ninja")}
    if missing := [name for name, path in compilers.items() if path is None]:
        line = f"{', '.join(missing)} not on PATH, for kernels compiled at first use (module load cuda)"
        yield Finding("--", "compilers", line)


def _cuda_of_torch() -> str | None:
    """CUDA release of the installed torch, from its ``version.py``; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def _machine() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files[1] != resource.RLIM_INFINITY and files[1] < _LEAST_FILES
    yield Finding("BAD" if few else "ok", "open files", f"limit {files[0]} (at most {files[1]})")
    shm = shutil.disk_usage("/dev/shm").total  # noqa: S108 - only its size is read
    small = "" if shm >= _LEAST_SHM else "; small: Ray spills to disk and weights go over sockets"
    yield Finding("ok", "shared memory", f"{shm / 2**30:.1f} GiB in /dev/shm{small}")


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("--", "SLURM", "no sbatch here: orhpc launch --local runs without SLURM")
    try:
        answer = scheduler.query("sinfo", "--noheader", "--format", "%P %G %D")
    except OrhpcError as error:
        return Finding("BAD", "SLURM", " ".join(str(error).split()))
    rows = [line.split() for line in answer.stdout.splitlines() if line.strip()]
    if answer.returncode or not rows:
        reason = next(
            (line.strip()[:100] for line in answer.stderr.splitlines() if line.strip()), "no partition"
        )
        return Finding("--", "SLURM", f"no jobs from here, only orhpc launch --local: {reason}")
    partitions = (f"{p} {n} nodes" + ("" if g == "(null)" else f" with {g}") for p, g, n in rows[:6])
    return Finding("ok", "SLURM", "; ".join(partitions))


def _hub() -> Finding:
    folder = hub_cache()
    token = "a token is set" if has_hub_token() else "no HF_TOKEN, so no gated models"
    parent = next(p for p in [folder.absolute(), *folder.absolute().parents] if os.access(p, os.F_OK))
    if not os.access(parent, os.W_OK):
        if (variable := offline_variable()) is not None and folder.is_dir():
            return Finding("ok", "models", f"in {folder}, which is only read ({variable} is set)")
        return Finding(
            "BAD", "models", f"{folder} cannot be written: set HF_HOME to a folder that you can write"
        )
    chosen = any(map(os.environ.get, ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")))
    shared = "" if chosen else "; if home is not shared, set HF_HOME to a shared folder"
    free = commit_space.free_bytes(folder.absolute())
    return Finding("ok", "models", f"in {folder}, {free / 1e9:.0f} GB free; {token}{shared}")


def _attempt(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding("ok", what, look())
    except OrhpcError as error:
        return Finding("BAD", what, " ".join(str(error).split()))
