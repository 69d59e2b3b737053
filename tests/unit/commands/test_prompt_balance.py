"""``orhpc status --ledger``: the balance of a run's prompt groups, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.errors import EXIT_FAILED, EXIT_OK
from orhpc.rundir import CommitName, RunDir, commits
from orhpc.rundir.prompt_ledger import PromptLedger


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two steps of four groups; one group failed, one is in the buffer, one is in flight."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text("{}\n")
    attempt = run.begin_attempt()
    run.record_start(attempt, None)
    ledger = PromptLedger(run.prompts, attempt)
    ledger.start(0, 0, ())
    ledger.step(1, trained=range(4), dropped={}, next_group=6, pending=[4, 5])
    ledger.step(2, trained=[4, 6, 7, 8], dropped={5: "failed"}, next_group=11, pending=[9, 10])
    ledger.write()
    ledger.close()
    (run.buffer / "group_9.h5").touch()
    (run.buffer / "group_11.h5").touch()
    return run


def commit(run: RunDir, step: int, next_group: int, pending: list[int]) -> None:
    name = CommitName(step, 1)
    state = {"next_group": next_group, "pending": pending}
    commits.finalize(commits.begin(run, name), commits.Manifest(step, 1, None, (), state))


def test_the_balance_is_printed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    commit(run, 1, 6, [4, 5])
    assert main(["status", str(run.path), "--ledger"]) == EXIT_OK
    assert capsys.readouterr().out == (
        f"{run.path}: prompt groups after step 2\n"
        "started         11  groups 0 to 10\n"
        "trained          8  by steps 1 to 2\n"
        "dropped          1  failed 1\n"
        "waiting          1  finished, in the buffer\n"
        "pending          1  in flight, or to be generated again\n"
        "not started: group 11 and later, but for 1 that have finished since and are in the buffer\n"
        "balances: 11 = 8 + 1 + 1 + 1; none trained twice, none skipped\n"
    )


def test_the_fate_of_every_group_is_in_the_json(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.path), "--ledger", "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert found["balances"]
    assert found["groups"] == {
        "trained": {"1": "0-3", "2": "4 6-8"},
        "dropped": {"2": {"failed": "5"}},
        "waiting": "9",
        "pending": "10",
    }


def test_a_group_that_was_trained_twice_fails_the_command(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = PromptLedger(run.prompts, 1)
    ledger.step(3, trained=[9, 10, 3, 11], dropped={}, next_group=12, pending=[])
    ledger.write()
    assert main(["status", str(run.path), "--ledger"]) == EXIT_FAILED
    *_, last = capsys.readouterr().out.splitlines()
    assert last == ("does not balance: 1 groups have two fates: 3 (trained by step 1, trained by step 3)")


@pytest.mark.parametrize(
    ("step", "next_group", "expected"),
    [(2, 10, "has another position than its line"), (3, 11, "is of a step without a line")],
)
def test_the_newest_commit_must_agree(
    run: RunDir, capsys: pytest.CaptureFixture[str], step: int, next_group: int, expected: str
) -> None:
    commit(run, step, next_group, [9, 10])
    assert main(["status", str(run.path), "--ledger"]) == EXIT_FAILED
    assert f"does not balance: commit step_{step}.a001 {expected}" in capsys.readouterr().out


def test_a_stop_before_the_first_step_commits_step_0_which_has_no_line(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(run, 0, 4, [0, 1, 2, 3])
    assert main(["status", str(run.path), "--ledger"]) == EXIT_OK
    assert "balances: 11 = 8 + 1 + 1 + 1" in capsys.readouterr().out


def test_a_run_without_a_ledger_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text("{}\n")
    run.record_start(run.begin_attempt(), None)
    commit(run, 3, 12, [])  # of an earlier release
    assert main(["status", str(run.path), "--ledger"]) == EXIT_OK
    assert "no step has recorded its prompt groups" in capsys.readouterr().out
