"""``orhpc chat``: talk with the model of a run, or of a model folder, in the terminal."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from orhpc.commands.export import chosen_commit, default_folder, export_commit
from orhpc.commands.run_state import existing_run
from orhpc.config.files import load_config
from orhpc.errors import ConfigError


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN | MODEL_FOLDER")
    parser.add_argument("--step", type=int, help="commit of a run; default: the newest")
    parser.add_argument("--system", metavar="TEXT", help="system message; default: none")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="per answer; default: 1024")
    parser.add_argument("--temperature", type=float, help="0: greedy; default: that of the run, else 1")
    parser.set_defaults(run=chat)


def chat(options: argparse.Namespace) -> int:
    """Export the commit if that has not been done, then read messages from the terminal or a pipe."""
    if options.max_tokens < 1:
        raise ConfigError(f"--max-tokens: {options.max_tokens} is not a positive number")
    temperature, folder, trusted = options.temperature, options.folder, False
    if (folder / "config.json").is_file():
        if options.step is not None:
            raise ConfigError(f"--step: {folder} is a model folder and not a run")
    else:
        run = existing_run(folder)
        config = load_config(run.config)
        name = chosen_commit(run, options.step)
        folder, trusted = default_folder(run, name), config.model.trust_remote_code
        if temperature is None:
            temperature = config.rollout.temperature
        if not (folder / "config.json").is_file() and (code := export_commit(run, name, folder)):
            return code
    temperature = 1.0 if temperature is None else temperature
    if temperature < 0:
        raise ConfigError(f"--temperature: {temperature:g} is negative")
    # In a separate process: this one must not load torch.
    command = [sys.executable, "-m", "orhpc.models.conversation", str(folder)]
    command += ["--max-tokens", str(options.max_tokens), "--temperature", str(temperature)]
    command += ["--system", options.system] if options.system is not None else []
    command += ["--trust-remote-code"] if trusted else []
    return subprocess.run(command, check=False).returncode
