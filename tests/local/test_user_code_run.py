"""Runs whose environment, reward or agent is user code that raises: one start, one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from tests.local import kit

pytestmark = pytest.mark.slow

MODULE = '''
from openreward.environments import Environment, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel

class Answer(BaseModel):
    text: str

class Partly(Environment):
    """The verifier raises on every third answer, and on all of some tasks."""
    asked = 0

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{"i": i} for i in range(20)]

    def get_prompt(self):
        return [TextBlock(text="Go.")]

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        type(self).asked += 1
        if type(self).asked % 3 == 0:
            raise RuntimeError("verifier of task %s" % self.task_spec["i"])
        return ToolOutput(blocks=[TextBlock(text="ok")], reward=float(len(answer.text)), finished=True)

def sometimes(rollout):
    if rollout.sample == 1:
        raise LookupError("no answer of sample %d" % rollout.sample)
    return float(rollout.sample)

def score(rollout):
    raise TimeoutError("the judge did not answer")

async def agent(context, request):
    return context.no_such_field
'''


@pytest.mark.parametrize(
    ("override", "reason", "line"),
    [
        ("rollout.custom_reward=mine:score", "TimeoutError: the judge did", 'raise TimeoutError("the judge'),
        pytest.param(
            "rollout.custom_agent=mine:agent",
            "no_such_field",
            "return context.no_such_field",
            marks=pytest.mark.long,
        ),
    ],
)
def test_code_that_always_raises_ends_the_run_once_with_its_traceback(
    tmp_path: Path, override: str, reason: str, line: str
) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    result = kit.run(
        tmp_path, kit.ONE_DEVICE, override, "wandb.enabled=false", env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert reason in result.stderr
    assert f"{tmp_path}/mine.py:" in result.stderr
    assert result.stderr.count("\n") == 1
    assert line in result.stdout
    events = read_events(RunDir(tmp_path / "tiny").events)
    kinds = [e["event"] for e in events]
    assert [kind for kind in kinds if kind != "notice"] == ["bring_up", "ready", "failed"]
    assert RunDir(tmp_path / "tiny").lineage() == []  # no step was trained, so there is no commit


def test_code_that_raises_sometimes_is_counted_and_the_other_rollouts_are_trained(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    result = kit.run(
        tmp_path, kit.ONE_DEVICE, "environments={p: {serve: 'mine:Partly'}}", "wandb.enabled=false",
        "train.steps=3", "rollout.retries=0", "rollout.custom_reward=mine:sometimes",
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    events = read_events(RunDir(tmp_path / "tiny").events)
    steps = steps_of(events)
    assert sorted(steps) == [1, 2, 3]
    assert sum(e.get("failed_rollouts/p", 0) for e in steps.values()) >= 1
    assert all(e["groups"] >= 1 for e in steps.values())
    assert "failed_share" in {e["metric"] for e in events if e["event"] == "alarm"}
    assert "  failed " in result.stdout
    traces = (RunDir(tmp_path / "tiny").attempt(1) / "user_errors.log").read_text()
    assert 'raise LookupError("no answer of sample %d" % rollout.sample)' in traces
    assert traces.count("Traceback") <= 4  # once per worker


def test_a_verifier_that_raises_sometimes_is_counted_and_its_traceback_kept(tmp_path: Path) -> None:
    (tmp_path / "judging.py").write_text(
        "def judge(answer, label, row):\n    if row['n'] % 2:\n"
        "        raise LookupError('no points of %d' % row['n'])\n"
        "    return float(len(answer))\n"
    )
    rows = "".join(f'{{"prompt": "Count {n}.", "label": "{n}", "n": {n}}}\n' for n in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    data = f"{{path: {tmp_path}/rows.jsonl, verifier: 'judging:judge'}}"
    result = kit.run(
        tmp_path, f"environments={{letters: {{serve: letters}}, p: {{data: {data}, weight: 3}}}}",
        kit.ONE_DEVICE, "wandb.enabled=false", "rollout.max_user_errors=2",
        "rollout.max_refills=100", "train.steps=30",
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 2, result.stdout + result.stderr
    traces = (RunDir(tmp_path / "tiny").attempt(1) / "user_errors.log").read_text()
    assert "data.verifier: judging:judge raised LookupError: no points of" in traces
    assert "raise LookupError('no points of %d' % row['n'])" in traces
    assert "judging.py:3 in judge" in result.stderr
