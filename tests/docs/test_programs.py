"""The Python examples of the documentation run: each is imported, and what it defines is used.

Those that read a run are in ``tests/first_day/test_documentation.py``, which has one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orhpc.rollout.slime import modules
from orhpc.types import PromptGroup, RolloutEnd
from tests.docs.test_docs import blocks
from tests.unit.driver.test_metrics import group
from tests.unit.rundir.test_record import make_rollout

READ_A_RUN = ("docs/run-directory.md", "docs/guide/evaluate-export.md")
"""Pages whose programs need a run."""


def rewarded(*rewards: float) -> PromptGroup:
    found = group(1, "room", *[RolloutEnd.TERMINAL] * len(rewards))
    pairs = zip(found.rollouts, rewards, strict=True)
    return replace(found, rollouts=tuple(replace(rollout, reward=reward) for rollout, reward in pairs))


def check_sums(environment: Any) -> None:
    assert len(environment.tasks("train")) == 100
    session = environment({"a": 3, "b": 7})
    assert session.prompt() == "What is 3 + 7?"
    answered = asyncio.run(session.answer(sys.modules[environment.__module__].Answer(text=" 10 ")))
    assert (answered.reward, answered.finished) == (1.0, True)


def check_questions(environment: Any) -> None:
    Path("data").mkdir()
    Path("data/test.jsonl").write_text('{"question": "Where is the Louvre?", "solution": "Paris"}\n')
    (task,) = environment.tasks("test")
    session = environment(task.model_dump())
    assert session.prompt() == "Where is the Louvre?"
    answered = asyncio.run(session.answer(sys.modules[environment.__module__].Answer(text="In Rome.")))
    assert (answered.reward, answered.finished) == (0.0, True)


def check_cats(environment: Any) -> None:
    Path("photos").mkdir()
    Path("photos/garden-3.png").write_bytes(b"pixels")
    (task,) = environment.tasks("train")
    session = environment(task.model_dump())
    image, text = asyncio.run(session.get_prompt())
    assert (image.data, image.type, text.type) == ("cGl4ZWxz", "image", "text")
    answered = asyncio.run(session.answer(sys.modules[environment.__module__].Answer(text="3")))
    assert (answered.reward, answered.finished) == (1.0, True)


def check_brief(reward: Callable[..., float]) -> None:
    rollout = make_rollout(0, 0, 12, reward=1.0)
    assert reward(rollout) == 1.0 - 0.001 * rollout.response_tokens


def check_close(reward: Callable[..., float]) -> None:
    assert [reward(answer, 3.0, {}) for answer in ("3", "3.25", "three")] == [1.0, 0.75, 0.0]


def check_ranks(advantage: Callable[..., Any]) -> None:
    assert advantage([rewarded(0.0, 0.5, 1.0)]) == [[-1.0, 0.0, 1.0]]


def check_filter(wanted: Callable[..., bool]) -> None:
    assert [wanted(rewarded(*r)) for r in ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))] == [False, True, False]


def is_defined(function: Callable[..., Any]) -> None:
    """It needs engines: tests/local runs agents and functions of slime in whole runs."""
    assert asyncio.iscoroutinefunction(function)


USES: dict[str, Callable[[Any], None]] = {
    "Sums": check_sums,
    "Questions": check_questions,
    "Cats": check_cats,
    "brief": check_brief,
    "close": check_close,
    "ranks": check_ranks,
    "neither_hopeless_nor_trivial": check_filter,
    "longer_for_late_tasks": is_defined,
    "generate": is_defined,
}
"""How what an example defines is used, by its name."""


def programs() -> Iterator[Any]:
    for block in blocks("python"):
        if not str(block.id).startswith(READ_A_RUN):
            yield block


@pytest.mark.parametrize("text", programs())
def test_a_python_example_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modules.install()  # the names of slime's modules
    (tmp_path / "example.py").write_text(text)
    spec = importlib.util.spec_from_file_location("example", tmp_path / "example.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example", example)
    spec.loader.exec_module(example)
    used = [name for name in USES if hasattr(example, name)]
    assert used, "say in USES how the example is used"
    for name in used:
        USES[name](getattr(example, name))
