"""``orhpc chat``: talk with the model of a run, or of a model folder, in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from orhpc.commands.export import find_model
from orhpc.commands.packages import need
from orhpc.commands.programs import run_program
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
    temperature = options.temperature
    if temperature is not None and temperature < 0:
        raise ConfigError(f"--temperature: {temperature:g} is negative")
    need("torch", "transformers")
    model = find_model(options.folder, options.step)
    if isinstance(model, int):
        return model
    if temperature is None:
        temperature = model.config.rollout.temperature if model.config is not None else 1.0
    # In a separate process: this one must not load torch.
    command = [sys.executable, "-m", "orhpc.models.conversation", str(model.folder)]
    command += ["--max-tokens", str(options.max_tokens), "--temperature", str(temperature)]
    command += ["--system", options.system] if options.system is not None else []
    command += ["--trust-remote-code"] if model.trusted else []
    return run_program(command)
