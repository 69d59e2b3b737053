"""Any bad argument or damaged run directory gives one line and the right exit code, never a traceback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orhpc.commands import cli
from orhpc.config.files import PACKAGED, dump_config, load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from orhpc.launch.__main__ import main as launch
from orhpc.launch.command_line import split_command_line
from orhpc.rollout.transcript import RolloutBuilder, RolloutRequest
from orhpc.rundir import CommitName, RunDir
from orhpc.rundir.commits import Manifest, begin, finalize
from orhpc.rundir.events import EventLog
from orhpc.rundir.record import record_path, write_rollouts
from orhpc.types import RolloutEnd, Task

TINY = str(PACKAGED / "tiny.yaml")
FIXED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EDGES = [
    "train.lr=inf", "train.lr=.nan", "train.lr=1e999", "train.steps=true", "train.steps=" + "9" * 5000,
    "train.steps=1" + "0" * 30, "train.steps=-1", "run=" + "[" * 5000, "run=" + "{a: " * 5000,
    ".".join("a" * 5000) + "=1", "=1", "run.name=..", "run.name=a/b", 'run.root="a\\0b"',
    'model.path="\\0"', "placement.nodes=1000000000", "placement.devices_per_node=99999999999",
    "rollout.workers_per_node=100000000", "environments=null", "environments=[]", "run=&a [*a]",
    "environments.e={serve: letters, serve_options: &a {x: *a}}", "environments.e.url=http://u:p@h",
    "run.name=2001-99-99", "run.seed=0o777777777777777777777777777777", "secrets={a: 3}", "a b=1",
    "environments.x.serve_options=!!timestamp 2001-99-99",
    "x=!!int ''", "x=!!float ''", "x=!!binary '*'",
]  # fmt: skip


def check(code: int, out: str, began: float, what: Any) -> None:
    assert code in (0, 1, 2, 3), what
    assert "Traceback" not in out, what
    assert time.process_time() - began < 10, what  # of this process: other load does not count
    if code:
        message = out.strip()
        assert message, what
        assert "\n" not in message, (what, message)
        assert len(message) < 2000, what


@pytest.mark.slow
@pytest.mark.parametrize("override", EDGES)
def test_a_wrong_setting_gives_a_one_line_error(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    code = launch(["--local", "--dry-run", TINY, override])
    check(code, capsys.readouterr().err, began, override)
    assert code == EXIT_CONFIG


def test_a_date_as_a_name_is_shown_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["--local", "--dry-run", TINY, "run.name=2026-11-26"]) == EXIT_CONFIG
    assert "not 2026-11-26, as YAML reads it: write the text in quotes" in capsys.readouterr().err


@pytest.mark.parametrize("root", ["~/runs", "$SCRATCH/runs", "/scratch/${USER}"])
def test_no_run_is_written_to_a_folder_that_is_named_as_a_variable(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(["--local", "--dry-run", TINY, f"run.root={root}"]) == EXIT_CONFIG
    assert f"run.root: {root!r}: ~ and variables are not expanded here" in capsys.readouterr().err


def test_a_config_may_lie_in_a_folder_with_an_equals_sign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "train.lr=0.5"
    folder.mkdir()
    (folder / "mine.yaml").write_text("extends: tiny.yaml\n")
    for path in (str(folder / "mine.yaml"), "train.lr=0.5/mine.yaml"):
        words = ["--local", "--dry-run", path, "train.steps=7", "rollout.custom_agent=x.yaml"]
        assert split_command_line(words[2:]) == (path, words[3:])
        assert launch([*words[:-1], "--lr", "0.25"]) == EXIT_OK
        shown = capsys.readouterr().out
        assert "name: mine\n" in shown
        assert "lr: 0.25\n" in shown
    assert split_command_line(["train.lr=0.5/other.yaml"])[1] == ["train.lr=0.5/other.yaml"]


@pytest.mark.parametrize("value", ["abc", "null", ".nan", "true", "0", "1.5"])
def test_a_memory_fraction_for_sglang_is_checked_with_the_config(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(PACKAGED / "gpu-smollm2.yaml")
    assert cli.main(["plan", config, f"engine.extra.mem-fraction-static={value}"]) == EXIT_CONFIG
    assert "extra.mem-fraction-static: " in capsys.readouterr().err
    load_config(config, ["engine.extra.mem_fraction_static='0.8'"])


def test_too_little_memory_names_the_setting_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(PACKAGED / "gpu-smollm2.yaml")
    assert cli.main(["plan", config, "placement.device_memory_gib=0.1"]) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("orhpc: placement.device_memory_gib: 0.1 GiB")


@pytest.mark.parametrize("memory", ["nan", "inf"])
def test_a_memory_that_is_no_number_is_refused(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", TINY, "--device-memory", memory]) == EXIT_CONFIG
    assert capsys.readouterr().err == f"orhpc: --device-memory: {memory} is not a number of GiB\n"


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(f"      {line}" for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        f"environments:\n  e:\n    serve: letters\n    serve_options:\n{bomb(9)}\n",
        f"environments:\n  e:\n    serve: letters\n    serve_options: {'{a: ' * 60}1{'}' * 60}\n",
        "run: " + "{a: " * 5000,
        "run: &a {root: *a}\n",
        "a: 1\na: 2\n",
        "- 1\n",
        "text",
        "\x00",
        "? [a]\n: 1\n",
        "extends: c.yaml\n",
        "extends: [a]\n",
        "extends: /\n",
        "extends: \"\\0\"\n",
        "run: {name: x, root: 2001-99-99}\n",
        "# " + "x" * (5 << 20),
    ],
)  # fmt: skip
def test_a_wrong_file_gives_a_one_line_error(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    began = time.process_time()
    code = launch(["--local", "--dry-run", str(path)])
    check(code, capsys.readouterr().err, began, text[:100])
    assert code == EXIT_CONFIG


@pytest.mark.parametrize("name", ["/", "/dev/null", "/dev/zero", "nowhere.yaml", "a\0b", "x" * 5000, ""])
def test_a_path_that_is_not_a_file_gives_a_one_line_error(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.process_time()
    code = launch(["--local", "--dry-run", name])
    check(code, capsys.readouterr().err, began, name[:100])
    assert code == EXIT_CONFIG


ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
NAMED = """run run.name run.root train.lr train.steps environments environments.e environments.e.url secrets
placement.nodes rollout.n_samples slurm slurm.time model.path wandb alarms evaluation engine.extra"""
KEYS = st.sampled_from(NAMED.split())
ODD = ["inf", ".nan", "{}", "[]", "null", "&a [*a]", "*a", "!!set {a}", "!x y", "0x", "-", "? a", "%"]
VALUES = st.one_of(
    ANY_TEXT,
    st.sampled_from(ODD),
    st.integers().map(str),
    st.floats().map(str),
)  # fmt: skip


@pytest.mark.slow
@FIXED
@given(st.one_of(ANY_TEXT, st.builds("{}={}".format, st.one_of(KEYS, ANY_TEXT), VALUES)))
def test_any_override_is_accepted_or_refused(override: str) -> None:
    try:
        dump_config(load_config(TINY, [override]))
    except ConfigError as error:
        assert str(error)


@FIXED
@given(
    text=st.one_of(ANY_TEXT, st.lists(st.builds("{}: {}\n".format, KEYS, VALUES), max_size=5).map("".join))
)
def test_any_file_is_accepted_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        dump_config(load_config(path))
    except ConfigError as error:
        assert str(error)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with an attempt, events, a commit and a record."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text(dump_config(load_config(TINY)))
    run.begin_attempt(kind="slurm", job="7", chain="7")
    run.record_start(1, None)
    log = EventLog(run.events, 1)
    log.write("step", step=1, steps=3, seconds=1.5, phases={"rollout": 1.0}, reward_mean=float("nan"))
    log.write("restart", kind="RayLost", error="x", exit_code=75)
    log.close()
    (run.attempt(1) / "driver.log").write_text("line\n")
    finalize(begin(run, CommitName(1, 1)), Manifest(1, 1, None, ()))
    request = RolloutRequest("0.0", 0, 0, Task("e", "train", 0), seed=1)
    made = RolloutBuilder().rollout(request, RolloutEnd.FAILED, reward=None, error="x", seconds=0.0, limit=1)
    write_rollouts(record_path(run.rollouts_of(1), 1, 0), [made])
    return run


def files_of(run: RunDir) -> list[Path]:
    return [p for p in sorted(run.path.rglob("*")) if p.is_file() and p.suffix not in (".html",)]


COMMANDS = (
    "status",
    "status --json",
    "report",
    "logs",
    "logs --list",
    "cancel",
    "view",
    "view --rollout 0.0",
)


def commands(run: RunDir) -> Iterator[list[str]]:
    for command in COMMANDS:
        name, *options = command.split()
        yield [name, str(run.path), *options]
    yield ["export", str(run.path), "--step", "9"]


def try_all(run: RunDir, capsys: pytest.CaptureFixture[str], what: Any) -> None:
    for arguments in commands(run):
        began = time.process_time()
        capsys.readouterr()
        code = cli.main(arguments)
        captured = capsys.readouterr()
        check(code, captured.err, began, (arguments, what)) if code else None


def test_the_undamaged_run_is_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(run.path)]) == EXIT_OK
    assert cli.main(["view", str(run.path)]) == EXIT_OK
    assert cli.main(["report", str(run.path)]) == EXIT_OK


@pytest.mark.slow
@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"3", b"\xff\x00", b"[" * 3000,
    b"{\n", b"3\n", b"\xff\x00\n", b"[" * 3000 + b"\n",  # as whole lines of a file of JSON lines
])  # fmt: skip
def test_a_damaged_file_of_a_run_gives_no_traceback(
    run: RunDir, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in files_of(run):
        whole = path.read_bytes()
        path.write_bytes(content)
        try_all(run, capsys, (path.name, content[:20]))
        path.write_bytes(whole)


KEY = st.text(max_size=5)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), KEY),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEY, inner, max_size=3)),
    max_leaves=5,
)
_NAMES = ["step", "restart", "failed", "notice", "alarm", "ready", "commit", "evaluation"]
NAMES = st.sampled_from(_NAMES)
FIELDS = ["time", "attempt", "step", "steps", "seconds", "phases", "error", "kind", "reason", "reward_mean"]
EVENT = st.fixed_dictionaries({"event": st.one_of(NAMES, JSON)}, optional=dict.fromkeys(FIELDS, JSON))


@pytest.mark.slow
@settings(FIXED, max_examples=60)
@given(events=st.lists(st.one_of(EVENT, JSON), max_size=6))
def test_any_events_are_shown_or_omitted(
    run: RunDir, capsys: pytest.CaptureFixture[str], events: list[Any]
) -> None:
    run.events.write_text("".join(json.dumps(e) + "\n" for e in events))
    for arguments in (["status", str(run.path)], ["report", str(run.path)]):
        began = time.process_time()
        capsys.readouterr()
        code = cli.main(arguments)
        check(code, capsys.readouterr().err if code else "", began, events)


@pytest.mark.parametrize("arguments", [
    ["status", "nowhere"], ["status", "/dev/null"], ["status", "a\0b"], ["status", "x" * 5000], ["view", "/"],
    ["report", "/proc"], ["logs", "."], ["export", "a\0b"], ["cancel", ""], ["plan", "a\0b"],
    ["fetch", "a\0b"], ["check", "a\0b"], ["files", "a\0b"],
])  # fmt: skip
def test_a_folder_without_a_run_gives_a_one_line_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.process_time()
    code = cli.main(arguments)
    check(code, capsys.readouterr().err, began, arguments)
    assert code in (2, 3)
