"""Read the ``train_config.yaml`` of OpenReward's training examples for slime and miles as a config.

The file has ``environments``, ``secrets``, ``system_prompt_template``, ``thinking`` and
``openreward_run_name``.  The first two are ours, field by field; unknown fields are refused by the schema.
What their ``run.sh`` sets without flags is in :data:`DEFAULTS`, so that the file alone is the same run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orhpc.errors import ConfigError

_OWN = ("system_prompt_template", "thinking", "openreward_run_name")
"""Top-level keys that only their file has."""
_KEYS = {"environments", "secrets", *_OWN}
DEFAULTS: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen3-30B-A3B"},
    "engine": {"tp": 4},
    "placement": {"mode": "colocated", "nodes": 1, "devices_per_node": 4},
    "rollout": {"openreward_upload": True},
}
"""Defaults of their ``run.sh`` that differ from ours, and the upload, which their examples always do."""


def is_train_config(tree: Mapping[str, Any]) -> bool:
    """Whether a file has the keys of their ``train_config.yaml`` and no others."""
    return _KEYS.issuperset(tree) and any(key in tree for key in _OWN)


def converted(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the settings that a ``train_config.yaml`` stands for.

    Args:
        tree: the file; :func:`is_train_config` is true for it.
        source: names the file in errors.

    Raises:
        ConfigError: the system prompt template cannot be converted.
    """
    settings: dict[str, Any] = {section: dict(values) for section, values in DEFAULTS.items()}
    for key in ("environments", "secrets"):
        if tree.get(key) is not None:
            settings[key] = tree[key]
    if "thinking" in tree:
        settings["rollout"]["thinking"] = tree["thinking"]
    if tree.get("system_prompt_template") is not None:
        settings["rollout"]["system_prompt_template"] = _template(tree["system_prompt_template"], source)
    if tree.get("openreward_run_name") is not None:
        settings["run"] = {"name": tree["openreward_run_name"]}  # also the name of the uploaded run
    return settings


def _template(template: Any, source: str) -> Any:
    """Undouble braces: their template is for ``str.format``, ours replaces ``{tools}`` and nothing else."""
    if not isinstance(template, str):
        return template  # the schema reports it
    if "{{tools}}" in template:
        raise ConfigError(
            f"{source}: system_prompt_template: {{{{tools}}}} would be the literal text {{tools}}, which "
            "orhpc replaces by the tools; write {tools} where the tools belong"
        )
    return template.replace("{{", "{").replace("}}", "}")
