"""What every start of a run does first, on the login node or locally: check, compare, claim.

Nothing is started here, and nothing is written before the config has been found good.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from orhpc.bundled import cache_folder, folder_of, is_bundled
from orhpc.commits import read_manifest
from orhpc.config import Config
from orhpc.config_files import changes_on_resume, dump_config, load_config
from orhpc.errors import CheckpointError, ConfigError, ModelError, PreflightError
from orhpc.events import read_events
from orhpc.memory import check_layout
from orhpc.model_folders import find_model
from orhpc.models import read_shape
from orhpc.rundir import RunDir, write_atomic
from orhpc.secrets import resolve_secrets

SERVICE_KEY = "OPENREWARD_API_KEY"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def run_directory(config: Config) -> RunDir:
    assert config.run.name is not None
    return RunDir(Path(config.run.root) / config.run.name)


def check_paths(config: Config) -> None:
    """Check what the config names on this machine, in milliseconds.

    Raises:
        ConfigError: a model folder, record or checkpoint that is not there, or a layout of the trainer
            that cannot be.
    """
    path = config.model.path
    if is_bundled(path):
        folder_of(path)
    elif Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"model.path: {path} has no config.json")
    elif not _HUB_NAME.fullmatch(path) or path.startswith((".", "/")):
        raise ModelError(f"model.path: {path} is neither a folder nor a hub name")
    _check_layout(config)
    if config.train.replay_rollouts is not None:
        _check_record(Path(config.train.replay_rollouts), config.train.steps)
    load = config.checkpoint.load
    if load is not None and not any(
        (Path(load) / inside).exists() for inside in ("manifest.json", "attempts")
    ):
        raise ConfigError(f"checkpoint.load: {load} is neither a checkpoint folder nor a run directory")
    for name, settings in config.environments.items():
        if settings.url and not re.match(r"https?://[^/]+", settings.url):
            raise ConfigError(f"environments.{name}.url: {settings.url!r} is not an http address")


def _check_layout(config: Config) -> None:
    """A Megatron layout that the model or the nodes cannot have is refused before a node is asked for."""
    if config.train.backend != "megatron":
        return
    try:
        folder = find_model(config.model.path, config.model.revision)
    except ModelError:  # not on this machine (yet); the trainer checks it again
        return
    check_layout(read_shape(folder), config.trainer_layout, config.placement.devices_per_node)


def _check_record(folder: Path, steps: int) -> None:
    if not folder.is_dir():
        raise ConfigError(f"train.replay_rollouts: {folder}: no such folder")
    recorded = {int(m[1]) for p in folder.iterdir() if (m := re.fullmatch(r"step_(\d+)", p.name))}
    if not recorded:
        raise ConfigError(f"train.replay_rollouts: {folder} holds no step_N folder")
    if missing := [s for s in range(1, steps + 1) if s not in recorded]:
        raise ConfigError(
            f"train.replay_rollouts: step {missing[0]} is not recorded in {folder}; "
            f"train.steps is {steps}, recorded are {min(recorded)} to {max(recorded)}"
        )


def write_config(rundir: RunDir, config: Config) -> list[str]:
    """Write the resolved config, or compare it with the run's; returns the changes.

    Raises:
        ConfigError: a setting changed that may not.
    """
    if not rundir.config.exists():
        write_atomic(rundir.config, dump_config(config))
        return []
    changes = changes_on_resume(load_config(rundir.config), config)
    if changes:
        write_atomic(rundir.config, dump_config(config))
    return changes


def committed_step(rundir: RunDir) -> int:
    """Step of the newest commit, by its manifest alone; 0 before the first."""
    for name in rundir.lineage():
        try:
            return read_manifest(rundir.checkpoints / str(name)).step
        except CheckpointError:
            continue
    return 0


def is_finished(rundir: RunDir, config: Config) -> bool:
    """Whether all steps are committed; of a run that only evaluates, whether that is done."""
    done = committed_step(rundir)
    if config.train.steps:
        return done >= config.train.steps
    return done > 0 or any(event["event"] == "finished" for event in read_events(rundir.events))


def ensure_model(config: Config) -> None:
    """Make a bundled model if it is missing, in a process of its own: this one may not load torch.

    Raises:
        ModelError: it cannot be made.
    """
    if not is_bundled(config.model.path):
        return
    command = [sys.executable, "-m", "orhpc.bundled", config.model.path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise ModelError(f"{lines[-1].removeprefix('orhpc: ')} (kept in {cache_folder()})")


def model_folder(config: Config) -> str:
    """Local folder or hub name of the policy model."""
    return str(folder_of(config.model.path)) if is_bundled(config.model.path) else config.model.path


def check_machine(config: Config) -> None:
    """Check that this machine has what the job's own processes need.

    Raises:
        PreflightError: a package or GPUs are missing.
    """
    needed = ["torch", "ray", "transformers", "openreward", "h5py"]
    if config.engine.backend == "sglang" and config.train.replay_rollouts is None:
        needed.append("sglang")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        raise PreflightError(f"{', '.join(missing)}: not installed here; pip install 'orhpc[run]'")
    if config.placement.device == "cuda":
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if gpus < config.placement.devices_per_node:
            raise PreflightError(
                f"placement.devices_per_node: {config.placement.devices_per_node} GPUs asked for, "
                f"this machine has {gpus}; configs/local.yaml and configs/tiny.yaml run without"
            )


def check_keys(config: Config) -> None:
    """Check that every key the run will need has a value, before a GPU is asked for.

    Raises:
        PreflightError: names the key and who needs it.
    """
    for name, settings in config.environments.items():
        known = resolve_secrets(config.secrets, settings.secrets)
        by_service = settings.url is None and settings.serve is None
        if by_service and not (_service_key() or any(k.upper() == SERVICE_KEY for k in known)):
            raise PreflightError(
                f"environments.{name}: reached through OpenReward, so {SERVICE_KEY} must be set"
            )
    if config.rollout.openreward_upload and not _service_key():
        raise PreflightError(f"rollout.openreward_upload: {SERVICE_KEY} must be set")


def _service_key() -> str:
    return os.environ.get(SERVICE_KEY, "")


def begin_attempt(rundir: RunDir, config: Config, **facts: object) -> int:
    """Claim an attempt and leave its resolved config in its folder."""
    attempt = rundir.begin_attempt(**json.loads(json.dumps(facts)))
    write_atomic(rundir.attempt(attempt) / "config.yaml", dump_config(config))
    return attempt
