"""Prompts from task files, and the verifiers that judge the answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orhpc.config.data import DataSettings
from orhpc.data.task_file import write_tasks
from orhpc.environments.prompts import Answer, Prompts
from orhpc.environments.server import environment_class
from orhpc.environments.verifiers import verifier_of
from orhpc.errors import ConfigError, UserCodeError
from orhpc.judging import expressions, killable
from orhpc.process.user_code import error_of_metadata

ROWS = [{"prompt": f"What is {i} + {i}? Grüße", "label": str(2 * i)} for i in range(5)]


def served(tmp_path: Path, **settings: Any) -> Any:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    data = DataSettings(path={"train": str(source), "test": str(source)}, **settings)
    write_tasks(data, tmp_path / "out", "data")
    options = {"folder": str(tmp_path / "out"), "data": data.model_dump(mode="json")}
    return environment_class("orhpc.environments.prompts:Prompts", options)


def reward(environment: Any, answer: str, index: int = 3) -> float:
    async def run() -> float:
        session: Prompts = environment(await environment.get_task("train", index))
        output = await session.answer(Answer(text=answer))
        if error := error_of_metadata(output.metadata):
            assert (output.reward, output.finished) == (None, True)
            raise error
        return output.reward

    return asyncio.run(run())


def test_tasks_are_the_lines_of_the_file(tmp_path: Path) -> None:
    environment = served(tmp_path, verifier="exact")
    assert [split.name for split in environment.list_splits()] == ["test", "train"]
    assert asyncio.run(environment.num_tasks("train")) == len(ROWS)
    for index, row in enumerate(ROWS):
        session = environment(asyncio.run(environment.get_task("test", index)))
        (block,) = asyncio.run(session.get_prompt())
        assert block.text == row["prompt"]
    with pytest.raises(IndexError):
        asyncio.run(environment.get_task("train", len(ROWS)))


@pytest.mark.parametrize(
    ("settings", "answer", "expected"),
    [
        ({"verifier": "exact"}, " 6\n", 1.0),
        ({"verifier": "exact"}, "it is 6", 0.0),
        ({"verifier": "exact", "extract": r"Answer: (\d+)"}, "Answer: 4. No, Answer: 6", 1.0),
        ({"verifier": "exact", "extract": r"Answer: (\d+)"}, "6", 0.0),
        ({"verifier": "regex"}, "it is 6.", 1.0),
        ({"verifier": "regex"}, "it is 7.", 0.0),
    ],
)
def test_texts_are_compared(tmp_path: Path, settings: dict[str, Any], answer: str, expected: float) -> None:
    assert reward(served(tmp_path, **settings), answer) == expected


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{34}", "34", True),
        ("B\n", "B", True),
        ("Yes", "Yes", True),
        ("C", "B", False),
        (r"First \boxed{1}, but then \boxed{2}", "2", True),
        ("The answer is $x^2 + 2x + 1$", "(x+1)^2", True),
        ("Answer: 17", "17", True),
        ("17 and then 18", "17", False),
        ("I do not know", "17", False),
        ("", "0", False),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
        (r"$\boxed{5}$. (I put it in \boxed{} as asked.)", "5", True),
        (r"$\boxed{5}$. (I put it in \boxed{} as asked.)", "6", False),
        (r"It costs \boxed{36}", r"\$36", True),
        (r"It costs $32348$", r"\$32,348", True),
    ],
)
def test_expressions_are_compared(answer: str, label: str, expected: bool) -> None:
    pytest.importorskip("math_verify")
    assert expressions.equal(answer, label) is expected


def test_a_label_that_is_no_expression_is_an_error() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="is no mathematical expression"):
        expressions.equal("1", "")


@pytest.mark.slow
def test_an_expression_that_takes_for_ever_is_wrong_and_later_ones_are_judged(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    judge = verifier_of("math", None)

    async def run() -> list[Any]:
        return await asyncio.gather(
            *(judge(a, "9", {}) for a in ["9**9**9**9**9", "9", "$9^{9^{9^{9}}}$", "8"])
        )

    verdicts = asyncio.run(run())
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.0, 0.0]
    assert [bool(verdict.note) for verdict in verdicts] == [True, False, True, False]
    assert asyncio.run(judge("9", "9", {})).reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"verifier": "regex"}, {"verifier": "exact", "extract": r"^(\d+,?\s*)+$"}]
)
def test_a_regular_expression_that_takes_for_ever_is_wrong_and_keeps_no_other_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(killable, "LIMIT_S", 1.0)
    judge = verifier_of(settings["verifier"], settings.get("extract"))
    label = r"^(\d+,?\s*)+$" if "extract" not in settings else "x"

    async def run() -> tuple[Any, int]:
        turns = 0
        judging = asyncio.ensure_future(judge("1" * 40 + " cats", label, {}))
        while not judging.done():
            await asyncio.sleep(0.05)
            turns += 1
        return await judging, turns

    verdict, turns = asyncio.run(run())
    assert verdict.reward == 0.0
    assert "took more than 1 s" in verdict.note
    assert turns > 5
    assert asyncio.run(verifier_of("regex", None)("17 cats", r"^\d+ cats$", {})).reward == 1.0


@pytest.mark.parametrize(
    ("kind", "number"), [("def", "float"), ("async def", "float"), ("def", "float32"), ("def", "tensor")]
)
def test_a_function_of_the_user_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: str
) -> None:
    name = f"judging_{kind.replace(' ', '_')}_{number}"
    (tmp_path / f"{name}.py").write_text(
        f"from numpy import float32\nfrom torch import tensor\n{kind} judge(answer, label, row):\n"
        f"    return {number}(0.5 * (row['prompt'] in answer) + (label is None))\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    environment = served(tmp_path, verifier=f"{name}:judge", label=None)
    assert reward(environment, ROWS[3]["prompt"]) == 1.5


def test_a_function_may_return_a_comparison_of_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def judge(answer, label, row):\n    return numpy.float32(1.0) == len(answer)\n"
    (tmp_path / "judging_arrays.py").write_text(f"import numpy\n{body}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    environment = served(tmp_path, verifier="judging_arrays:judge")
    assert [reward(environment, answer) for answer in ("x", "xx")] == [1.0, 0.0]


def test_a_function_that_returns_no_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judging_wrongly.py").write_text("def judge(answer, label, row):\n    return 'good'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UserCodeError, match=r"judging_wrongly:judge raised TypeError: it returned 'good'"):
        reward(served(tmp_path, verifier="judging_wrongly:judge"), "x")


def test_an_exception_of_a_function_keeps_its_type_place_and_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judging_raises.py").write_text("def judge(answer, label, row):\n    return row['points']\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(
        UserCodeError, match=r"raised KeyError: 'points' \(.*judging_raises.py:2 in judge"
    ) as caught:
        reward(served(tmp_path, verifier="judging_raises:judge"), "x")
    assert "return row['points']" in caught.value.trace


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("next(iter([]))", r"raised StopIteration.*judging_0\.py:2 in judge"),
        ("sys.exit(3)", r"raised SystemExit: 3 \(.*judging_1\.py:2 in judge"),
    ],
)
def test_a_function_that_ends_its_thread_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, named: str
) -> None:
    """With asyncio.to_thread alone the first call is never answered, and the second ends the loop."""
    name = f"judging_{int('exit' in body)}"
    (tmp_path / f"{name}.py").write_text(f"import sys\ndef judge(answer, label, row): {body}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    environment = served(tmp_path, verifier=f"{name}:judge")

    async def judged() -> None:
        session: Prompts = environment(await environment.get_task("train", 0))
        output = await asyncio.wait_for(session.answer(Answer(text="x")), 30)
        error = error_of_metadata(output.metadata)
        assert error is not None
        raise error

    with pytest.raises(UserCodeError, match=named):
        asyncio.run(judged())


def test_a_decorated_coroutine_function_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "async def one(answer, label, row):\n    return 1.0\njudge = lambda *given: one(*given)\n"
    (tmp_path / "judging_decorated.py").write_text(code)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert reward(served(tmp_path, verifier="judging_decorated:judge"), "x") == 1.0


def test_a_missing_function_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere:judge"):
        served(tmp_path, verifier="nowhere:judge")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "path is empty"),
        ({"path": {}}, "path is empty"),
        ({"path": {"a b": "x"}}, "a split's name"),
        ({"path": "x", "verifier": "maths"}, "none of math, exact, regex"),
        ({"path": "x", "label": None}, "needs a label"),
        ({"path": "x", "extract": "("}, "not a regular expression"),
        ({"path": "x", "extract": "(a)(b)"}, "one group"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**settings)
