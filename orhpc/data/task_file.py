"""Write the prompts of ``environments.NAME.data`` as task files, which the job's servers read.

    python -m orhpc.data.task_file --settings-json JSON --folder RUN/data/NAME

A task file, ``SPLIT.jsonl``, has one JSON object per line: ``prompt``, ``label`` and, for a verifier
function, ``row``.  It is written once, before the first attempt; a resumed run has the same tasks in the
same order, whatever happens to their source.  The program prints one JSON object, as
:mod:`orhpc.models.hub` does.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import re
import string
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orhpc.config.data import DataSettings
from orhpc.errors import EXIT_OK, ConfigError, OrhpcError, PreflightError, policy_of
from orhpc.models.folders import is_hub_name
from orhpc.rundir import write_atomic

Row = Mapping[str, Any]
_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}
_LONGEST_FIELD = 1 << 30
"""Characters of a column of a CSV file."""
STATES = "files"
"""Key of ``source.json``: the states of the source's files when they were read."""
_SHOWN = 12
"""Column names in an error."""


def write_tasks(settings: DataSettings, folder: Path, setting: str) -> dict[str, tuple[int, int]]:
    """Write ``SPLIT.jsonl`` for every split, and beside them what they were made from.

    Args:
        settings: of the environment.
        folder: is created.
        setting: name of the settings, for errors.

    Returns:
        Number of tasks, and of left out duplicates, by split.

    Raises:
        ConfigError: a source or a column is missing, or a row cannot be used.
        PreflightError: the package ``datasets`` is missing.
        OrhpcError: the hub refuses, or cannot be reached.
    """
    folder.mkdir(parents=True, exist_ok=True)
    states = states_of(settings)  # before they are read: a later change is noticed
    counts: dict[str, tuple[int, int]] = {}
    for split, rows in _splits(settings, setting):
        tasks = list(_tasks(settings, rows, f"{setting}, split {split}"))
        if settings.difficulty is not None:
            tasks.sort(key=lambda task: task.difficulty)
        first: dict[str, _Task] = {}
        for task in tasks:
            first.setdefault(task.asked, task)
        kept = list(first.values()) if settings.deduplicate else tasks
        if not kept:
            raise ConfigError(f"{setting}: split {split!r} has no rows")
        write_atomic(folder / f"{split}.jsonl", "".join(f"{task.line}\n" for task in kept))
        counts[split] = len(kept), len(tasks) - len(kept)
    # Written last: its presence says that the files are complete.
    made_from = settings.source() | {STATES: states}
    write_atomic(folder / "source.json", json.dumps(made_from, indent=1) + "\n")
    return counts


def states_of(settings: DataSettings) -> dict[str, list[int]]:
    """Size in bytes and time of change in nanoseconds of every source file on this machine, by path."""
    found: dict[str, list[int]] = {}
    for path in settings.paths.values():
        source, _ = source_of(path)
        files = [source] if source.is_file() else source.rglob("*") if source.is_dir() else []
        for file in files:
            if file.is_file():
                found[str(file)] = [file.stat().st_size, file.stat().st_mtime_ns]
    return found


@dataclass(frozen=True, slots=True)
class _Task:
    """A row as a task."""

    difficulty: float
    asked: str
    """What duplicates have in common: prompt and label, or without a label the whole row."""
    line: str
    """Of the task file."""


def _tasks(settings: DataSettings, rows: Iterable[Row], where: str) -> Iterator[_Task]:
    for number, row in enumerate(rows, 1):
        try:
            yield _task(settings, row)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}, row {number}: {error}") from None
        except RecursionError:
            raise ConfigError(f"{where}, row {number}: it is nested too deeply") from None


def _task(settings: DataSettings, row: Row) -> _Task:
    task: dict[str, Any] = {"prompt": _prompt(settings.prompt, row)}
    if settings.label is not None:
        task["label"] = _column(settings.label, row)
        if not settings.is_function:
            _check_label(settings, settings.label, task["label"])
        if settings.verifier == "regex":
            _check_pattern(settings.label, str(task["label"]))
    asked = _line(task)
    if settings.is_function:
        task["row"] = dict(row)
        if settings.label is None:  # the function finds its label in the row
            asked = _line(task)
    difficulty = 0.0 if settings.difficulty is None else _number(settings.difficulty, row)
    return _Task(difficulty, asked, _line(task))


def _number(column: str, row: Row) -> float:
    """The number in a column; raises ValueError without one: a NaN would leave the tasks unsorted."""
    value = _column(column, row)
    if value is None:
        raise ValueError(f"column {column!r} is empty")
    return float(value)


