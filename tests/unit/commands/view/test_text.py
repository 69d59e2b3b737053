"""What ``orhpc view`` shows of a rollout."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.commands.view.library import Library
from orhpc.commands.view.text import show as show_library
from orhpc.commands.view.tokens import TokenTexts
from orhpc.commands.view.transcript import lines
from orhpc.errors import RecordError
from orhpc.rundir import RunDir
from orhpc.rundir.record import record_path, write_rollouts
from tests.unit.rundir.test_record import make_rollout

MESSAGES = [
    {"role": "user", "content": "Open the door."},
    {
        "role": "assistant",
        "content": "I try.",
        "reasoning": "It may be locked.",
        "tool_calls": [{"name": "open", "arguments": {"word": "rät"}}, {"error": "no JSON"}],
    },
    {"role": "tool", "content": "It \x1b[31mopens", "name": "open", "reward": 0.25, "metadata": {"door": 1}},
    {"role": "tool", "content": "failed", "name": "close", "error": "tool_raised"},
]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    run.config.write_text("")
    for folder, group in (("step_1", 1), ("step_2", 2), ("evaluation_0", 3)):
        rollouts = [make_rollout(group, sample, 9, reward=None if sample else 0.5) for sample in range(2)]
        for rollout in rollouts:
            rollout.messages = MESSAGES
        write_rollouts(record_path(run.rollouts / folder, 1, 0), rollouts)
    return run


def test_a_rollout_shows_calls_arguments_rewards_reasoning_and_errors(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_library(Library(run, TokenTexts(None)), None, None, "1.1") == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "--- user",
        "Open the door.",
        "--- assistant",
        "(reasoning) It may be locked.",
        "I try.",
        '=> open {"word": "rät"}',
        "=> malformed call: no JSON",
        "--- tool open, reward 0.25",
        "It \\x1b[31mopens",
        '(metadata) {"door": 1}',
        "--- tool close, error: tool_raised",
        "failed",
        "--- end: failed, reward None, it broke",
    ]


def test_policies_of_a_rollout_are_shown_if_there_are_several() -> None:
    rollout = make_rollout(1, 0, 9, reward=0.5)
    rollout.messages = []
    rollout.loss_mask_T[:] = [False] * 3 + [True] * 6
    rollout.versions_T[:] = [-1, -1, -1, 4, 4, 6, 7, 7, 7]
    assert list(lines(rollout))[1:] == ["--- tokens by policy version: 2 by 4, 1 by 6, 3 by 7"]
    rollout.versions_T[3:] = 7
    assert len(list(lines(rollout))) == 1


def test_evaluations_are_listed_and_opened(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run.path), "--evaluation", "0"]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("evaluation after step 0: 2 rollouts")
    assert "it broke" in listed
    assert main(["view", str(run.path), "--evaluation", "0", "--rollout", "3.0"]) == 0
    assert "reward 0.5" in capsys.readouterr().out
    assert main(["view", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith("step 2: 2 rollouts")


@pytest.mark.parametrize(
    ("step", "evaluation", "rollout"),
    [(None, None, "9.9"), (1, None, "2.0"), (None, 7, None), (None, 0, "1.0")],
)
def test_what_is_not_there_is_said(
    run: RunDir, step: int | None, evaluation: int | None, rollout: str | None
) -> None:
    with pytest.raises(RecordError):
        show_library(Library(run, TokenTexts(None)), step, evaluation, rollout)


def test_messages_of_a_user_s_agent_may_have_other_shapes() -> None:
    """One rollout with a list of parts must not end ``orhpc report``, which shows it among others."""
    parts = [{"type": "text", "text": "\x1b[31mred"}]
    call = {"type": "function", "function": {"name": "open", "arguments": "{}"}}
    message = {
        "role": "assistant",
        "content": parts,
        "reasoning": parts,
        "reward": "none",
        "tool_calls": [call],
    }
    rollout = make_rollout(1, 0, 9)
    rollout.messages = [message]
    shown = "\n".join(lines(rollout))
    assert shown.count("red") == 2
    assert "reward none" in shown
    assert '"name": "open"' in shown
    assert "\x1b" not in shown
