"""The first actions of every start, on a login node or locally: check, compare the config, claim an attempt.

No process is started here.  The order of all checks is in :mod:`orhpc.launch.checks.checklist`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from orhpc.config import Config
from orhpc.config.files import changes_on_resume, differences, dump_config, load_config
from orhpc.data.prepared_tasks import listed_tasks
from orhpc.data.task_file import require_source, source_of
from orhpc.errors import CheckpointError, ConfigError, PreflightError
from orhpc.launch.provenance import write_provenance
from orhpc.process.access import use_access
from orhpc.process.secrets import resolve_secrets
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.commits import read_manifest
from orhpc.rundir.events import has_begun, is_evaluated, read_events

SERVICE_KEY = "OPENREWARD_API_KEY"
_LEAST = {"ray": "2.60", "starlette": "1.0.1"}
"""Ray before 2.52 ignores the job's token, and a Ray whose GCS has no on-disk state ends when the GCS does;
in Starlette before 1.0.1 a forged Host header bypasses the API key of SGLang's engines."""


def run_directory(config: Config) -> RunDir:
    assert config.run.name is not None
    return RunDir(Path(config.run.root) / config.run.name)


def create_directory(config: Config, *, known: bool = False) -> RunDir:
    """Create the run directory, and let this process and its children write with its access.

    ``known``: the run is known to exist here.  Raises ConfigError or StorageRefused.
    """
    use_access(config.run.access)
    rundir = run_directory(config)
    rundir.create(known=known, access=config.run.access)
    return rundir


def check_paths(config: Config) -> str:
    """Check that the data named in the config exists on this machine; return the checked paths.

    Raises:
        ConfigError: a record, checkpoint, task file or source of prompts does not exist or cannot be used.
    """
    checked: list[str] = []
    if config.train.replay_rollouts is not None:
        _check_record(Path(config.train.replay_rollouts), config.train.steps)
        checked.append(config.train.replay_rollouts)
    load = config.checkpoint.load
    if load is not None:
        if not any((Path(load) / inside).exists() for inside in ("manifest.json", "attempts")):
            raise ConfigError(f"checkpoint.load: {load} is neither a checkpoint folder nor a run directory")
        checked.append(load)
    if config.rollout.task_file is not None:
        copy = run_directory(config).task_file
        path = copy if copy.exists() else Path(config.rollout.task_file)
        listed = listed_tasks(config, path)
        checked.append(f"{sum(map(len, listed.values()))} tasks of {path}")
    for name, settings in config.environments.items():
        if settings.data is None or (run_directory(config).data_of(name) / "source.json").exists():
            continue  # a resumed run does not need its source
        for path in settings.data.paths.values():
            require_source(source_of(path)[0], f"environments.{name}.data")
            checked.append(path)
    return ", ".join(checked) or "no record, checkpoint or task file is named"


def _check_record(folder: Path, steps: int) -> None:
    if not folder.is_dir():
        raise ConfigError(f"train.replay_rollouts: {folder}: no such folder")
    recorded = {int(m[1]) for p in folder.iterdir() if (m := re.fullmatch(r"step_(\d+)", p.name))}
    if not recorded:
        raise ConfigError(f"train.replay_rollouts: {folder} contains no step_N folder")
    if missing := [s for s in range(1, steps + 1) if s not in recorded]:
        raise ConfigError(
            f"train.replay_rollouts: step {missing[0]} is not recorded in {folder}; "
            f"train.steps is {steps}, recorded are {min(recorded)} to {max(recorded)}"
        )


