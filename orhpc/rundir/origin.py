"""Where weights come from: the run, step and commit of a checkpoint or of an exported model folder.

An export carries this as a small JSON file.  A run that starts from a commit or an export of another run
records it, with what that run had started from itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orhpc.process.secrets import redact
from orhpc.rundir.paths import CommitName, RunDir
from orhpc.rundir.sealed import Damaged, read_sealed

FILE = "orhpc_export.json"
"""Name of the file in an exported folder."""
PROVENANCE = "provenance.json"
_DEEPEST = 20
"""Runs in a chain that are recorded."""


def origin_of_commit(folder: Path) -> dict[str, Any] | None:
    """What a commit is of; None for a folder that is not named like one.

    Returns:
        ``run`` and ``directory`` (null for a commit that was copied out of its run), ``step``, ``commit``,
        ``orhpc`` (version), ``code`` (the user's folder with its git commit), ``model``, and ``origin``: what
        the run itself had started from, null for a base model.
    """
    name = CommitName.parse(folder.resolve().name)
    if name is None:
        return None
    run = RunDir(folder.resolve().parents[1])
    inside = run.attempts.is_dir()
    made = provenance(run, name.attempt) if inside else {}
    return {
        "run": run.path.name if inside else None,
        "directory": str(run.path) if inside else None,
        "step": name.step,
        "commit": str(name),
        "orhpc": made.get("orhpc"),
        "code": made.get("code"),
        "model": made.get("model"),
        "origin": _shortened(made.get("origin"), _DEEPEST),
    }


def origin_of_load(load: Path) -> dict[str, Any] | None:
    """What ``checkpoint.load`` is: a commit, or the newest commit of a run directory."""
    if not (load / "attempts").is_dir():
        return origin_of_commit(load)
    lineage = RunDir(load).lineage()
    return origin_of_commit(RunDir(load).checkpoints / str(lineage[0])) if lineage else None


def origin_of_model(folder: Path) -> dict[str, Any] | None:
    """What an exported model folder is of; None for any other folder, or if the file is damaged."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    valid = isinstance(found, dict) and isinstance(found.get("step"), int)
    return found if valid and isinstance(found.get("commit"), str) else None


def write_origin(commit: Path, target: Path) -> None:
    """Write the file of an export of ``commit`` into the folder ``target``.  Raises OSError."""
    about = origin_of_commit(commit)
    path = target / FILE
    path.unlink(missing_ok=True)  # the model folder may be an export itself
    if about is not None:
        about["exported_by"] = f"orhpc {version('orhpc')}"
        path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def provenance(run: RunDir, attempt: int) -> dict[str, Any]:
    """The record of what an attempt ran; empty if there is none."""
    try:
        return read_sealed(run.attempt(attempt) / PROVENANCE, ())
    except (OSError, Damaged):
        return {}


def describe(origin: Mapping[str, Any]) -> str:
    """One line: ``step 40 of run first (commit step_40.a001, /data/runs/first)``."""
    run = f" of run {origin['run']}" if origin.get("run") else ""
    where = f", {origin['directory']}" if origin.get("directory") else ""
    return redact(f"step {origin.get('step')}{run} (commit {origin.get('commit')}{where})")


def _shortened(origin: Any, depth: int) -> Any:
    if not isinstance(origin, dict) or depth == 0:
        return None
    return {**origin, "origin": _shortened(origin.get("origin"), depth - 1)}
