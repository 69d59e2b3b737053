"""``orhpc export``: write a commit as a Hugging Face folder, and verify it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orhpc.commands.packages import need
from orhpc.commands.run_state import RUN_HELP, existing_run
from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import CheckpointError, ConfigError
from orhpc.launch.model import model_folder
from orhpc.process.own_folders import problem_of
from orhpc.rundir import CommitName, RunDir, commits


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("--step", type=int, help="default: the newest commit")
    parser.add_argument("--out", type=Path, help="default: RUN/export/step_N")
    parser.set_defaults(run=export)


def export(options: argparse.Namespace) -> int:
    """Write a commit as a folder that AutoModelForCausalLM loads, and verify it against the commit."""
    run = existing_run(options.run_dir)
    name = chosen_commit(run, options.step)
    out = options.out or default_folder(run, name)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty")
    return export_commit(run, name, out)


def export_commit(run: RunDir, name: CommitName, out: Path) -> int:
    """Export one commit in a separate process, because this one must not load torch; return its exit code."""
    need("h5py", "numpy", "safetensors", "torch", "transformers")
    folder = run.checkpoints / str(name)
    commits.verify(folder)
    config = load_config(run.config)
    command = [sys.executable, "-m", "orhpc.train.checkpoint.export", str(folder), str(out)]
    command += ["--model-dir", str(model_folder(config, run)), "--dtype", config.model.dtype]
    command += ["--trust-remote-code"] if runs_own_code(run.path, config) else []
    return subprocess.run(command, check=False).returncode


def runs_own_code(folder: Path, config: Config) -> bool:
    """Whether the code in the folder of a run's model is to be run (``model.trust_remote_code``).

    Raises:
        ConfigError: it is, but others can write to ``folder``, and so to the code or the config.
    """
    if not config.model.trust_remote_code:
        return False
    if problem := problem_of(folder):
        raise ConfigError(f"model.trust_remote_code: the model has code that would run as you, but {problem}")
    return True


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model folder that can be loaded."""

    folder: Path
    name: str
    config: Config | None = None
    """The run's settings; None: the folder is no run's, or others than this user can write to it."""
    trusted: bool = False
    """Whether its own code may run."""


def find_model(folder: Path, step: int | None) -> FoundModel | int:
    """Return a model folder, or the export of a run's commit, which is made if it does not exist yet.

    Returns an exit code if the export fails, which has printed why.

    Raises:
        ConfigError: the folder is neither a model nor a run, or has no such step.
        CheckpointError: the run has no commit.
    """
    if (folder / "config.json").is_file():
        if step is not None:
            raise ConfigError(f"--step: {folder} is a model folder and not a run")
        return FoundModel(folder, folder.resolve().name)
    run = existing_run(folder)
    name = chosen_commit(run, step)
    out = default_folder(run, name)
    if not (out / "config.json").is_file() and (code := export_commit(run, name, out)):
        return code
    config = load_config(run.config)
    trusted = runs_own_code(run.path, config) and runs_own_code(out, config)
    own = problem_of(run.path) is None
    return FoundModel(out, f"{run.path.name}-step_{name.step}", config if own else None, trusted)


def default_folder(run: RunDir, name: CommitName) -> Path:
    """Where a commit is exported to if no folder is named."""
    return run.export / f"step_{name.step}"


def chosen_commit(run: RunDir, step: int | None) -> CommitName:
    """Return the commit of a step, or the newest one.

    Raises:
        CheckpointError: nothing is committed.
        ConfigError: this step is not; the message lists those that are.
    """
    lineage = run.lineage()
    if not lineage:
        raise CheckpointError(f"{run.path}: nothing is committed yet")
    if step is None:
        return lineage[0]
    for name in lineage:
        if name.step == step:
            return name
    raise ConfigError(f"{run.path}: step {step} is not committed; committed: {[c.step for c in lineage]}")
