"""``orhpc chat``: bad input is one line, and a run or a model folder answers."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.commands import chat, export
from orhpc.commands.cli import main
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from orhpc.models import conversation
from orhpc.rundir import RunDir

CONFIG = Path(__file__).parents[3] / "configs/tiny.yaml"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text(dump_config(load_config(CONFIG)))
    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing is committed yet"),
        (["--max-tokens", "0"], "--max-tokens: 0 is not a positive number"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    run: RunDir, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(run.path), *words]) in (EXIT_CONFIG, EXIT_FAILED)
    assert message in capsys.readouterr().err


def test_a_folder_that_is_neither_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tmp_path)]) == EXIT_CONFIG
    assert "not a run directory" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["chat", str(tmp_path), "--step", "3"]) == EXIT_CONFIG
    assert "is a model folder and not a run" in capsys.readouterr().err
    assert main(["chat", str(tmp_path), "--temperature", "-1"]) == EXIT_CONFIG
    assert "-1 is negative" in capsys.readouterr().err


def test_a_failed_export_ends_the_command(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "chosen_commit", lambda run, step: export.CommitName(3, 1))
    monkeypatch.setattr(export, "export_commit", lambda run, name, out: 7)
    assert main(["chat", str(run.path)]) == 7


@pytest.mark.slow
def test_a_model_answers_each_line_and_forgets_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orhpc.models.bundled import ensure

    asked: list[list[str]] = []
    real = conversation.Conversation.answer

    def answer(self: conversation.Conversation, messages: list[dict[str, str]], **settings: float) -> str:
        asked.append([message["role"] for message in messages])
        return real(self, messages, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(conversation.Conversation, "answer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/new\nthree\n"))
    folder = str(ensure("bundled:tiny"))
    assert conversation.main([folder, "--max-tokens", "3", "--system", "Be brief."]) == 0
    assert asked == [
        ["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"],
    ]  # fmt: skip
    assert len(capsys.readouterr().out.strip()) > 0


@pytest.mark.slow
def test_greedy_answers_are_equal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from orhpc.models.bundled import ensure

    talk = conversation.Conversation(str(ensure("bundled:tiny")), trust_remote_code=False)
    message = [{"role": "user", "content": "hello"}]
    first, second = (talk.answer(message, max_tokens=8, temperature=0.0) for _ in range(2))
    assert first == second


def test_code_in_a_folder_that_others_can_write_to_is_not_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(chat, "run_program", lambda command: started.append(list(command)) or 0)
    monkeypatch.setattr(export, "chosen_commit", lambda run, step: export.CommitName(3, 1))
    exported = run.export / "step_3"
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    run.config.write_text(dump_config(load_config(CONFIG, ["model.trust_remote_code=true"])))
    assert main(["chat", str(run.path)]) == EXIT_OK
    assert "--trust-remote-code" in started[0]
    for folder in (exported, run.path):
        mode = folder.stat().st_mode
        folder.chmod(0o777)
        assert main(["chat", str(run.path)]) == EXIT_CONFIG
        assert (
            "the model has code that would run as you, but other users can write to"
            in capsys.readouterr().err
        )
        folder.chmod(mode)
    run.config.write_text(dump_config(load_config(CONFIG)))
    run.path.chmod(0o777)
    assert main(["chat", str(run.path)]) == EXIT_OK  # it has no code
    assert len(started) == 2


def test_ctrl_c_is_left_to_the_program(tmp_path: Path) -> None:
    """A terminal sends it to both processes."""
    child = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a script's & ignores it
        "try:\n    print('begun', flush=True)\n    time.sleep(20)\n"
        "except KeyboardInterrupt:\n    print('stopped', flush=True)"
    )
    parent = (
        "import sys\nfrom orhpc.commands.programs import run_program\n"
        f"print('code', run_program([sys.executable, '-c', {child!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as both:
        assert both.stdout is not None
        assert both.stdout.readline() == "begun\n"
        os.killpg(both.pid, signal.SIGINT)
        output, _ = both.communicate(timeout=60)
    assert output == "stopped\ncode 0\n"
