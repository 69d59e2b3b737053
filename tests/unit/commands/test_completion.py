"""``orhpc completion``: commands, options, runs, configs and settings, completed by real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from orhpc.commands.cli import main, parser_of_all
from orhpc.commands.completion import SHELLS, script
from orhpc.errors import EXIT_OK

CASES = [
    ("orhpc stat", "orhpc status"),
    ("orhpc logs runs/al", "orhpc logs runs/alpha"),
    ("orhpc logs runs/sw", "orhpc logs runs/sweep/"),
    ("orhpc logs runs/alpha --err", "orhpc logs runs/alpha --errors"),
    ("orhpc launch mi", "orhpc launch mine.yaml"),
    ("orhpc launch qwen3-1", "orhpc launch qwen3-1.7b.yaml"),
    ("orhpc launch mine.yaml train.steps_p", "orhpc launch mine.yaml train.steps_per_rollout="),
    ("orhpc sweep mine.yaml train.backend=m", "orhpc sweep mine.yaml train.backend=megatron"),
    ("orhpc serve runs/alpha --backend s", "orhpc serve runs/alpha --backend sglang"),
    ("orhpc try-env --spl", "orhpc try-env --split"),
    ("orhpc files Dock", "orhpc files Dockerfile"),
]
QUIET_S = 0.6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two runs, one of them in a sweep, and a config."""
    for run in ("alpha", "sweep/lr-1"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").touch()
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    return tmp_path


class Terminal:
    """An interactive shell on a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.chdir(folder)
            os.execvpe(command[0], command, {**os.environ, "TERM": "dumb", "PS1": "$ "})

    def until(self, wanted: str, timeout_s: float = 20) -> str:
        """Read until the text has come, and then until nothing more comes."""
        seen, end = "", time.monotonic() + timeout_s
        while time.monotonic() < end:
            if select.select([self._fd], [], [], QUIET_S)[0]:
                seen += os.read(self._fd, 65536).decode(errors="replace")
            elif wanted in seen:
                return seen
        raise AssertionError(f"{wanted!r} never came: {seen!r}")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def completed(self, typed: str) -> str:
        """What the shell makes of a line at Tab: it is printed by putting ``echo`` before it."""
        self.type(typed + "\t")
        self.until(typed.rsplit(" ", 1)[-1])
        self.type("\x01echo :::\n")
        shown = self.until("\n:::").replace("\r", "")
        return next(line for line in shown.split("\n") if line.startswith(":::"))[3:]

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_what_is_typed(folder: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (folder / "script").write_text(script(parser_of_all(), shell))
    begin = "autoload -Uz compinit && compinit -u -D && " if shell == "zsh" else ""
    (folder / "begin").write_text(f'{begin}eval "$(cat script)"\necho completes\n')
    terminal = Terminal([shell, "--norc", "-i"] if shell == "bash" else [shell, "-f", "-i"], folder)
    try:
        terminal.type(". ./begin\n")
        terminal.until("\ncompletes")
        assert {typed: terminal.completed(typed).strip() for typed, _ in CASES} == dict(CASES)
    finally:
        terminal.close()


@pytest.mark.slow
def test_fish_completes_what_is_typed(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    (folder / "script").write_text(script(parser_of_all(), "fish"))
    for typed, wanted in CASES:
        asked = ["fish", "-N", "-c", f"source script; complete -C '{typed}'"]
        answer = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True)
        words = [line.split("\t")[0] for line in answer.stdout.splitlines()]
        assert wanted.rsplit(" ", 1)[-1] in words, (typed, words, answer.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_setting_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == EXIT_OK
    text = capsys.readouterr().out
    for word in (
        "doctor",
        "sweep",
        "device-memory",
        "rollout.batch_size=",
        "engine.backend=sglang",
        "wandb.",
    ):
        assert word in text, word
    assert not [mark for mark in ("@KEYS@", "@VALUES@", "@CONFIGS@", "@PACKAGED@") if mark in text]
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=text, text=True, capture_output=True).stderr == ""