def _check_label(settings: DataSettings, column: str, label: Any) -> None:
    """Raises ValueError for a label to which no answer could be equal, or every one.

    ``exact`` takes any text: it also stands for the judgement of ``rollout.custom_reward``, whose labels may
    be empty or nested.
    """
    exact = settings.verifier == "exact"
    if label is None or not (exact or str(label).strip()):
        raise ValueError(f"column {column!r} is empty, so no answer could be right")
    if not exact and isinstance(label, (Mapping, list)):
        raise ValueError(
            f"column {column!r} is a {type(label).__name__}, which no answer could be: name a nested column "
            "with dots, or judge with a function (verifier: package.module:function)"
        )


def _check_pattern(column: str, label: str) -> None:
    """Raises ValueError for a label with which every search would fail, and so its task."""
    try:
        re.compile(label)
    except re.error as error:
        raise ValueError(f"column {column!r} is not a regular expression: {error}") from None


def _line(task: Mapping[str, Any]) -> str:
    """The task as JSON; raises ValueError if it has characters that no UTF-8 text has."""
    line = json.dumps(task, ensure_ascii=False, default=str)
    line.encode()
    return line


class _Template(string.Formatter):
    """A format string whose fields are columns."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Row) -> tuple[Any, str]:
        return _text(_column(field_name, kwargs)), field_name


def _prompt(setting: str, row: Row) -> str:
    return _Template().vformat(setting, (), row) if "{" in setting else _text(_column(setting, row))


def _text(value: Any) -> str:
    """The text of a column: itself, or the user's message of a conversation."""
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, Sequence) and all(isinstance(m, Mapping) and "content" in m for m in value):
        roles = [m.get("role") for m in value]
        if roles == ["user"]:
            if not isinstance(content := value[0]["content"], str):
                raise ValueError(f"the message's content is not text, but {type(content).__name__}")
            return content
        raise ValueError(
            f"the prompt is a conversation of {', '.join(map(str, roles))}: only one message of the user can "
            "be used; write a system message to rollout.system_prompt_template"
        )
    raise ValueError(f"the prompt is neither text nor a list of messages, but {type(value).__name__}")


def _column(name: str, row: Row) -> Any:
    """The value of a column; dots lead into nested ones.  A NaN, a missing value of pandas, is None."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if isinstance(value, str):  # nested columns of csv files and some datasets are JSON
            value = json.loads(value)
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(list(row)[:_SHOWN])
            raise ValueError(f"there is no column {name!r}; there are: {known}")
        value = value[part]
    return None if isinstance(value, float) and math.isnan(value) else value


# --- sources --------------------------------------------------------------------------------------


def _splits(settings: DataSettings, setting: str) -> Iterator[tuple[str, Iterable[Row]]]:
    for split, path in settings.paths.items():
        source, only = source_of(path)
        if source.is_file() and source.suffix in _READERS:
            if only not in (None, "train"):
                raise ConfigError(f"{setting}.path: {path}: a single file is the split train, not {only}")
            yield split or "train", _READERS[source.suffix](source, f"{setting}.path")
            continue
        found = _dataset(source, settings, setting)
        chosen = {name: rows for name, rows in found.items() if only in (None, name)}
        if not chosen or (split and len(chosen) > 1):  # a mapping names one split
            known = ", ".join(found)
            raise ConfigError(f"{setting}.path: {path}: write one of its splits behind it: :SPLIT of {known}")
        for name, rows in chosen.items():
            yield split or name, rows


def source_of(path: str) -> tuple[Path, str | None]:
    """The path, and the split that is written behind it."""
    if Path(path).exists() or ":" not in path:
        return Path(path), None
    name, _, split = path.rpartition(":")
    return Path(name), split


def _json_rows(path: Path, setting: str) -> Iterator[Row]:
    with path.open("rb") as stream:
        if path.suffix == ".json":
            rows = _json(stream.read(), f"{setting}: {path}")
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ConfigError(f"{setting}: {path} is not a list of objects (JSON lines end with .jsonl)")
            yield from rows
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            row = _json(line, f"{setting}: {path}, line {number}")
            if not isinstance(row, dict):
                raise ConfigError(f"{setting}: {path}, line {number} is not an object")
            yield row


def _csv_rows(path: Path, setting: str) -> Iterator[Row]:
    """Rows of text, where ``datasets`` would read 007 as 7 and the word None as missing.  Empty is None."""
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        try:
            for row in reader:
                if None in row or None in row.values():
                    where = f"{setting}: {path}, line {reader.line_num}"
                    raise ConfigError(f"{where} has not the columns of the first line")
                yield {name: text or None for name, text in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{setting}: {path}, line {reader.line_num}: {error}") from None


def _json(data: bytes, where: str) -> Any:
    """Decode UTF-8, with or without a byte order mark, and JSON."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply") from None


