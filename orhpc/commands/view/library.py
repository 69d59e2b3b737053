"""The record of a run, read part by part: a part is a training step or an evaluation."""

from __future__ import annotations

import contextlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from orhpc.commands.view.filter import Filter
from orhpc.commands.view.tokens import TokenTexts, segments
from orhpc.errors import RecordError
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile, read_step
from orhpc.rundir.trained import TrainedRollout, read_trained
from orhpc.types import Rollout, RolloutSummary

_STEP, _EVALUATION = "step_", "evaluation_"
_NAME = re.compile(f"(?:{_STEP}|{_EVALUATION})[0-9]+")
_SNIPPET = 80
"""Characters shown on each side of a found text."""
_CACHED = 8
"""Parts that are kept in memory."""
_Part = tuple[list[RolloutSummary], dict[str, TrainedRollout]]
_Files = tuple[tuple[str, int], ...]
"""Names and times of change."""


class Library:
    """Reads what is asked for, and nothing at the start but the names of the parts."""

    def __init__(self, run: RunDir, texts: TokenTexts, first: str | None = None) -> None:
        """``texts``: decodes tokens, if the run's tokenizer is there; ``first``: the part to show first."""
        self._run = run
        self._texts = texts
        self._first = first
        self._cache: OrderedDict[str, tuple[_Files, _Part]] = OrderedDict()

    def about(self) -> dict[str, Any]:
        """The run's name, its parts, the one to show first, and why there are no tokens (or nothing)."""
        parts = self.parts()
        steps = [part for part in parts if part.startswith(_STEP)]
        return {
            "name": self._run.path.resolve().name,
            "parts": parts,
            "first": self._first or (steps or parts or [""])[-1],
            "problem": self._texts.problem,
        }

    def parts(self) -> list[str]:
        """Names of all recorded parts: steps in order, then evaluations in order."""
        found: list[str] = []
        for kind in (_STEP, _EVALUATION):
            names = (path.name.removeprefix(kind) for path in self._run.rollouts.glob(f"{kind}*"))
            found += [f"{kind}{number}" for number in sorted(int(n) for n in names if n.isdigit())]
        return found

    def chosen(self, step: int | None, evaluation: int | None) -> list[str]:
        """Names of the parts to look in, the newest first: one, or all steps if neither is given.

        Raises:
            RecordError: there is no such part, or no step is recorded yet.
        """
        if evaluation is not None:
            name = f"{_EVALUATION}{evaluation}"
        elif step is not None:
            name = f"{_STEP}{step}"
        else:
            parts = self.parts()
            if steps := [part for part in reversed(parts) if part.startswith(_STEP)]:
                return steps
            hint = "; orhpc view RUN --evaluation STEP" if parts else ""
            raise RecordError(f"{self._run.rollouts}: no step is recorded yet{hint}")
        self._folder(name)
        return [name]

    def rows(self, part: str) -> list[dict[str, Any]]:
        """All rollouts of a part, by group and sample: numbers and names without text and tokens.

        Raises:
            RecordError: there is no such part, or it is damaged.
            StorageRefused: the filesystem refuses to read it.
        """
        summaries, trained = self._read(part)
        return [_row(s, trained.get(s.id), _version(part)) for s in summaries]

    def rollout(self, part: str, name: str) -> dict[str, Any]:
        """One rollout with its transcript and its tokens in segments (:func:`tokens.segments`).

        Raises:
            RecordError: there is no such rollout.
        """
        if (found := self.record(part, name)) is None:
            raise RecordError(f"there is no rollout {name!r} in {title_of(part)}")
        summary, rollout = found
        trained = self._read(part)[1].get(name)
        return _row(summary, trained, _version(part)) | {
            "messages": _encodable(rollout.messages),
            "turn_list": [asdict(turn) for turn in rollout.turns],
            "segments": segments(rollout, trained, self._texts),
        }

    def record(self, part: str, name: str) -> tuple[RolloutSummary, Rollout] | None:
        """The rollout with this id as it was recorded, if the part has it.

        Raises:
            RecordError: there is no such part, or it is damaged.
        """
        for summary in self._read(part)[0]:
            if summary.id == name and summary.location.file is not None:
                with RolloutFile(summary.location.file) as record:
                    return summary, record.rollout(summary.location.row)
        return None

    def search(self, wanted: Filter, only: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield ``{"part", "row", "snippet"}`` of each rollout that passes, newest steps first, and after
        each part ``{"searched", "of"}``.

        A part that is damaged or being written is left out.

        ``only``: search this part alone.
        """
        parts = [part for part in self.parts() if wanted.inside(step_of(part)) and only in (None, part)]
        # The evaluation after a step is newer than the step.
        parts.sort(key=lambda part: (step_of(part), part.startswith(_EVALUATION)), reverse=True)
        for searched, part in enumerate(parts, 1):
            with contextlib.suppress(RecordError):  # damaged, or being written
                for row, snippet in self._matches(part, wanted):
                    yield {"part": part, "row": row, "snippet": snippet}
            yield {"searched": searched, "of": len(parts)}

    def _matches(self, part: str, wanted: Filter) -> Iterator[tuple[dict[str, Any], str]]:
        needle = wanted.text.casefold()
        files: dict[str, RolloutFile] = {}
        summaries, trained = self._read(part)
        try:
            for summary in summaries:
                row = _row(summary, trained.get(summary.id), _version(part))
                if not wanted.accepts(row):
                    continue
                if not needle or needle in row["task"].casefold():
                    yield row, ""
                    continue
                file = str(summary.location.file)
                if file not in files:
                    files[file] = RolloutFile(file)
                if (snippet := _snippet(files[file].messages(summary.location.row), needle)) is not None:
                    yield row, snippet
        finally:
            for file in files.values():
                file.close()

    def _read(self, part: str) -> _Part:
        """The part's rollouts and what training computed for them, read again only if the files changed."""
        folder = self._folder(part)
        try:
            files = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.h5")))
        except FileNotFoundError as error:  # removed meanwhile
            raise RecordError(f"{error.filename}: no such file") from None
        if part in self._cache and self._cache[part][0] == files:
            self._cache.move_to_end(part)
            return self._cache[part][1]
        found = read_step(folder, trained_only=False), _trained(folder)
        self._cache[part] = files, found
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return found

    def _folder(self, part: str) -> Path:
        # Not by listing the parts: a search would take time quadratic in the steps.
        folder = self._run.rollouts / part
        if not _NAME.fullmatch(part) or not folder.is_dir():
            raise RecordError(f"{self._run.rollouts}: there is no {title_of(part)}")
        return folder


def step_of(part: str) -> int:
    """The step of a part's name."""
    return int(part.rsplit("_", 1)[1])


def title_of(part: str) -> str:
    """A part's name in words; a name that is not one of a part is returned as it is."""
    for kind, words in ((_STEP, "step"), (_EVALUATION, "evaluation after step")):
        number = part.removeprefix(kind)
        if number != part and number.isdigit():
            return f"{words} {number}"
    return part


def _trained(folder: Path) -> dict[str, TrainedRollout]:
    try:
        return read_trained(folder)
    except RecordError:
        return {}


def _version(part: str) -> int | None:
    """Policy version that a step trained; None for an evaluation."""
    return int(part.removeprefix(_STEP)) - 1 if part.startswith(_STEP) else None


def _row(summary: RolloutSummary, trained: TrainedRollout | None, version: int | None) -> dict[str, Any]:
    known = version is not None and summary.min_version >= 0
    return {
        "id": summary.id,
        "group": summary.group_id,
        "sample": summary.sample,
        "task": summary.task.id,
        "environment": summary.task.environment,
        "reward": summary.reward,
        "advantage": None if trained is None or not isfinite(trained.advantage) else trained.advantage,
        "trained": trained is not None,
        "length": summary.length,
        "response_tokens": summary.response_tokens,
        "turns": summary.turns,
        "tool_calls": summary.tool_calls,
        "end": str(summary.end),
        "version": version,
        "age": version - summary.min_version if known and version is not None else None,
        "seconds": summary.seconds,
        "error": summary.error or "",
        "replayed_turns": summary.replayed_turns,
        "replay_mismatch": summary.replay_mismatch or "",
    }


def _snippet(messages: str, needle: str) -> str | None:
    """The text around ``needle`` in a transcript; None if it is not there."""
    # JSON escapes only some characters, so that a plain needle is usually found without parsing.
    if needle.isascii() and not set(needle) & set('"\\\n\t') and needle not in messages.casefold():
        return None
    for text in _strings(json.loads(messages)):
        at = text.casefold().find(needle)
        if at >= 0:
            return text[max(0, at - _SNIPPET) : at + len(needle) + _SNIPPET]
    return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _encodable(messages: Any) -> Any:
    """The messages without what browsers cannot read: halves of characters, and numbers that JSON lacks.

    The latter become text; a policy can write 1e999 in a tool call.
    """
    text = json.dumps(messages, ensure_ascii=False).encode("utf-8", "replace")
    return json.loads(text, parse_constant=str)
