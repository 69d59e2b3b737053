"""Task files of OpenReward's training examples: which tasks of the environments a run trains on.

One JSON object per line, as the ``prepare_tasks.py`` of their slime example writes it: ``prompt`` and
``label``, which only name the task, and ``metadata``, itself JSON text, with ``env_name``, ``split``,
``task_spec`` and ``task_hash``.  A task is identified by its hash, not by its place: the environment's server
may list its tasks in another order at another time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Json, ValidationError

from orhpc.config import Config
from orhpc.errors import ConfigError

_HASH_CHARACTERS = 16

Listed = dict[tuple[str, str], list[str]]
"""Hashes of the listed tasks, in the order of the file, by environment and split."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """One task, as a line of the file has it."""

    environment: str
    """Key in the config's ``environments``."""
    split: str
    specification: Any
    """What the environment's server tells about the task; it often contains the gold answer."""
    deployment: str
    server: str
    variant: str
    """Name of the environment class on the server."""
    namespace: str | None

    def line(self) -> str:
        """The task's line of the file."""
        task_hash = hash_of(self.specification)
        metadata = {
            "env_name": self.environment,
            "deployment_name": self.deployment,
            "server_name": self.server,
            "environment_name": self.variant,
            "namespace": self.namespace,
            "split": self.split,
            "task_spec": self.specification,
            "task_hash": task_hash,
        }
        prompt = f"[{self.environment}:{self.split}:{task_hash}]"
        return json.dumps({"prompt": prompt, "label": "", "metadata": json.dumps(metadata)})


class _Metadata(BaseModel):
    env_name: str
    split: str
    task_spec: Any


class _Line(BaseModel):
    metadata: Json[_Metadata] | _Metadata


def hash_of(specification: Any) -> str:
    """The hash that identifies a task: the first 16 hexadecimal digits of its specification's SHA-256."""
    text = json.dumps(specification, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARACTERS]


def listed_tasks(config: Config, path: Path) -> Listed:
    """Read which tasks ``rollout.task_file`` lists; a task that it lists several times counts once.

    Args:
        config: of the run.
        path: the file, or the run's copy of it.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is invalid or of an environment that is not
            trained on.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    setting = "rollout.task_file"
    known = [name for name, settings in config.environments.items() if settings.trains]
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                metadata = _metadata(text, f"{setting}: {path}: line {number}")
                if metadata.env_name not in known:
                    raise ConfigError(
                        f"{setting}: {path}: line {number}: the config trains on no "
                        f"environment {metadata.env_name[:100]!r}, but on {', '.join(known)}"
                    )
                listed = found.setdefault((metadata.env_name, metadata.split), {})
                listed[hash_of(metadata.task_spec)] = None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {path}: cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"{setting}: {path}: lists no task")
    return {key: list(hashes) for key, hashes in found.items()}


def _metadata(text: str, where: str) -> _Metadata:
    try:
        return _Line.model_validate_json(text).metadata
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        raise ConfigError(
            f"{where} is not one of a task file ({place}: {first['msg']}); orhpc prepare-tasks writes one"
        ) from None
