"""``orhpc serve``: bad input is one line, and a model folder answers OpenAI's client, with the key alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_CONFIG, EXIT_FAILED
from orhpc.rollout.engines.openai_server import KEY, Served, instructions
from orhpc.rundir import RunDir

CONFIG = Path(__file__).parents[3] / "configs/tiny.yaml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing is committed yet"),
        (["--port", "0"], "--port: 0 is not a port"),
        (["--tp", "0"], "--tp: 0 is not a positive number"),
        (["--backend", "transformers", "--tp", "2"], "--tp: it needs sglang"),
        (["--name", "a b"], "'a b' is not a name"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text(dump_config(load_config(CONFIG)))
    assert main(["serve", str(run.path), *words]) in (EXIT_CONFIG, EXIT_FAILED)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_key_is_printed_only_if_it_is_new() -> None:
    new, given = (
        "\n".join(instructions(Served("m", 8000, "the-key", ours, True, "sglang"))) for ours in (True, False)
    )
    assert f"export {KEY}=the-key" in new
    assert "the-key" not in given
    assert "ssh -N -L 8000:127.0.0.1:8000" in given
    compile(new[new.index("import os") :], "example", "exec")


@pytest.mark.slow
def test_a_model_is_served_with_the_key_alone(tmp_path: Path) -> None:
    from openai import OpenAI

    from orhpc.models.bundled import ensure

    folder = tmp_path / "tiny"
    shutil.copytree(ensure("bundled:tiny"), folder)
    key = "0123456789abcdef-key"
    environment = {**os.environ, KEY: key, "HF_HOME": str(tmp_path / "hub")}
    server = subprocess.Popen(
        [sys.executable, "-m", "orhpc.commands.cli", "serve", str(folder), "--name", "mine"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert server.stdout is not None and server.stderr is not None
        log = Path(server.stdout.readline().rsplit("(log: ", 1)[1].rstrip(")\n"))
        line = server.stdout.readline()
        assert line.startswith("serving mine on http://127.0.0.1:"), server.stderr.read()
        url = line.split()[3]
        client = OpenAI(base_url=url, api_key=key)
        assert [model.id for model in client.models.list().data] == ["mine"]
        message = {"role": "user", "content": "hello"}
        answer = client.chat.completions.create(messages=[message], model="mine", max_tokens=3)  # type: ignore[list-item]
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/models")
        assert "Traceback" not in log.read_text()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert key not in server.stdout.read() + server.stderr.read()
        assert not log.parent.exists()
    finally:
        server.kill()
        server.wait()
