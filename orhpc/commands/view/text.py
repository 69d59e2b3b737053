"""Recorded rollouts as plain text: one line each, or the transcript of one."""

from __future__ import annotations

from typing import Any

from orhpc.commands.view.filter import Filter
from orhpc.commands.view.library import Library, title_of
from orhpc.commands.view.transcript import lines
from orhpc.errors import EXIT_OK, RecordError
from orhpc.process.terminal import safe


def show(
    library: Library, step: int | None, evaluation: int | None, rollout: str | None, wanted: str = ""
) -> int:
    """Print the rollouts of a step or an evaluation, one of them, or all that a filter lets pass.

    Args:
        library: the record of the run.
        step: training step; None: the newest one, or the one that has ``rollout``.
        evaluation: show the evaluation after this step instead of a training step.
        rollout: id of the rollout to print in full.
        wanted: a line for :meth:`Filter.parse`; empty: all.

    Raises:
        ConfigError: the filter is wrong.
        RecordError: no such step, evaluation or rollout is recorded.
    """
    parts = library.chosen(step, evaluation)
    if rollout is not None:
        print("\n".join(lines(_find(library, parts, rollout))))
    elif wanted:
        whole_run = step is None and evaluation is None
        _print_found(library, Filter.parse(wanted), None if whole_run else parts[0])
    else:
        rows = library.rows(parts[0])
        print(f"{title_of(parts[0])}: {len(rows)} rollouts")
        for row in rows:
            print(_line(row))
    return EXIT_OK


def _find(library: Library, parts: list[str], name: str) -> Any:
    for part in parts:
        if (found := library.record(part, name)) is not None:
            return found[1]
    where = title_of(parts[0]) if len(parts) == 1 else "any recorded step"
    raise RecordError(f"there is no rollout {name!r} in {where}")


def _print_found(library: Library, wanted: Filter, only: str | None) -> None:
    count, last = 0, ""
    for found in library.search(wanted, only):
        if "row" not in found:
            continue
        if found["part"] != last:
            last = found["part"]
            print(f"{title_of(last)}:")
        count += 1
        print(_line(found["row"]))
        if found["snippet"]:
            print(f"{'':>10}  ... {safe(' '.join(found['snippet'].split()))} ...")
    print(f"{count} rollouts found")


def _line(row: dict[str, Any]) -> str:
    reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
    about = safe(f"{row['task']}  {row['error']}" if row["error"] else row["task"])
    counts = f"{row['length']:>6} tokens  {row['turns']} turns"
    age = f"  age {row['age']}" if row["age"] else ""  # of its oldest token, in policy versions
    return f"{row['id']:>10}  {reward:>7}  {counts}{age}  {row['end']:<10} {about}"
