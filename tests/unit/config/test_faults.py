"""Faults in a config: what is accepted, and one line about what is not."""

from __future__ import annotations

import pytest

from orhpc.config.faults import KINDS, Fault, FaultKind, Target
from orhpc.config.files import changes_on_resume, load_config
from orhpc.errors import ConfigError
from orhpc.launch.__main__ import main as launch

TINY = "configs/tiny.yaml"


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_kind_is_read_back_as_written(kind: FaultKind) -> None:
    text = f"{kind}@7" if KINDS[kind].target is Target.NOTHING else f"{kind}@7:1"
    assert str(Fault.parse(text)) == text
    assert str(Fault.parse(f"{kind}@7")) == text.replace(":1", ":0")


def test_several_faults_are_one_text_or_a_list() -> None:
    as_text = load_config(TINY, ["faults.inject=engine_killed@3:1, disk_full@5"])
    as_list = load_config(TINY, ["faults.inject=['engine_killed@3:1', disk_full@5]"])
    assert as_text.faults.inject == as_list.faults.inject == ["engine_killed@3:1", "disk_full@5"]
    assert load_config(TINY).faults.inject == []
    assert changes_on_resume(load_config(TINY), as_text)  # a drill may go on with other faults


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engine_kiled@3", "did you mean engine_killed"),
        ("power_cut@3", "there are preemption, trainer_killed"),
        ("engine_killed", "KIND@STEP"),
        ("engine_killed@3:x", "KIND@STEP"),
        ("engine_killed@0", "counted from 1"),
        ("disk_full@3:1", "write disk_full@3"),
        ("disk_full@3,disk_full@3", "named twice"),
        ("disk_full@11", "the run has 10 steps"),
        ("trainer_killed@3:2", "the last trainer rank is 1"),
        ("engine_hang@3:2", "the last engine is 1"),
        ("worker_killed@3:1", "the last rollout worker is 0"),
        ("node_lost@3:1", "the last node is 0"),
    ],
)
def test_what_could_not_happen_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        load_config(TINY, [f"faults.inject={text!r}"])
    assert "\n" not in str(refused.value)
    assert "faults.inject" in str(refused.value)


def test_a_run_without_the_part_is_refused() -> None:
    replay = ["train.replay_rollouts=somewhere", "faults.inject=engine_killed@1"]
    with pytest.raises(ConfigError, match="has no engine"):
        load_config(TINY, replay)
    elsewhere = ["environments.orhpc/letters.serve=null", "environments.orhpc/letters.url=http://localhost:1"]
    with pytest.raises(ConfigError, match="serves no environment"):
        load_config(TINY, [*elsewhere, "faults.inject=environment_killed@1"])


def test_the_environment_variable_replaces_the_section_and_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORHPC_FAULT", "disk_full@4,worker_killed@6")
    assert launch([TINY, "--local", "--dry-run", "faults.inject=[driver_killed@2]"]) == 0
    shown = capsys.readouterr()
    assert "disk_full@4, worker_killed@6:0" in shown.err
    assert "FAULTS ARE INJECTED" in shown.err
    assert "driver_killed@2" not in shown.out
    monkeypatch.setenv("ORHPC_FAULT", "disk_ful@4")
    assert launch([TINY, "--local", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.delenv("ORHPC_FAULT")
    assert launch([TINY, "--local", "--dry-run"]) == 0
    assert "FAULTS" not in capsys.readouterr().err
