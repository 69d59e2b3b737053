"""Scores of reasoning-gym: as the package's, but an answer is never evaluated as a program."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.environments import gym
from orhpc.environments.server import environment_class
from orhpc.judging import killable
from orhpc.launch.node.environment_servers import ServedEnvironments
from orhpc.plan.placement import Node
from orhpc.rollout.environment.environment import Environment
from orhpc.rollout.environment.own_server import OwnServer
from orhpc.rundir import RunDir
from orhpc.types import Task

pytestmark = pytest.mark.slow
TASKS = {
    "binary_matrix": "eval", "spiral_matrix": "eval", "string_insertion": "eval", "n_queens": "eval",
    "countdown": "parse", "puzzle24": "parse", "simple_integration": "parse",
    "intermediate_integration": "parse", "polynomial_multiplication": "parse",
}  # fmt: skip
"""The datasets whose scorers evaluate the answer."""
COMPARE = """
import json, sys
import reasoning_gym
from orhpc.judging import puzzles

sets = {task: reasoning_gym.create_dataset(task, size=4, seed=3) for task in sys.argv[2:]}
entries = {task: list(data) for task, data in sets.items()}
plain = {t: [sets[t].score_answer(answer=e["answer"], entry=e) for e in entries[t]] for t in sets}
puzzles.prepare()
guarded = {t: [puzzles.score(t, "{}", e, e["answer"]) for e in entries[t]] for t in sets}
attacks = [f"[open({sys.argv[1]!r}, 'w')]", "exit()", "open(chr(47)+chr(120))", "().__class__.__bases__"]
best = max(puzzles.score(t, "{}", e, attack) for t in sets for e in entries[t][:1] for attack in attacks)
print(json.dumps([plain == guarded, best, min(map(max, plain.values()))]))
"""


def test_an_answer_that_is_a_program_does_nothing_and_others_score_the_same(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    mark = tmp_path / "written by an answer"
    command = [sys.executable, "-c", COMPARE, str(mark), *TASKS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same, best, right = json.loads(done.stdout)
    assert same
    assert best <= 0.05  # some scorers give 0.01 for any answer
    assert right == 1.0
    assert not mark.exists()


def test_every_scorer_that_evaluates_the_answer_is_known() -> None:
    """In the installed release."""
    package = pytest.importorskip("reasoning_gym")
    found: set[str] = set()
    for file in Path(package.__file__).parent.rglob("*.py"):
        if re.search(r"\b(eval|exec|parse_expr|sympify)\((user_)?answer\b", file.read_text()):
            found.add(file.stem)
    assert found == set(TASKS)


def test_an_answer_that_takes_for_ever_scores_nothing_and_the_next_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(killable, "LIMIT_S", 3.0)
    environment = environment_class("reasoning-gym", {"task": "countdown", "n_tasks": 1})

    async def run() -> list[Any]:
        session = environment(await environment.get_task("train", 0), {})
        return [
            await session.answer(gym.Answer(text=text))
            for text in ("9**9**9**9**9", session._entry["answer"])
        ]

    slow, right = asyncio.run(run())
    assert (slow.reward, right.reward) == (0.0, 1.0)
    assert "took more than 3 s" in slow.blocks[0].text


@pytest.mark.parametrize(
    ("task", "answer"),
    [("prime_factorization", "I do not know"), ("game_of_life", "{}"), ("boxnet", "0"), ("boxnet", "[[1]]")],
)
def test_an_answer_that_the_scorer_cannot_read_is_wrong(task: str, answer: str) -> None:
    """These scorers raise, which was a failure of the environment: retried, and never a reward."""
    pytest.importorskip("reasoning_gym")
    environment = environment_class("reasoning-gym", {"task": task, "n_tasks": 1})

    async def run() -> Any:
        return await environment(await environment.get_task("train", 0), {}).answer(gym.Answer(text=answer))

    output = asyncio.run(run())
    assert (output.reward, output.finished) == (0.0, True)
    assert "could not be read" in output.blocks[0].text


def test_all_servers_of_an_environment_have_the_same_tasks(tmp_path: Path) -> None:
    """Some generators draw from sets, whose order depends on the hashes of the process."""
    pytest.importorskip("reasoning_gym")
    options = "{task: isomorphic_strings}"
    overrides = [
        f"environments.gym={{serve: reasoning-gym, replicas: 2, serve_options: {options}}}",
        "environments.orhpc/letters=null", "rollout.workers_per_node=2",
    ]  # fmt: skip
    config = load_config(Path("configs/tiny.yaml"), overrides)
    rundir = RunDir(tmp_path)
    rundir.attempt(1).mkdir(parents=True)
    (rundir.attempt(1) / "environment.key").write_text("key")
    servers = ServedEnvironments(config, Node("n0", "127.0.0.1", cpus=8), rundir, 1)
    urls = servers.reserve()["gym"]
    servers.start()
    try:
        first, second = (asyncio.run(_prompts(config, url)) for url in urls)
    finally:
        servers.stop()
    with OwnServer("gym", config.environments["gym"], tmp_path) as own:  # orhpc try-env, prepare-tasks
        third = asyncio.run(_prompts(config, own.url, own.key))
    assert first == second == third
    assert len(set(first)) == 4


async def _prompts(config: Config, url: str, key: str = "key") -> list[str]:
    settings, rollout = config.environments["gym"], config.rollout
    environment = await Environment.open("gym", settings, secrets={}, rollout=rollout, url=url, key=key)
    try:
        prompts = []
        for index in range(4):
            async with environment.session(Task("gym", "train", index)) as session:
                prompts.append(session.prompt)
        return prompts
    finally:
        await environment.close()
