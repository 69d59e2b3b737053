"""What is different in an attempt from the one before it: settings, the user's code, versions, machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orhpc.commands.report.settings import differences, settings_in
from orhpc.rundir import RunDir
from orhpc.rundir.origin import provenance

_MOST = 6
"""Changes that are named."""
_MACHINE = ("host", "gpus", "kernel", "python")


def changes_in(run: RunDir, number: int) -> str:
    """What changed since the attempt before, as one line; empty if nothing is known to have changed."""
    before, now = (provenance(run, n) for n in (number - 1, number))
    found = [*_settings(run, number), *_code(run, number, before, now), *_versions(before, now)]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def _settings(run: RunDir, number: int) -> Iterator[str]:
    before, now = (run.attempt(n) / "config.yaml" for n in (number - 1, number))
    if None not in (_content(before), _content(now)) and _content(before) != _content(now):
        for name, (old, new) in differences([settings_in(before), settings_in(now)]):
            yield f"{name}: {old} -> {new}"


def _code(run: RunDir, number: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get("code"), now.get("code")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get("folder") != new.get("folder"):
        return
    differs = [_content(run.attempt(n) / "code.diff") for n in (number - 1, number)]
    if old.get("commit") != new.get("commit"):
        yield f"the commit of {new.get('folder')}"
    elif differs[0] != differs[1]:
        yield f"files of {new.get('folder')} (attempts/{number:03d}/code.diff)"


def _versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get("packages"), now.get("packages")
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from (
            f"{name} {old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]
        )
    for name in _MACHINE:
        if before.get(name) and now.get(name) and before[name] != now[name]:
            yield f"{name} {before[name]} -> {now[name]}"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