def write_config(rundir: RunDir, config: Config) -> list[str]:
    """Write the resolved config, or compare it with the run's; return the changes.

    Before the run's first step every setting may change; the rollouts buffered so far are then deleted.

    Raises:
        ConfigError: a setting changed that must not change.
    """
    begun = has_begun(rundir)
    if not rundir.config.exists():
        write_atomic(rundir.config, dump_config(config))
        return []
    try:
        before = load_config(rundir.config)
    except ConfigError:
        if begun:
            raise
        before = config  # the file is damaged or from another release, and no step depends on it
    try:
        changes = changes_on_resume(before, config)
    except ConfigError:
        if begun:
            raise
        changes = differences(before, config)
        rundir.discard_buffer()
    if changes or before is config:
        write_atomic(rundir.config, dump_config(config))
    return changes


def committed_step(rundir: RunDir) -> int:
    """Step of the newest commit with a readable manifest; 0 if there is none."""
    for name in rundir.lineage():
        try:
            return read_manifest(rundir.checkpoints / str(name)).step
        except CheckpointError:
            continue
    return 0


def is_finished(rundir: RunDir, config: Config) -> bool:
    """Whether all steps are committed and the last is evaluated, if it is to be; or, for a run that only
    evaluates, whether the evaluation is done."""
    done, steps = committed_step(rundir), config.train.steps
    if steps:
        evaluated = not config.evaluates_after(steps) or is_evaluated(read_events(rundir.events), steps)
        return done > steps or (done == steps and evaluated)
    return done > 0 or any(event["event"] == "finished" for event in read_events(rundir.events))


def check_machine(config: Config) -> None:
    """Check that this machine has the packages and GPUs that the job's processes need.

    Raises:
        PreflightError: a package or GPUs are missing.
    """
    needed = ["torch", "ray", "transformers", "openreward", "h5py"]
    if config.engine.backend == "sglang" and config.train.replay_rollouts is None:
        needed.append("sglang")
    if config.train.backend == "megatron":
        needed.append("megatron")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        extra = "gpu" if config.placement.device == "cuda" else "run"
        raise PreflightError(
            f"{', '.join(missing)}: not installed for {sys.executable}; pip install 'orhpc[{extra}]' "
            "(orhpc doctor shows details)"
        )
    check_versions(_LEAST)
    if config.placement.device == "cuda":
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if gpus < config.placement.devices_per_node:
            raise PreflightError(
                f"placement.devices_per_node: {config.placement.devices_per_node} GPUs asked for, "
                f"this machine has {gpus}; configs/local.yaml and configs/tiny.yaml run without"
            )


def check_versions(least: Mapping[str, str]) -> None:
    """Check the versions of installed packages without loading them.

    Args:
        least: package name to the oldest supported version; packages that are not installed are skipped.

    Raises:
        PreflightError: a package is older.
    """
    for name, oldest in least.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(installed) < Version(oldest):
            raise PreflightError(
                f"{name} {installed}: versions before {oldest} are insecure or unreliable; "
                f"pip install '{name}>={oldest}'"
            )


def check_keys(config: Config) -> str:
    """Check that every API key that the run needs has a value, before GPUs are requested.

    Raises:
        PreflightError: names the key and the setting that needs it.
    """
    for name, settings in config.environments.items():
        known = resolve_secrets(config.secrets, settings.secrets)
        by_service = settings.url is None and not settings.is_served
        if by_service and not (_service_key() or any(k.upper() == SERVICE_KEY for k in known)):
            raise PreflightError(
                f"environments.{name}: reached through OpenReward, so {SERVICE_KEY} must be set"
            )
    resolve_secrets(config.own_secrets, {})
    if config.rollout.openreward_upload and not _service_key():
        raise PreflightError(f"rollout.openreward_upload: {SERVICE_KEY} must be set")
    return "all are set"


def _service_key() -> str:
    return os.environ.get(SERVICE_KEY, "")


def begin_attempt(rundir: RunDir, config: Config, **facts: object) -> int:
    """Claim an attempt and write the resolved config and the provenance to its folder."""
    attempt = rundir.begin_attempt(**json.loads(json.dumps(facts)))
    write_atomic(rundir.attempt(attempt) / "config.yaml", dump_config(config))
    write_provenance(rundir.attempt(attempt), config)
    return attempt
