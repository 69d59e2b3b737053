"""``orhpc logs``: which lines of which files are printed, and until when a run is followed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.commands.jobs import Standing
from orhpc.commands.log_lines import Level, Reader
from orhpc.commands.logs import exit_code_of
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_REQUEUE
from orhpc.launch.slurm import scheduler
from orhpc.plan.placement import EnginePlace, Node, Placement, TrainerPlace, WorkerPlace
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import EventLog

CONFIG = str(Path(__file__).parents[3] / "configs/tiny.yaml")
DRIVER = """\
2026-11-24 03:16:36,665 INFO orhpc.driver: starting from the base model
2026-11-24 03:16:37,000\tINFO worker.py:1821 -- Connected to Ray cluster.
(raylet) something of Ray's own
[2026-11-24 03:16:38,001 E 12 34] core_worker.cc:12: also Ray's
(trainer 0 pid=7) 2026-11-24 03:16:39,000 WARNING torch: slow
(trainer 1 pid=8, ip=10.0.0.2) Traceback (most recent call last):
(trainer 0 pid=7) a line of rank 0 in between
(trainer 1 pid=8, ip=10.0.0.2)   File "x.py", line 1, in <module>
(trainer 1 pid=8, ip=10.0.0.2) ValueError: of rank 1
(trainer 1 pid=8, ip=10.0.0.2) 2026-11-24 03:16:40,000 INFO x: rank 1 goes on
(trainer 0 pid=7) merged [repeated 2x across cluster]
2026-11-24 03:16:41,000 ERROR orhpc.driver: RayLost: gone
  its second line
2026-11-24 03:16:42,000 INFO orhpc.driver: step 1/4 failed 0
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of one attempt on two nodes, which has ended."""
    run = RunDir(tmp_path / "runs/tiny")
    run.create()
    write_atomic(run.config, dump_config(load_config(CONFIG)))
    run.begin_attempt(kind="local")
    folder = run.attempt(1)
    nodes = (Node("n0", "10.0.0.1", 2), Node("n1", "10.0.0.2", 2))
    trainers = tuple(TrainerPlace(i, i, 0, 1) for i in range(2))
    engines = tuple(EnginePlace(i, i, (0,), 1) for i in range(2))
    placement = Placement(nodes, trainers, engines, (WorkerPlace(0, 0),))
    (folder / "placement.yaml").write_text(placement.to_yaml())
    (folder / "driver.log").write_text(DRIVER)
    (folder / "engine_000.log").write_text("Loading:  0%\rLoading: 100%\n[2026-11-24 03:16:36] ready\n")
    (folder / "engine_001.log").write_text("INFO:     fine\nERROR:    engine 1 broke\n")
    (folder / "environment_a_0_n1.log").write_text("\x1b[2m2026-11-24T03:16:36.5Z\x1b[0m [error   ] no\n")
    (folder / "ray.log").write_text("2026-11-24 03:16:21,247\tERROR scripts.py:1043 -- of Ray\n")
    return run


def printed(run: RunDir, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert main(["logs", str(run.path), *words]) == EXIT_OK
    return capsys.readouterr().out.splitlines()


def test_the_runs_own_lines_come_without_rays(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(run, capsys)
    assert shown == [line for i, line in enumerate(DRIVER.splitlines()) if i not in (1, 2, 3)]
    with_ray = printed(run, capsys, "--ray")
    assert [line for line in with_ray if line.startswith("ray.log")] == [
        "ray.log: 2026-11-24 03:16:21,247\tERROR scripts.py:1043 -- of Ray"
    ]
    assert len(with_ray) == len(DRIVER.splitlines()) + 1
    assert printed(run, capsys, "-n", "1") == [DRIVER.splitlines()[-1]]


def test_errors_name_their_file_and_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(printed(run, capsys, "--errors")) == sorted([
        "driver.log:6: (trainer 1 pid=8, ip=10.0.0.2) Traceback (most recent call last):",
        'driver.log:8: (trainer 1 pid=8, ip=10.0.0.2)   File "x.py", line 1, in <module>',
        "driver.log:9: (trainer 1 pid=8, ip=10.0.0.2) ValueError: of rank 1",
        "driver.log:12: 2026-11-24 03:16:41,000 ERROR orhpc.driver: RayLost: gone",
        "driver.log:13:   its second line",
        "engine_001.log:2: ERROR:    engine 1 broke",
        "environment_a_0_n1.log:1: 2026-11-24T03:16:36.5Z [error   ] no",
    ])  # fmt: skip
    assert printed(run, capsys, "--errors", "--engine", "0") == []
    assert any("of Ray" in line for line in printed(run, capsys, "--errors", "--ray"))


def test_ranks_engines_and_nodes_are_chosen(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    of_rank = printed(run, capsys, "--rank", "1")
    assert [line.split(") ", 1)[1][:9] for line in of_rank] == [
        "Traceback", '  File "x', "ValueErro", "2026-11-2", "merged [r",
    ]  # fmt: skip
    assert printed(run, capsys, "--engine", "0") == ["Loading: 100%", "[2026-11-24 03:16:36] ready"]
    for name in ("n1", "1"):
        of_node = printed(run, capsys, "--node", name)
        files = {line.split(": ")[0] for line in of_node}
        assert files == {"driver.log", "engine_001.log", "environment_a_0_n1.log"}
        assert sum(line.startswith("driver.log") for line in of_node) == 4
    assert {line.split(": ")[0] for line in printed(run, capsys, "--node", "n0")} == {
        "driver.log", "engine_000.log",
    }  # fmt: skip


def test_logs_of_a_replaced_node_are_found(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """The job's third node, a spare, is the second one of the placement."""
    nodes = run.attempt(1) / "nodes"
    nodes.mkdir()
    for rank, name in ((1, "n7"), (2, "n1")):
        record = {"rank": rank, "name": name, "address": f"10.0.0.{rank}"}
        (nodes / f"{rank:03d}.json").write_text(json.dumps(record))
        (run.attempt(1) / f"ray_{rank:03d}.log").write_text(f"raylet of {name}\n")
    for rank, name in ((1, "n7"), (2, "n1")):
        shown = printed(run, capsys, "--node", name, "--ray")
        assert f"raylet of {name}" in "\n".join(shown)
        assert f"ray_{3 - rank:03d}.log" not in "\n".join(shown)
    (nodes / "002.json").write_text("{")
    assert "raylet of n7" in "\n".join(printed(run, capsys, "--node", "n7", "--ray"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attempt", "2"], "--attempt: 2 is not an attempt of this run; it has 1"),
        (["--attempt", "0"], "--attempt: 0 is not an attempt"),
        (["--rank", "2"], "--rank: 2 is not a trainer rank; attempt 1 has 2, from 0"),
        (["--engine", "5"], "no log of engine 5; there are 0, 1"),
        (["--node", "n7"], "--node: n7 is not a node of attempt 1; they are 0 (n0), 1 (n1)"),
        (["--file", "x.log"], "no x.log; the logs are driver.log, engine_000.log"),
        (["--file", "ray.log", "--rank", "1"], "--file: it is one log"),
        (["-n", "-1"], "--lines: -1 is negative"),
    ],
)
def test_what_the_attempt_does_not_have_is_one_line(
    run: RunDir, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", str(run.path), *words]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "level", "is_ray"),
    [
        ("orhpc: ConfigError: train.lr: no", Level.ERROR, False),
        ("orhpc: StopRequested: asked to stop before the driver began", Level.PLAIN, False),
        ("srun: error: n1: task 1: Exited with exit code 3", Level.ERROR, False),
        ("slurmstepd: error: *** JOB 7 ON n0 CANCELLED AT x DUE TO PREEMPTION ***", Level.PLAIN, False),
        ("torch.OutOfMemoryError: CUDA out of memory.", Level.ERROR, False),
        ("[rank0]:[W1124 03:16:36.6 x.cpp:1] hm", Level.WARNING, False),
        ("an error is mentioned, as in ValueError: x", Level.PLAIN, False),
        ("2026-11-24 03:16:21,247\tINFO scripts.py:1043 -- error: none", Level.PLAIN, True),
    ],
)
def test_lines_are_recognized(text: str, level: Level, is_ray: bool) -> None:
    line = Reader("x").line(text + "\n")
    assert (line.level, line.is_ray) == (level, is_ray)


