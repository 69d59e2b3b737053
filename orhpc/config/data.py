"""Prompts from a file or dataset, judged by a verifier: ``environments.NAME.data``."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import model_validator

from orhpc.config.base import Section

VERIFIERS = ("math", "exact", "regex")
"""Names of ``data.verifier``; anything else is ``package.module:function``."""


class DataSettings(Section):
    """Tasks of one turn: a prompt, and a label by which a verifier judges the answer."""

    path: str | dict[str, str]
    """Where the prompts are: a file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``), a folder of such files,
    or a dataset of the Hugging Face hub (``Organization/Name``). ``PATH:SPLIT`` takes one split of a dataset.
    A mapping gives each split its own, for example ``{train: data/train.jsonl, test: data/test.jsonl}``. A
    single file is the split ``train``; a dataset has its own splits."""
    revision: str | None = None
    """Branch, tag or commit of a dataset of the hub. Null: ``main`` at the first start of the run."""
    subset: str | None = None
    """Configuration of a dataset that has several. Null: its default."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of messages of which one is the user's. A text with braces is a
    template: ``"{question} Put the answer in \\\\boxed{{}}."``. Dots lead into nested columns."""
    label: str | None = "label"
    """Column of the correct answer, for example ``answer`` or ``reward_model.ground_truth``. Null: none; the
    verifier is then a function."""
    verifier: str = "math"
    """How an answer is judged. ``math``: equal to the label as a mathematical expression, by the package
    math-verify. ``exact``: the same text, apart from spaces and the case of letters. ``regex``: the label is
    a regular expression that is found in the answer. ``package.module:function``: called with the answer, the
    label and the whole row; returns the reward or a bool, and may be a coroutine."""
    extract: str | None = None
    """Regular expression with one group: the last match in the answer is judged instead of the whole answer,
    for example ``"Answer: (.*)"``. An answer without a match is wrong. Null: the whole answer is judged."""
    difficulty: str | None = None
    """Column with a number by which tasks are sorted, the easiest first; for ``order: easy_first``. Null: the
    order of the file."""
    deduplicate: bool = True
    """Leave out rows whose prompt and label occurred before in the same split."""

    @property
    def paths(self) -> dict[str, str]:
        """Path by split; the split of a single path is the empty string."""
        return self.path if isinstance(self.path, dict) else {"": self.path}

    def source(self) -> dict[str, Any]:
        """What the task files depend on, as JSON."""
        return self.model_dump(mode="json", exclude={"verifier", "extract"}) | {"rows": self.is_function}

    @property
    def is_function(self) -> bool:
        """Whether the verifier is a function of the user."""
        return self.verifier not in VERIFIERS

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.paths or not all(self.paths.values()):
            raise ValueError("path is empty")
        if any(not re.fullmatch(r"[\w.-]*", split) for split in self.paths):
            raise ValueError("path: a split's name has only letters, digits, '_', '-' and '.'")
        if self.is_function and ":" not in self.verifier:
            raise ValueError(
                f"verifier {self.verifier!r} is none of {', '.join(VERIFIERS)}, nor package.module:function"
            )
        if self.label is None and not self.is_function:
            raise ValueError(f"verifier {self.verifier!r} needs a label")
        if self.extract is not None:
            try:
                groups = re.compile(self.extract).groups
            except re.error as error:
                raise ValueError(f"extract is not a regular expression: {error}") from None
            if groups != 1:
                raise ValueError(f"extract needs one group in parentheses, and has {groups}")
        return self
