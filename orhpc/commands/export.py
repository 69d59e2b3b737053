"""``orhpc export``: write a commit as a Hugging Face folder, and verify it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from orhpc.commands.run_state import RUN_HELP, existing_run
from orhpc.config.files import load_config
from orhpc.errors import CheckpointError, ConfigError
from orhpc.launch.model import model_folder
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
    folder = run.checkpoints / str(name)
    commits.verify(folder)
    config = load_config(run.config)
    command = [sys.executable, "-m", "orhpc.train.checkpoint.export", str(folder), str(out)]
    command += ["--model-dir", str(model_folder(config, run)), "--dtype", config.model.dtype]
    command += ["--trust-remote-code"] if config.model.trust_remote_code else []
    return subprocess.run(command, check=False).returncode


def default_folder(run: RunDir, name: CommitName) -> Path:
    """Where a commit is exported to if no folder is named."""
    return run.export / f"step_{name.step}"


def chosen_commit(run: RunDir, step: int | None) -> CommitName:
    """Return the commit of a step, or the newest one.

    Raises:
        CheckpointError: it does not exist; the message lists those that do.
    """
    lineage = run.lineage()
    if not lineage:
        raise CheckpointError(f"{run.path}: nothing is committed yet")
    if step is None:
        return lineage[0]
    for name in lineage:
        if name.step == step:
            return name
    raise CheckpointError(f"{run.path}: step {step} is not committed; committed: {[c.step for c in lineage]}")
