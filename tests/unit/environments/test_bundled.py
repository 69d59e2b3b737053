"""The bundled environments, in this process and on their server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from openreward.environments import Environment

from orhpc.config.environment import BUNDLED
from orhpc.environments import gym
from orhpc.environments.arithmetic import Answer as Sum
from orhpc.environments.arithmetic import Arithmetic
from orhpc.environments.letters import Answer as Written
from orhpc.environments.letters import Letters
from orhpc.environments.server import environment_class
from orhpc.environments.server import main as serve_main
from orhpc.environments.treasure import Door, Treasure
from orhpc.errors import ConfigError
from orhpc.process.ports import free_ports

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


class Bare(Environment):
    """An environment without a classmethod ``configure``."""


class _OrsEnvironment:
    """Represents ors-sdk's base class, which is not a subclass of OpenReward's."""


_OrsEnvironment.__module__ = "ors.environments"


class OfOrsSdk(_OrsEnvironment):
    pass


def tasks_of(environment: Any, split: str, count: int) -> list[Any]:
    specs = [asyncio.run(environment.get_task(split, i)) for i in range(count)]
    return [environment(task_spec=spec, secrets={}) for spec in specs]


def prompt_of(task: Any) -> str:
    return asyncio.run(task.get_prompt())[0].text


def prompts(environment: Any, split: str, count: int) -> list[str]:
    return [prompt_of(task) for task in tasks_of(environment, split, count)]


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_tasks_depend_only_on_seed_split_and_index(name: str) -> None:
    one, two = environment_class(name, {"seed": 3}), environment_class(name, {"seed": 3})
    other = environment_class(name, {"seed": 4})
    assert prompts(one, "train", 20) == prompts(two, "train", 20)
    assert prompts(one, "train", 20) != prompts(other, "train", 20)
    assert prompts(one, "train", 20) != prompts(one, "test", 20)
    assert asyncio.run(one.num_tasks("train")) == 1000  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        tasks_of(one, "test", 101)


@pytest.mark.parametrize("largest", [1, 9, 50])
def test_the_two_splits_have_different_sums(largest: int) -> None:
    environment = Arithmetic.configure(max_number=largest)
    train, test = (set(prompts(environment, split, 100)) for split in ("train", "test"))
    assert train
    assert test
    assert not train & test


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("{s}", 1.0),
        ("The sum of a and b is {s}.", 1.0),
        ("3 + 4 = {s}", 1.0),
        ("1{s}", 0.0),
        ("", 0.0),
        (" ".join(map(str, range(100, 200))) + " {s}", 0.0),
    ],
)
def test_a_correct_sum_is_rewarded(answer: str, reward: float) -> None:
    (task,) = tasks_of(Arithmetic, "train", 1)
    parts = prompt_of(task).split()
    right = int(parts[2]) + int(parts[4].rstrip("?"))
    output = asyncio.run(task.answer(Sum(text=answer.format(s=right))))
    assert (output.reward, output.finished) == (reward, True)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("What is {a} + {b}?", 0.0),
        ("{a}+{b}", 0.0),
        ("{a} plus {b}", 0.0),
        ("the sum of {a} and {b}", 0.0),
        ("-{s}", 0.0),
        ("{s}.5", 0.0),
        ("{a} + {b} = {s}", 1.0),
        ("{a}+{b}={s}.", 1.0),
        ("{s}.0", 1.0),
    ],
)
def test_a_repeated_question_is_no_answer(answer: str, reward: float) -> None:
    """Not even where one summand is 0, so that the question has the sum in it."""
    for task in tasks_of(Arithmetic, "train", 40):
        parts = prompt_of(task).split()
        a, b = int(parts[2]), int(parts[4].rstrip("?"))
        if a + b > 0 and 0 in (a, b):
            output = asyncio.run(task.answer(Sum(text=answer.format(a=a, b=b, s=a + b))))
            assert output.reward == reward, (a, b)


@pytest.mark.parametrize(
    ("text", "reward"), [("abcd", 1.0), ("ab!!", 0.5), ("a", 0.25), ("", 0.0), ("\x00\ufffd12", 0.0)]
)
def test_the_reward_is_the_share_of_correct_letters(text: str, reward: float) -> None:
    (task,) = tasks_of(Letters, "train", 1)
    assert asyncio.run(task.answer(Written(text=text))).reward == reward


def open_doors(task: Any, doors: list[str]) -> list[tuple[float, bool, str]]:
    outputs = [asyncio.run(task.open(Door(word=word))) for word in doors]
    return [(o.reward, o.finished, o.blocks[0].text) for o in outputs]


def test_the_correct_order_of_doors_leads_to_the_treasure() -> None:
    (task,) = tasks_of(Treasure, "train", 1)
    text, paid, finished = prompt_of(task), [], False
    while not finished:
        ((reward, finished, text),) = open_doors(task, [text.rsplit(": ", 1)[1].upper() + " "])
        paid.append(reward)
    assert len(paid) == 3
    assert sum(paid) == pytest.approx(1.0)
    assert paid == pytest.approx([0.25, 0.25, 0.5])
    assert text == "You found the treasure."


def test_too_many_mistakes_end_the_game_without_a_reward() -> None:
    (task,) = tasks_of(Treasure, "test", 1)
    outcomes = open_doors(task, ["wrong"] * 3)
    assert [o[:2] for o in outcomes] == [(0.0, False), (0.0, False), (0.0, True)]
    assert prompt_of(task).rsplit(": ", 1)[1] in outcomes[0][2]


def test_reasoning_gym_verifies_answers() -> None:
    environment = environment_class("reasoning-gym", {"task": "basic_arithmetic", "n_tasks": 5})
    for task in tasks_of(environment, "train", 3):
        right = task._entry["answer"]
        assert asyncio.run(task.answer(gym.Answer(text=right))).reward == 1.0
        assert asyncio.run(task.answer(gym.Answer(text=f"So <answer>{right}</answer>"))).reward == 1.0
        assert asyncio.run(task.answer(gym.Answer(text="no idea"))).reward < 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmatic", {}, "neither bundled"),
        ("no.such.module:Class", {}, "cannot be loaded"),
        ("json:Nothing", {}, "cannot be loaded"),
        ("json:dumps", {}, "not a class"),
        ("json:JSONDecoder", {}, "is not an OpenReward class"),
        (f"{__name__}:Bare", {"a": 1}, "takes no options"),
        (f"{__name__}:OfOrsSdk", {}, "uses ors-sdk: start its own server"),
        ("arithmetic", {"max_numbr": 3}, "max_numbr"),
        ("arithmetic", {"max_number": -3}, "max_number"),
        ("treasure", {"doors": "many"}, "doors"),
        ("reasoning-gym", {"task": "no_such"}, "no_such"),
        ("reasoning-gym", {"settings": {"no_such": 1}}, "settings"),
        ("reasoning-gym", {"task": "composite", "settings": {"datasets": [{"name": "gcd"}]}}, "settings"),
    ],
)
def test_bad_options_give_a_one_line_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        environment_class(name, options)
    assert "\n" not in str(caught.value)


def test_the_error_of_a_module_that_raises_names_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_that_raises.py").write_text("x = 1\ny = undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert serve_main(["--environment", "mine_that_raises:Mine", "--port", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("orhpc: environment 'mine_that_raises:Mine': its module raised NameError: ")
    assert lines[-1].endswith("mine_that_raises.py:2 in <module>)")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"orhpc\[gym\]"):
        environment_class("reasoning-gym", {})


@pytest.mark.parametrize("options", ["[]", "{", '{"max_number": 0}'])
def test_the_command_refuses_bad_options(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_main(["--environment", "arithmetic", "--port", "1", "--options-json", options]) == 2
    assert capsys.readouterr().err.startswith("orhpc: ")


def _answers(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return json.load(response)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None


def test_the_server_answers_and_ends_with_its_parent() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    command = [sys.executable, "-m", "orhpc.environments.server", "--environment", "arithmetic"]
    command += ["--port", str(port), "--options-json", '{"n_tasks": 3}']
    # A separate parent process, which the test can kill without cleanup.  It starts the server in a thread
    # that ends at once, which must not end the server.
    code = f"""
import subprocess, threading, time
start = lambda: print(subprocess.Popen({command!r}).pid, flush=True)
threading.Thread(target=lambda: (start(), time.sleep(1.5))).start()
time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        deadline = time.monotonic() + 150
        url = f"http://127.0.0.1:{port}"
        while _answers(f"{url}/health") != {"status": "ok"}:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.2)
        time.sleep(1.5)
        assert _answers(f"{url}/list_environments") == ["arithmetic"]
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 120
    while _alive(child):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
