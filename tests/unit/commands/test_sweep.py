"""``orhpc sweep``: what is submitted, what is left alone, and what is refused before that."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.commands.log_files import batch_outputs
from orhpc.errors import EXIT_CONFIG, EXIT_OK, EXIT_REQUEUE
from orhpc.launch import local
from orhpc.launch.slurm import holder
from orhpc.launch.slurm.job import Job
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from tests.programs import write_program

WORDS = ["tiny.yaml", "train.steps=4"]


@pytest.fixture
def cluster(commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which sbatch keeps what it gets, and squeue shows the jobs in ``queue``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue").touch()
    keep = f'echo "$*" >>{tmp_path}/calls; for last; do :; done; cat "$last" >{tmp_path}/script'
    write_program(commands, "sbatch", f"{keep}; echo Submitted batch job 7")
    write_program(
        commands,
        "squeue",
        f'case "$*" in *--array*) cat {tmp_path}/queue ;; '
        "*) echo Invalid job id specified >&2; exit 1 ;; esac",
    )
    return tmp_path


def test_each_element_gets_its_own_run_and_arguments(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *WORDS, "train.lr=1e-4,1e-3", "--parallel", "1", "run.seed=0,1"]) == EXIT_OK
    assert "job array 7 of 4 elements" in capsys.readouterr().out
    folder = cluster / "runs/tiny-sweep"
    call = shlex.split((cluster / "calls").read_text())
    assert call[:5] == [
        "--array=0-3%1", "--output", f"{folder}/slurm-%A_%a.out", "--job-name", "orhpc-tiny-sweep",
    ]  # fmt: skip
    script = (cluster / "script").read_text()
    wanted = "train.lr=1e-3 run.seed=0 'run.root=\"runs/tiny-sweep\"' run.name=lr-1e-3_seed-0 ;;"
    assert f"  2) set -- tiny.yaml train.steps=4 {wanted}\n" in script
    run = RunDir(folder / "lr-1e-3_seed-0")
    assert holder.known_jobs(run) == ["7_2"]
    assert batch_outputs(run) == []
    (folder / "slurm-7_2.out").write_text("srun: waiting\n")
    assert batch_outputs(run) == [folder / "slurm-7_2.out"]
    assert main(["logs", str(run.path)]) == EXIT_OK
    assert capsys.readouterr().out == "srun: waiting\n"


def test_an_array_is_expedited_as_a_job_is(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *WORDS, "run.seed=0,1", "slurm.expedited_requeue=true"]) == EXIT_OK
    assert "slurm.expedited_requeue: the release of SLURM is not known here" in capsys.readouterr().err
    assert "--requeue" not in (cluster / "calls").read_text().splitlines()[-1]


@pytest.mark.slow
def test_only_elements_that_are_neither_finished_nor_in_the_queue_are_submitted_again(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *WORDS, "run.seed=0,1,2"]) == EXIT_OK
    folder = cluster / "runs/tiny-sweep"
    (cluster / "queue").write_text("7_0 RUNNING\n7_1 PENDING\n")
    assert main(["sweep", *WORDS, "run.seed=0,1,2,3"]) == EXIT_OK
    assert (cluster / "calls").read_text().splitlines()[-1].startswith("--array=2-3 ")
    assert "4 elements, 2 to run, 0 finished, 2 running or waiting" in capsys.readouterr().out
    (cluster / "queue").write_text("")
    monkey = RunDir(folder / "seed-1")
    number = monkey.begin_attempt(kind="slurm", job="7_1", chain="7_1")
    log = EventLog(monkey.events, number)
    log.write("step", step=4, steps=4, reward_mean=0.5, seconds=1.0, phases={})
    log.write("finished", step=4)
    log.close()
    assert main(["sweep", "runs/tiny-sweep", "--status", "--json"]) == EXIT_OK
    best = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (best["name"], best["values"], best["reward_mean"]) == ("seed-1", {"run.seed": "1"}, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny.yaml"], "no setting has several values"),
        ([*WORDS, "train.lr=1e-4,x"], "element lr-x: "),
        (
            [*WORDS, "run.seed=0,1", "placement.nodes=2", "slurm.node_groups=[{nodes: 1}]"],
            "slurm.node_groups: a sweep is a job array",
        ),
        ([*WORDS, "train.lr=x,1e-4"], "with train.lr=x: "),
        ([*WORDS, "train.lr=1e-4,0.0001"], "elements lr-1e-4 and lr-0.0001 are equal"),
        ([*WORDS, "placement.nodes=1,2"], "element nodes-2: it needs '#SBATCH --nodes=2'"),
        ([*WORDS, "run.seed=0,1", "--seed", "3"], "--seed: it is the seed of --random"),
        ([*WORDS, "run.seed=0,1", "--parallel", "0"], "--parallel: 0 is not a positive number"),
        ([*WORDS, "run.seed=0,1", "--parallel", "2", "--local"], "--local runs the elements one after"),
        (["nowhere", "--status"], "nowhere: no sweep is there"),
        (["none.yaml", "run.seed=0,1"], "none.yaml: no such config file"),
        ([*WORDS, "run.seed=0,1", "checkpoint.load=nowhere"], "element seed-0: checkpoint.load: nowhere"),
    ],
)
def test_a_bad_element_is_named_and_nothing_is_submitted(
    cluster: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *words]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (cluster / "calls").exists()
    assert not (cluster / "runs").exists()


def test_local_elements_run_in_order_and_a_failure_does_not_end_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = {"seed-0": 3, "seed-1": EXIT_OK, "seed-2": EXIT_REQUEUE}
    ran: list[str] = []

    def run_local(config: object) -> int:
        name: str = config.run.name  # type: ignore[attr-defined]
        ran.append(name)
        run = RunDir(tmp_path / "runs/tiny-sweep" / name)
        run.create()
        log = EventLog(run.events, 1)
        log.write("stopped" if codes[name] == EXIT_REQUEUE else "notice", step=1, reason="x")
        log.close()
        return codes[name]

    monkeypatch.setattr(local, "run_local", run_local)
    assert main(["sweep", *WORDS, "run.seed=0,1", "--local"]) == 3
    assert ran == ["seed-0", "seed-1"]
    assert main(["sweep", *WORDS, "run.seed=2,0", "--local"]) == EXIT_REQUEUE
    assert ran == ["seed-0", "seed-1", "seed-2"]


def test_an_element_of_an_array_is_known_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "1", "ORHPC_JOB_FOLDER": "/tmp"}
    for name, value in {**names, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ORHPC_CHAIN", raising=False)
    assert (Job.from_environment().id, Job.from_environment().chain) == ("7_0", "7_0")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    assert Job.from_environment().id == "7"
