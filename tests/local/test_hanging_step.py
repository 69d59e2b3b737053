"""A hanging job step: the real batch script and a real run, with an srun that does not return.

SLURM's commands are replacements, because a real srun hangs only if a machine loses power.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orhpc.launch.slurm import ledger
from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TASK = 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_PROCID=0 "$@"\n'
"""srun's handling of its arguments: options first, then the task's command."""
LIMIT_S = 3
KILLED = f"srun is still running {LIMIT_S} s after the first node has exited: killed"
RUN_S = 700
"""Seconds for a start and a few steps; a minute suffices on an idle machine."""
BEGIN_S = {True: 90, False: 5}
"""Seconds for an srun that starts a task, and for one that does not."""


class HangingJob:
    """The batch script as a separate process, with all its descendants."""

    def __init__(self, folder: Path, *overrides: str, srun: str) -> None:
        self.folder, self.run = folder, RunDir(folder / "runs/tiny")
        (folder / "bin").mkdir()
        # A unique id, because folders of earlier starts of the same job on the node are removed.
        self.id = str(900_000_000 + os.getpid())
        about = f"JobId={self.id} JobState=RUNNING Requeue=1 Restarts=0 ExcNodeList=(null) StdOut=x"
        self.program("srun", srun)
        self.program("scontrol", f'echo "{about}"')
        self.program("squeue", "echo RUNNING")
        self.program("sinfo", "true")
        text = (ROOT / "slurm/train-cpu.sbatch").read_text()
        for long, short in {
            "exit_limit=120": f"exit_limit={LIMIT_S}",
            "start_limit=1800": f"start_limit={BEGIN_S[srun.startswith(TASK)]}",
        }.items():
            assert text.count(long) == 1
            text = text.replace(long, short)
        (folder / "script").write_text(text)
        variables = {
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": self.id, "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1",
            "SLURMD_NODENAME": "localhost",
            "SLURM_JOB_NAME": "x", "SLURM_JOB_PARTITION": "p", "ORHPC_PYTHON": sys.executable,
        }  # fmt: skip
        arguments = ["bash", f"{folder}/script", "configs/tiny.yaml", f"run.root={folder}/runs"]
        arguments += ["slurm.interface=lo", "wandb.enabled=false", "placement.devices_per_node=1", *overrides]
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.shell = subprocess.Popen(arguments, env=variables, stdout=output, stderr=output)
        self.tree: dict[int, psutil.Process] = {}

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.folder}/calls\n{text}\n')
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, self.output.read_text()
            for process in psutil.Process(self.shell.pid).children(recursive=True):
                self.tree.setdefault(process.pid, process)
            time.sleep(0.1)

    def returns(self) -> int:
        """Wait for the script; none of its descendants may be left."""
        self.until(lambda: self.shell.poll() is not None, LIMIT_S + 60)
        # Ray's agents poll a killed GCS for a minute before they end; under SLURM, cgroups end them.
        _, left = psutil.wait_procs(list(self.tree.values()), 120)
        assert not left, [process.cmdline() for process in left]
        return self.shell.returncode


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HangingJob]:
    arguments = getattr(request, "param", ())
    made = HangingJob(tmp_path, *arguments, srun=f"{TASK if arguments else ''}exec sleep 1000")
    yield made
    if made.shell.poll() is None:
        for process in psutil.Process(made.shell.pid).children(recursive=True):
            process.kill()
    made.shell.kill()
    made.shell.wait()


@pytest.mark.parametrize("job", [["train.steps=30"]], indirect=True)
def test_a_finished_run_ends_even_if_srun_keeps_running(job: HangingJob) -> None:
    """And not before its end: it takes longer than srun may after the first node has exited."""
    began = time.monotonic()
    job.until(lambda: any(e["event"] == "finished" for e in read_events(job.run.events)), RUN_S)
    assert time.monotonic() - began > 2 * LIMIT_S
    assert job.returns() == 0
    made = [e["step"] for e in read_events(job.run.events) if e["event"] == "step"]
    assert made == list(range(1, 31))
    assert KILLED in job.output.read_text()
    assert not [call for call in job.calls() if call.startswith("scontrol requeue")]


@pytest.mark.long
@pytest.mark.parametrize("job", [["train.steps=1000"]], indirect=True)
def test_a_killed_launcher_is_detected_even_if_srun_keeps_running(job: HangingJob) -> None:
    """Its lock is released when it is killed, by any process; its child processes end with it."""
    job.until(lambda: any(e["event"] == "commit" for e in read_events(job.run.events)), RUN_S)
    running = [p for p in job.tree.values() if p.is_running()]
    (launcher,) = [p for p in running if p.cmdline()[1:3] == ["-m", "orhpc.launch.node"]]
    os.kill(launcher.pid, signal.SIGKILL)
    assert job.returns() == 0
    assert KILLED in job.output.read_text()
    assert job.calls()[-1] == f"scontrol requeue {job.id}"
    (outcome,) = ledger.read(job.run)
    assert (outcome.reason, outcome.exit_code) == (Reason.KILLED, 137)
    assert outcome.step > 0


def test_an_srun_that_starts_no_task_releases_the_nodes(job: HangingJob) -> None:
    assert job.returns() == 0
    assert (
        f"srun has not started the first node's task within {BEGIN_S[False]} s: killed"
        in job.output.read_text()
    )
    assert job.calls()[-2:] == [
        f"scontrol requeue {job.id}",
        f"scontrol update JobId={job.id} StartTime=now+120",
    ]
