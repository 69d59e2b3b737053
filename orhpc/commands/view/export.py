"""A page with the rollouts of some steps in one file, to send to others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orhpc.commands.view.filter import Filter
from orhpc.commands.view.library import Library, title_of
from orhpc.commands.view.page import exported_page
from orhpc.errors import ConfigError, RecordError
from orhpc.rundir import write_atomic


def write_page(
    library: Library, file: Path, wanted: Filter, only: str | None, most_bytes: int
) -> tuple[int, str]:
    """Write the rollouts that a filter lets pass, the newest steps first, until the file is full.

    Args:
        library: the record of the run.
        file: HTML file to write; its folder must exist.
        wanted: the filter; a group is written whole if one of its rollouts passes.
        only: the only step or evaluation to write; None: all.
        most_bytes: size of the written rollouts.

    Returns:
        Number of rollouts written, and what was left out in words (empty: nothing).

    Raises:
        ConfigError: the folder does not exist, or no rollout passes.
        StorageRefused: the filesystem refuses reads or writes.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: its folder does not exist")
    groups: dict[tuple[str, int], None] = {}
    for found in library.search(wanted, only):
        if "row" in found:
            groups[found["part"], found["row"]["group"]] = None
    if not groups:
        raise ConfigError("no rollout passes the filter" if library.parts() else "no rollout is recorded yet")
    rows: dict[str, list[dict[str, Any]]] = {}
    rollouts: dict[str, dict[str, Any]] = {}
    size = written = 0
    for part, group in groups:
        whole = [library.rollout(part, row["id"]) for row in _members(library, part, group)]
        size += len(json.dumps(whole))
        if size > most_bytes and written:
            break
        written += 1
        for rollout in whole:
            rollouts[f"{part}/{rollout['id']}"] = rollout
            rows.setdefault(part, []).append(rollout | {"messages": None, "segments": None})
    about = library.about()
    about["parts"] = [part for part in about["parts"] if part in rows]
    about["first"] = about["first"] if about["first"] in rows else next(iter(rows))
    about["left_out"] = _left_out(len(groups) - written, next(reversed(rows)), most_bytes)
    for part_rows in rows.values():
        part_rows.sort(key=lambda row: (row["group"], row["sample"]))
    data = {"about": about, "rows": rows, "rollouts": rollouts}
    write_atomic(file, exported_page(f"rollouts of {about['name']}", data))
    return len(rollouts), about["left_out"]


def _members(library: Library, part: str, group: int) -> list[dict[str, Any]]:
    try:
        return [row for row in library.rows(part) if row["group"] == group]
    except RecordError:  # removed since the search
        return []


def _left_out(groups: int, oldest: str, most_bytes: int) -> str:
    if not groups:
        return ""
    return (
        f"{groups} groups, {title_of(oldest)} and older, are left out: the file is limited to "
        f"{most_bytes / 1e6:g} MB (--megabytes)"
    )
