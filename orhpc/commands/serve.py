"""``orhpc serve``: an OpenAI-compatible server of a run's model, or of a model folder."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orhpc.commands.export import find_model
from orhpc.commands.packages import need
from orhpc.config.safe_yaml import read_yaml
from orhpc.errors import ConfigError

_OURS = ("host", "port", "api_key", "model_path", "served_model_name", "tp_size", "context_length")


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "It listens on 127.0.0.1 and requires a key: that of ORHPC_SERVE_KEY, or a new one, which it prints. "
        "--sglang-NAME VALUE passes an option to SGLang, in addition to those of the run's engine.extra."
    )
    parser.add_argument("folder", type=Path, metavar="RUN | MODEL_FOLDER")
    parser.add_argument("--step", type=int, help="commit of a run; default: the newest")
    parser.add_argument("--port", type=int, help="default: 8000, or a free one")
    parser.add_argument("--name", help="the model's name for clients; default: RUN-step_N, or the folder's")
    parser.add_argument(
        "--backend", choices=["sglang", "transformers"],
        help="default: sglang on a machine with GPUs where it is installed, else transformers",
    )  # fmt: skip
    parser.add_argument("--tp", type=int, metavar="N", help="GPUs, with sglang; default: 1")
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="tokens, with sglang; default: the model's"
    )
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)  # of --sglang-NAME VALUE
    parser.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> int:
    """Export the commit if that has not been done, then serve it until Ctrl-C."""
    if options.port is not None and not 1 <= options.port <= 65535:
        raise ConfigError(f"--port: {options.port} is not a port")
    for name in ("tp", "context_length"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not a positive number")
    if options.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.name):
        raise ConfigError(f"--name: {options.name!r} is not a name: use letters, digits, '.', '_' and '-'")
    backend = options.backend or _default_backend()
    if backend != "sglang" and (given := [n for n in ("tp", "context_length") if getattr(options, n)]):
        raise ConfigError(f"--{given[0].replace('_', '-')}: it needs sglang, and this would be {backend}")
    extra = _extra(options.arguments)
    if extra and backend != "sglang":
        raise ConfigError(f"--sglang-...: this would be {backend}")
    _check_packages(backend)
    model = find_model(options.folder, options.step)
    if isinstance(model, int):
        return model
    if model.config is not None and model.config.engine.backend == "sglang":
        extra = {
            n: v for n, v in model.config.engine.extra.items() if n.replace("-", "_") not in _OURS
        } | extra
    name = options.name or re.sub(r"[^A-Za-z0-9._-]+", "-", model.name).strip("-.") or "model"
    # Another program: this one must not load what a login node lacks.
    command = [sys.executable, "-m", "orhpc.rollout.engines.openai_server", str(model.folder)]
    command += ["--name", name, "--backend", backend, "--tp", str(options.tp or 1)]
    command += ["--port", str(options.port)] if options.port is not None else []
    command += ["--context-length", str(options.context_length)] if options.context_length else []
    command += ["--trust-remote-code"] if model.trusted else []
    command += ["--extra", json.dumps(extra)] if backend == "sglang" else []
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - signals reach the server, and not only this process


def _extra(words: Sequence[str]) -> dict[str, Any]:
    """SGLang's options, from the overrides of ``engine.extra`` that ``--sglang-NAME VALUE`` is short for.

    Raises:
        ConfigError: another word, or an option that this command sets itself.
    """
    extra: dict[str, Any] = {}
    for word in words:
        name, given, value = word.removeprefix("engine.extra.").partition("=")
        if not given or not word.startswith("engine.extra."):
            raise ConfigError(f"{word}: one run or model folder, and options")
        if name in _OURS:
            raise ConfigError(f"--sglang-{name.replace('_', '-')}: this command sets it itself")
        extra[name] = read_yaml(value, f"--sglang-{name}", or_text=True)
    return extra


def _default_backend() -> str:
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
    return "sglang" if has_gpus and importlib.util.find_spec("sglang") else "transformers"


def _check_packages(backend: str) -> None:
    """Raise PreflightError for missing packages, before a commit is exported."""
    needed = ["sglang"] if backend == "sglang" else ["torch", "transformers", "fastapi", "uvicorn", "openai"]
    need(*needed, "psutil", "aiohttp", extra="gpu" if backend == "sglang" else "run,serve")
