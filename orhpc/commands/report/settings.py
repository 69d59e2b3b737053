"""Settings of runs for the report: flattened, without secrets, and the differences of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orhpc.config.safe_yaml import read_yaml
from orhpc.errors import ConfigError
from orhpc.process.secrets import redact
from orhpc.rundir import RunDir
from orhpc.rundir.origin import provenance

_HIDDEN = ("secrets",)


def settings_of(run: RunDir) -> dict[str, str]:
    """Every setting of a run's ``config.yaml`` by its dotted name; empty if it cannot be read."""
    return settings_in(run.config)


def settings_in(path: Path) -> dict[str, str]:
    """Every setting in a resolved config by its dotted name; empty if it cannot be read."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except (ConfigError, OSError):
        return {}
    return dict(_flat(content, "")) if isinstance(content, Mapping) else {}


def _flat(value: Mapping[Any, Any], prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if key in _HIDDEN:
            found.append((name, "(hidden)" if inner else "none"))
        elif isinstance(inner, Mapping) and inner:
            found += _flat(inner, f"{name}.")
        else:
            found.append((name, redact(str(inner))))
    return found


def provenance_of(run: RunDir) -> dict[str, str]:
    """What the newest attempt ran, flattened; empty for runs of earlier releases."""
    return dict(_flat(provenance(run, run.newest_attempt()), ""))


def differences(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Settings that are not equal in all runs: the name and each run's value, "-" where it has none."""
    names = dict.fromkeys(name for one in settings for name in one)
    rows = [(name, [one.get(name, "-") for one in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
