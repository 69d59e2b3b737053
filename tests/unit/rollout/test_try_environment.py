"""Playing an environment by hand and listing its tasks, with the project's example environments."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orhpc.environments import TaskEnvironment
from orhpc.errors import MalformedToolCall
from orhpc.examples.end_state import Shelf
from orhpc.examples.one_turn import Sums
from orhpc.examples.tools import GuessNumber
from orhpc.rollout.try_environment import main, read_call

pytestmark = pytest.mark.slow

CONFIG = """
environments:
  sums: {serve: "orhpc.examples.one_turn:Sums", serve_options: {max_number: 20}}
  guess: {serve: "orhpc.examples.tools:GuessNumber", max_turns: 3, nonterminal_reward: -0.5}
  shelf: {serve: "orhpc.examples.end_state:Shelf", reward_reduction: max}
  mine: {serve: "mine_to_try:Mine"}
  broken: {serve: "mine_to_try:Broken"}
  absent: {serve: "mine_to_try:NoSuch"}
"""
MINE = '''
from orhpc.examples.one_turn import Answer, Sum
from orhpc.environments import TaskEnvironment, ToolOutput, reply, terminal, tool

class Mine(TaskEnvironment[Sum]):
    """Tools that do each thing wrong that an environment can do wrong."""
    Task = Sum

    @classmethod
    def tasks(cls, split):
        return [Sum(a=1, b=2)]

    def prompt(self):
        return "Do it."

    @tool
    async def stumble(self, answer: Answer) -> ToolOutput:
        """Raises on some arguments."""
        return reply(str({}[answer.text]))

    @terminal
    @tool
    async def end(self, answer: Answer) -> ToolOutput:
        """Pays nothing."""
        if answer.text == "raise":
            raise LookupError("no verdict")
        return reply("over", finished=True)

class Broken(Mine):
    def prompt(self):
        return self.task.no_such_field

def halved(rollout):
    return rollout.reward / 2

def wrong(rollout):
    return rollout.nothing
'''
Play = Callable[..., tuple[int, str, str]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "mine_to_try.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "script.txt"

    def played(environment: str, *turns: str, more: tuple[str, ...] = ()) -> tuple[int, str, str]:
        script.write_text("\n".join(["# a comment", "", *turns]))
        arguments = [str(tmp_path / "c.yaml"), "--env", environment, "--script", str(script), *more]
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return played


def task_of(environment: type[TaskEnvironment[Any]], split: str = "train") -> Any:
    return environment.tasks(split)[0]


def test_an_answer_in_one_turn_is_rewarded(play: Play) -> None:
    task = task_of(Sums.configure(max_number=20))
    code, output, _ = play("sums", str(task.a + task.b))
    assert code == 0
    assert f"What is {task.a} + {task.b}?" in output
    assert "--- reward 1, the task is finished" in output
    assert "--- end: terminal; sum of [1], clamped: 1" in output
    code, output, _ = play("sums", "no idea", more=("rollout.custom_reward=mine_to_try:halved",))
    assert (code, "clamped: 0\n" in output, "mine_to_try:halved: 0 (" in output) == (0, True, True)


def test_tool_calls_and_errors_of_the_model_are_shown(play: Play) -> None:
    number = task_of(GuessNumber).number
    call = f"guess {json.dumps({'number': number})}"
    code, output, _ = play("guess", 'guess {"nunber": 1}', call)
    assert code == 0
    assert "!! input_validation: the arguments violate the tool's schema" in output
    assert "--- end: terminal; sum of [1], clamped: 1" in output
    wrong = 'guess {"number": 99}'
    code, output, _ = play("guess", wrong, "guess {", 'look {"at": 1}', call)
    assert code == 0
    assert "!! malformed: this is not a valid call" in output
    assert "!! not_found: the environment has no such tool" in output
    assert "max_turns is 3: the rollout ends" in output
    assert "--- end: max_turns; sum of [-0.5 (nonterminal_reward)], clamped: -0.5" in output
    code, output, _ = play("guess", "I give up.")
    assert "the environment has no tool for it" in output
    assert "--- end: answered" in output
    code, output, _ = play("guess", wrong)
    assert (code, "no turns are left, but the task has not ended" in output) == (1, True)


def test_the_reward_depends_on_the_end_state(play: Play) -> None:
    titles = list(task_of(Shelf).titles)
    turns = []
    for place, title in enumerate(sorted(titles)):
        other = titles.index(title)
        titles[place], titles[other] = titles[other], titles[place]
        turns.append(f"swap {json.dumps({'first': place + 1, 'second': other + 1})}")
    code, output, _ = play("shelf", *turns, "I am done.")
    assert code == 0
    assert "3 of 3 in order." in output
    assert "--- end: terminal; max of [1], clamped: 1" in output
    assert 'not shown to a model): {"swaps": 4}' in output


def test_an_error_of_the_environment_is_explained_with_its_traceback(play: Play) -> None:
    code, output, _ = play("mine", 'stumble {"text": "x"}', "over")
    assert code == 1
    assert "!! tool_raised: your tool raised" in output
    assert "return reply(str({}[answer.text]))" in output
    assert "site-packages" not in output
    assert "!! the task ended without a reward" in output
    code, output, _ = play("mine", "raise")
    assert code == 1
    assert 'raise LookupError("no verdict")' in output
    assert "!! the environment's code raised: the rollout would be retried, then fail" in output


@pytest.mark.long
def test_an_environment_that_cannot_be_opened_is_a_config_error(play: Play) -> None:
    code, _, complaint = play("broken", "x")
    assert code == 2
    assert "return self.task.no_such_field" in complaint
    assert complaint.rstrip().splitlines()[-1].endswith("mine_to_try.py:31 in prompt)")
    code, _, complaint = play("absent", "x")
    assert (code, "NoSuch" in complaint, complaint.count("\n")) == (2, True, 1)
    code, _, complaint = play("none", "x")
    assert complaint.startswith("orhpc: --env: there is no 'none': choose one of sums, guess")
    code, _, complaint = play("sums", "x", more=("--split", "validation"))
    assert (code, "it has train, test" in complaint) == (2, True)
    code, _, complaint = play("sums", "x", more=("--task", "5000"))
    assert (code, "choose 0 to" in complaint) == (2, True)
    code, _, complaint = play("sums", "1", more=("rollout.custom_reward=mine_to_try:wrong",))
    assert (code, "return rollout.nothing" in complaint) == (2, True)


def test_turns_are_read_from_standard_input(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nno idea\n"))
    assert main([str(tmp_path / "c.yaml"), "--env", "sums", "--split", "test", "--task", "1"]) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('guess {"number": 1}', ("guess", {"number": 1})),
        ("guess", ("guess", {})),
        ('other {"x": [1]}', ("other", {"x": [1]})),
        ("42", None),
        ("I think {it} is 3", None),
        ('{"name": "guess"}', None),
    ],
)
def test_a_turn_is_read_as_a_call_or_as_an_answer(text: str, expected: Any) -> None:
    assert read_call(text, ["guess"]) == expected


@pytest.mark.parametrize("text", ["guess {", "guess [1]", "guess NaN", "other {x}"])
def test_a_call_that_does_not_parse_is_malformed(text: str) -> None:
    assert isinstance(read_call(text, ["guess"]), MalformedToolCall)


def test_the_examples_have_different_tasks_in_each_split() -> None:
    for environment in (Sums, GuessNumber, Shelf):
        assert list(environment.tasks("train")) == list(environment.tasks("train"))
        assert list(environment.tasks("train")) != list(environment.tasks("test"))
    asked = {(t.a, t.b) for t in Sums.tasks("train")} & {(t.a, t.b) for t in Sums.tasks("test")}
    assert not asked
