"""Tasks of reasoning-gym, generated and verified by that package; requires ``orhpc[gym]``."""

from __future__ import annotations

import functools
import json
from typing import Any

from openreward.environments import TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel, Field, model_validator

from orhpc.environments import bundled
from orhpc.errors import ConfigError
from orhpc.judging import killable, puzzles

_NOT_READ = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, SyntaxError)
"""What some scorers raise for an answer of another form than they expect: it is wrong, not a failure."""


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(
            "environment 'reasoning-gym' needs the package reasoning-gym: pip install 'orhpc[gym]'"
        ) from None
    return reasoning_gym


class Options(bundled.Options):
    task: str = "basic_arithmetic"
    """Name of a reasoning-gym dataset."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the dataset."""

    @model_validator(mode="after")
    def _exists(self) -> Options:
        factory = _reasoning_gym().factory
        if self.task not in factory.DATASETS:
            raise ValueError(f"reasoning-gym has no task {self.task!r}")
        try:
            _dataset(self, "train")
        except Exception as error:  # noqa: BLE001 - its datasets check settings in many ways, or not at all
            raise ValueError(f"settings of {self.task!r}: {error}") from None
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


@functools.lru_cache(maxsize=8)
def _dataset(options: Options, split: str) -> Any:
    test = split == "test"
    return _reasoning_gym().create_dataset(
        options.task,
        size=options.n_test if test else options.n_tasks,
        # Distant seeds, since the datasets seed a task with seed + index.
        seed=options.seed + (1 << 30 if test else 0),
        **options.settings,
    )


class Answer(BaseModel):
    text: str


class ReasoningGym(bundled.BundledEnvironment):
    """The reward is the score of reasoning-gym's verifier, 0 to 1; ``<answer>`` tags are optional."""

    Options = Options

    def __init__(self, task_spec: Any = None, secrets: dict[str, str] | None = None) -> None:
        super().__init__(task_spec or {}, secrets or {})
        spec: Any = self.task_spec
        self._dataset = _dataset(self.options, spec["split"])
        self._entry = self._dataset[spec["index"]]

    async def get_prompt(self) -> list[TextBlock]:
        return bundled.text(self._entry["question"])

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        text = answer.text
        if "<answer>" in text:
            text = text.rpartition("<answer>")[2].partition("</answer>")[0]
        settings = json.dumps(self.options.settings)
        asked = (self.options.task, settings, dict(self._entry), text.strip())
        try:
            score, why = await killable.call(puzzles.score, *asked, prepare=puzzles.prepare), ""
        except killable.NoResult as problem:
            score, why = 0.0, f": the comparison {problem}"
        except _NOT_READ as error:
            score, why = 0.0, f": the answer could not be read ({type(error).__name__})"
        return ToolOutput(blocks=bundled.text(f"{score:.2f}{why}"), reward=score, finished=True)
