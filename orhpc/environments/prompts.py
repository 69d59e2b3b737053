"""Tasks of one turn from task files (:mod:`orhpc.data.task_file`), judged by a verifier."""

from __future__ import annotations

import functools
import json
import mmap
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from openreward.environments import Split, TextBlock
from pydantic import BaseModel

from orhpc.config.data import DataSettings
from orhpc.environments.task import Options as TaskOptions
from orhpc.environments.task import TaskEnvironment, ToolOutput, reply, terminal, tool
from orhpc.environments.verifiers import Verifier, verifier_of
from orhpc.errors import UserCodeError
from orhpc.process.user_code import error_metadata


class Options(TaskOptions):
    folder: Path
    """Of the task files."""
    data: DataSettings


class Answer(BaseModel):
    text: str


class Line(BaseModel):
    """One task."""

    split: str
    index: int


class TaskFile:
    """The lines of a task file, read when they are needed."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = np.flatnonzero(np.frombuffer(self._bytes, np.uint8) == ord("\n"))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self._ends[index - 1]) + 1 if index else 0
        return json.loads(self._bytes[start : int(self._ends[index])])


class Prompts(TaskEnvironment[Line]):
    """The reward is that of the verifier."""

    Task = Line
    Options = Options
    options: ClassVar[Options]

    @classmethod
    @functools.cache
    def _file(cls, split: str) -> TaskFile:
        return TaskFile(cls.options.folder / f"{split}.jsonl")

    @classmethod
    @functools.cache
    def _verifier(cls) -> Verifier:
        return verifier_of(cls.options.data.verifier, cls.options.data.extract)

    @classmethod
    def configure(cls, **options: Any) -> type[Prompts]:
        """Return a subclass with these options.

        Raises:
            pydantic.ValidationError: an option is invalid.
            ConfigError: what the verifier needs is missing.
        """
        subclass = super().configure(**options)
        subclass._verifier()
        return subclass

    @classmethod
    def list_splits(cls) -> list[Split]:
        kinds: dict[str, Any] = {"train": "train", "test": "test"}
        names = sorted(path.stem for path in cls.options.folder.glob("*.jsonl"))
        return [Split(name=name, type=kinds.get(name, "validation")) for name in names]

    @classmethod
    async def num_tasks(cls, split: str) -> int:
        return len(cls._file(split))

    @classmethod
    async def get_task(cls, split: str, index: int) -> dict[str, Any]:
        cls._file(split)[index]
        return {"split": split, "index": index}

    @classmethod
    async def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"split": split, "index": index} for index in range(len(cls._file(split)))]

    @property
    def line(self) -> dict[str, Any]:
        """The task's line of its file."""
        return self._file(self.task.split)[self.task.index]

    async def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=self.line["prompt"])]

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        line = self.line
        try:
            verdict = await self._verifier()(answer.text, line.get("label"), line.get("row", {}))
        except UserCodeError as error:
            # As a result, since the protocol sends only the message of an exception.
            return reply("The verifier raised.", finished=True, metadata=error_metadata(error))
        note = {"verifier": verdict.note} if verdict.note else None
        text = "Right." if verdict.reward > 0 else "Wrong."
        return reply(text, reward=verdict.reward, finished=True, metadata=note)