_READERS = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows}


def _dataset(source: Path, settings: DataSettings, setting: str) -> dict[str, Iterable[Row]]:
    """The splits of a file, folder or hub dataset that the package ``datasets`` reads."""
    try:
        import datasets
    except ImportError:
        raise PreflightError(
            f"{setting}.path: {source} needs the package datasets: pip install 'orhpc[data]'"
        ) from None
    datasets.disable_progress_bars()
    kind = _FORMATS.get(source.suffix)
    if source.is_file() and kind is None:  # its name could also be one of the hub
        known = ", ".join([*_READERS, *_FORMATS])
        raise ConfigError(f"{setting}.path: {source}: a file's name ends with one of {known}")
    try:
        if source.is_file() and kind is not None:
            return dict(datasets.load_dataset(kind, data_files=str(source)))  # type: ignore[arg-type]
        folder = source if source.is_dir() else _fetched(str(source), settings.revision, setting)
        if (folder / "state.json").is_file():  # of Dataset.save_to_disk, which load_dataset refuses
            saved: Any = datasets.load_from_disk(str(folder))
            return {str(saved.split or "train"): saved}
        builder = datasets.load_dataset_builder(str(folder), settings.subset)
        if (files := _plain_files(builder)) is not None:
            return {name: _rows_of(paths, f"{setting}.path") for name, paths in files.items()}
        return dict(datasets.load_dataset(str(folder), settings.subset))  # type: ignore[arg-type]
    except OrhpcError:
        raise
    except Exception as error:  # noqa: BLE001 - pyarrow, datasets and fsspec raise errors of many kinds
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{setting}.path: {source} cannot be read: {reason}") from None


def _plain_files(builder: Any) -> dict[str, list[Path]] | None:
    """Files by split, if they have JSON lines or comma-separated columns without declared types or options.

    ``datasets`` would guess types: the label 007 would be the number 7, and 2020-01-01 a time.
    """
    config, own = builder.config, ("name", "version", "data_dir", "data_files", "description")
    plain = dataclasses.replace(type(config)(), **{name: getattr(config, name) for name in own})
    found = {str(split): [Path(p) for p in paths] for split, paths in (config.data_files or {}).items()}
    files = [path for paths in found.values() for path in paths]
    readable = all(path.suffix in (".jsonl", ".csv") and path.is_file() for path in files)
    return found if files and readable and config == plain and builder.info.features is None else None


def _rows_of(files: Iterable[Path], setting: str) -> Iterator[Row]:
    for file in files:
        yield from _READERS[file.suffix](file, setting)


def require_source(source: Path, setting: str) -> None:
    """Raises ConfigError if a source is neither on this machine nor can be a dataset of the hub.

    A relative path of two parts could be the name of a dataset: one that ends as a file does is a file.
    """
    if source.exists() or (is_hub_name(str(source)) and source.suffix not in (*_READERS, *_FORMATS)):
        return
    raise ConfigError(
        f"{setting}.path: {source}: no such file or folder, and not a dataset (Organization/Name)"
    )


def _fetched(name: str, revision: str | None, setting: str) -> Path:
    require_source(Path(name), setting)
    from orhpc.models.hub import fetch_dataset

    return fetch_dataset(name, revision, f"{setting}.path")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the task files of one environment; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m orhpc.data.task_file", description=__doc__)
    parser.add_argument("--settings-json", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--setting", default="data", help="name of the settings, for errors")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        settings = DataSettings.model_validate_json(options.settings_json)
        counts = write_tasks(settings, options.folder, options.setting)
    except OSError as error:
        return _refused(ConfigError(f"{options.setting}: {error}"))
    except OrhpcError as error:
        return _refused(error)
    for split, (count, left_out) in counts.items():
        duplicates = f", {left_out} duplicates left out (deduplicate)" if left_out else ""
        print(f"orhpc: {options.setting}: split {split}: {count} tasks{duplicates}", file=sys.stderr)
    print(json.dumps({"folder": str(options.folder)}))
    return EXIT_OK


def _refused(error: OrhpcError) -> int:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
    return policy_of(error).exit_code


if __name__ == "__main__":
    sys.exit(main())