def test_the_output_of_a_batch_script_is_read_for_one_of_its_attempts(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run.path / "slurm-7.out"
    for _ in (2, 3):
        run.begin_attempt(kind="slurm", job="7", chain="7", output=str(output))
    sizes = {2: "1 nodes", 3: "4 nodes and 2 spares"}
    lines = [f"orhpc: {run.path}: attempt {n}, {sizes[n]}\nTypeError: of {n}\n" for n in (2, 3)]
    output.write_text("".join(lines))
    assert printed(run, capsys, "--errors", "--attempt", "2") == ["slurm-7.out:2: TypeError: of 2"]
    assert printed(run, capsys, "--errors") == ["slurm-7.out:4: TypeError: of 3"]


@pytest.mark.slow
def test_a_followed_run_goes_on_with_the_next_attempt_and_ends_with_its_code(run: RunDir) -> None:
    with run.locked():
        process = subprocess.Popen(
            [sys.executable, "-m", "orhpc.commands.cli", "logs", str(run.path), "-f", "-n", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == DRIVER.splitlines(keepends=True)[-1]
        with (run.attempt(1) / "driver.log").open("a") as log:
            log.write("the last of 1\n")
        run.begin_attempt(kind="local")
        time.sleep(0.5)
        (run.attempt(2) / "driver.log").write_text("the first of 2\n")
        shown = [process.stdout.readline() for _ in range(3)]
        assert shown == ["the last of 1\n", "--- attempt 2 ---\n", "the first of 2\n"]
        log = EventLog(run.events, 2)
        log.write("failed", kind="ConfigError", error="x", exit_code=EXIT_CONFIG)
        log.close()
    assert process.wait(60) == EXIT_CONFIG
    assert process.stderr.read() == ""


def test_a_run_whose_next_attempt_is_beginning_has_not_ended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder exists, but not yet its description; SLURM is installed and knows no job of the run."""
    monkeypatch.setattr(scheduler, "available", lambda: True)
    with run.locked():
        run.attempt(2).mkdir()
        assert not Standing.of(run).ended
    assert Standing.of(run).ended


def test_the_exit_code_is_that_of_the_run(run: RunDir) -> None:
    assert exit_code_of(run, 1) == EXIT_FAILED
    for event, code in (("stopped", EXIT_REQUEUE), ("finished", EXIT_OK)):
        log = EventLog(run.events, 1)
        log.write(event, step=4)
        log.close()
        assert exit_code_of(run, 1) == code
