"""The batch script on its node, run by a real bash with replacements for SLURM's commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orhpc.config import Config
from orhpc.launch.slurm import submission

ROOT = Path(__file__).parents[4]
RUNNING = "JobId=7 JobState=RUNNING Requeue=1 Restarts={restarts} ExcNodeList=(null) StdOut=x"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
ATTEMPT = 'mkdir -p attempt; echo "$PWD/attempt" >"$ORHPC_JOB_FOLDER/attempt"'


@dataclass
class Shell:
    """A folder in which the script runs, with programs that write their arguments to ``calls``."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Environment of the last run."""

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.folder}/calls\n{text}\n')
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]

    def run(
        self,
        restarts: int = 0,
        python: str = sys.executable,
        arguments: Sequence[str] = ("none.yaml",),
        **more: str,
    ) -> subprocess.CompletedProcess[str]:
        text = (ROOT / "slurm/train.sbatch").read_text()
        for long, short in {
            "controller_limit=1800": "controller_limit=20", "start_limit=1800": "start_limit=2",
            "exit_limit=120": "exit_limit=1", "sleep 2 >": "sleep 0.1 >", "sleep 3": "sleep 0.1",
            "sleep 5": "sleep 0.1",
        }.items():  # fmt: skip
            assert text.count(long) == 1, long
            text = text.replace(long, short)
        (self.folder / "script").write_text(text)
        variables = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NAME": "x",
            "SLURM_JOB_PARTITION": "p", "ORHPC_PYTHON": python,
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}), **more,
        }  # fmt: skip
        self.variables = variables
        return subprocess.run(
            ["bash", "script", *arguments], cwd=self.folder, env=variables, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "bin").mkdir()
    shell = Shell(tmp_path)
    shell.program("srun", f'[ "${{!#}}" = true ] || {{ {ATTEMPT}; exit 75; }}')
    shell.program("scontrol", f'echo "{RUNNING.format(restarts=0)}"')
    return shell


def away(shell: Shell, when: Callable[[int], bool], restarts: int = 0) -> None:
    """Make the controller fail for calls whose number (from 0) satisfies ``when``."""
    refused = " ".join(str(n) for n in range(20) if when(n))
    shell.program(
        "scontrol",
        f"n=$(grep -c ^scontrol {shell.folder}/calls); "
        f'case " {refused} " in *" $((n - 1)) "*) echo "{AWAY}" >&2; exit 1 ;; esac\n'
        f'echo "{RUNNING.format(restarts=restarts)}"',
    )


@pytest.mark.slow
@pytest.mark.parametrize("missed", [range(1, 5), range(2, 6), range(0, 7)])
def test_a_job_survives_a_controller_that_is_temporarily_unavailable(shell: Shell, missed: range) -> None:
    """The script queries the job before and after the run, and then requests the requeue."""
    away(shell, missed.__contains__)
    result = shell.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert shell.calls("scontrol")[-1] == "requeue 7"
    assert "the controller does not answer" not in result.stdout
    assert "SLURM's controller does not answer; waiting" in result.stdout


@pytest.mark.parametrize(
    ("spares", "step"), [("0", "--kill-on-bad-exit=1"), ("2", "--kill-on-bad-exit=0 --no-kill")]
)
def test_the_end_of_a_node_ends_the_step_only_without_spares(shell: Shell, spares: str, step: str) -> None:
    shell.program("srun", f'{ATTEMPT}; echo "$ORHPC_SPARES" >known; exit 75')
    arguments = ["none.yaml", "slurm.spares=1", f"slurm.spares={spares}", "train.steps=3"]
    assert shell.run(arguments=arguments).returncode == 0
    assert shell.calls("srun")[0].startswith(f"{step} --nodes=2 ")
    assert (shell.folder / "known").read_text() == f"{spares}\n"


@pytest.mark.parametrize("spares", [0, 1])
def test_a_successor_survives_the_loss_of_a_node_if_it_has_spares(shell: Shell, spares: int) -> None:
    shell.program("scontrol", f'echo "{RUNNING.format(restarts=0)}"; [ "$1" != requeue ]')
    shell.program("sbatch", "echo 9")
    shell.run(arguments=["none.yaml", f"slurm.spares={spares}"])
    assert ("--no-kill" in shell.calls("sbatch")[-1].split()) == bool(spares)


@pytest.mark.slow
def test_with_spares_an_srun_whose_first_task_was_killed_is_ended_soon(shell: Shell) -> None:
    """Nothing else ends the tasks of other nodes, which wait for the first."""
    shell.program("srun", f'{ATTEMPT}; : >"$ORHPC_JOB_FOLDER/held"; exec sleep 50')
    began = time.monotonic()
    result = shell.run(arguments=["none.yaml", "slurm.spares=1"])
    assert "srun is still running 5 s after the first node has exited: killed" in result.stdout
    assert time.monotonic() - began < 30
    assert shell.calls("scontrol")[-1] == "requeue 7"


def test_a_job_unknown_to_slurm_is_not_requeued(shell: Shell) -> None:
    shell.program("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    result = shell.run()
    assert result.returncode == 75
    assert "not requeued" in result.stdout
    assert "requeue 7" not in shell.calls("scontrol")


@pytest.mark.parametrize(
    ("exclude", "readmit", "updated"),
    [("n4", "", "n[1-3],n4"), ("n4", "n2\nn9", "n1,n3,n4"), ("", "n2", "n1,n3"), ("", "n1\nn2\nn3", "")],
)
def test_lost_nodes_are_readmitted_one_start_later(
    shell: Shell, exclude: str, readmit: str, updated: str
) -> None:
    for name, text in (("exclude", exclude), ("readmit", readmit)):
        (shell.folder / name).write_text(text)
    shell.program("srun", f'{ATTEMPT}; cp exclude readmit "$ORHPC_JOB_FOLDER"; exit 75')
    shell.program(
        "scontrol",
        'case "$1 $2" in "show hostnames") [ "$3" = "n[1-3]" ] && printf "n1\\nn2\\nn3\\n" ;; *)\n'
        f'echo "{RUNNING.format(restarts=0).replace("(null)", "n[1-3]")}" ;; esac',
    )
    assert shell.run().returncode == 0
    assert shell.calls("scontrol")[-1] == f"update JobId=7 ExcNodeList={updated}"


def test_an_element_of_an_array_is_requeued_and_succeeded_alone(shell: Shell) -> None:
    """Its SLURM_JOB_ID may be the array's own id."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    shell.run(**array)
    assert shell.calls("scontrol")[-1] == "requeue 7_3"
    shell.program("scontrol", f'echo "{RUNNING.format(restarts=0)}"; [ "$1" != requeue ]')
    shell.program("sbatch", "echo 9")
    assert "job 9_3 continues this run" in shell.run(**array).stdout
    submitted = shell.calls("sbatch")[-1].split()
    assert {"--array=3", "--dependency=afterany:7_3"} <= set(submitted)
    assert (shell.folder / "attempt/successor").read_text() == "9_3\n"


def test_a_refused_requeue_submits_a_successor(shell: Shell) -> None:
    shell.program(
        "scontrol",
        '[ "$1" != requeue ] || { echo "Requested operation is presently disabled" >&2; exit 1; }\n'
        f'echo "{RUNNING.format(restarts=0)}"',
    )
    shell.program("sbatch", "echo 'sbatch: a remark of the site' >&2; echo '8;cluster'")
    result = shell.run()
    assert "job 8 continues this run" in result.stdout
    assert "presently disabled" in result.stdout
    (submitted,) = shell.calls("sbatch")
    assert "--export=ALL" in submitted.split()


@pytest.mark.parametrize(("restarts", "steps"), [(0, 1), (1, 2), (2, 1)])
def test_consecutive_starts_use_different_step_numbers(shell: Shell, restarts: int, steps: int) -> None:
    """slurmctld repeats an unanswered signal to step 0 a minute later, when the next start may be running."""
    away(shell, lambda n: False, restarts)
    assert shell.run(restarts).returncode == 0
    calls = shell.calls("srun")
    assert len(calls) == steps
    assert [c.split()[-1] for c in calls[:-1]] == ["true"] * (steps - 1)
    assert "orhpc.launch.node" in calls[-1]


def test_tasks_have_the_script_s_variables_for_any_export_option(shell: Shell) -> None:
    """``sbatch --export=NONE`` sets SLURM_EXPORT_ENV=NONE in the job, which srun obeys unless overridden."""
    assert shell.run().returncode == 0
    assert "--export=ALL" in shell.calls("srun")[0].split()
    preflight = (ROOT / "slurm/preflight.sbatch").read_text()
    for option in ("--export=ALL", '--nodes="$SLURM_JOB_NUM_NODES"', "#SBATCH --mem=0"):
        assert option in preflight


@pytest.mark.slow
@pytest.mark.parametrize(
    "first_node",
    [
        f'{ATTEMPT}; echo 75 >"$ORHPC_JOB_FOLDER/code"',
        f'{ATTEMPT}; flock "$ORHPC_JOB_FOLDER/held" sleep 0.5',  # it was killed and wrote no exit code
    ],
)
def test_an_srun_that_hangs_after_the_first_node_has_exited_is_killed(shell: Shell, first_node: str) -> None:
    shell.program("srun", f"{first_node}; exec sleep 50")
    start = time.monotonic()
    result = shell.run()
    assert time.monotonic() - start < 20
    assert result.returncode == 0, result.stdout + result.stderr
    assert "srun is still running 1 s after the first node has exited: killed" in result.stdout
    assert shell.calls("scontrol")[-1] == "requeue 7"


@pytest.mark.slow
def test_an_srun_that_starts_no_task_is_killed_and_the_job_requeued_with_a_delay(shell: Shell) -> None:
    shell.program("srun", "exec sleep 50")
    start = time.monotonic()
    result = shell.run()
    assert time.monotonic() - start < 20
    assert result.returncode == 0, result.stdout + result.stderr
    assert "srun has not started the first node's task within 2 s: killed" in result.stdout
    assert shell.calls("scontrol")[-2:] == ["requeue 7", "update JobId=7 StartTime=now+120"]
    assert len(shell.calls("srun")) == 1


@pytest.mark.slow
def test_an_srun_is_not_killed_while_the_first_node_works(shell: Shell) -> None:
    shell.program(
        "srun",
        f'{ATTEMPT}; flock "$ORHPC_JOB_FOLDER/held" sleep 3; echo 75 >"$ORHPC_JOB_FOLDER/code"; exit 75',
    )
    result = shell.run()
    assert result.returncode == 0
    assert "killed" not in result.stdout


def test_a_job_whose_first_node_cannot_begin_an_attempt_is_requeued(shell: Shell) -> None:
    """For example if the run directory's file server does not answer: srun has started the tasks."""
    shell.program("srun", 'echo 75 >"$ORHPC_JOB_FOLDER/code"; exit 75')
    result = shell.run()
    assert result.returncode == 0
    assert shell.calls("scontrol")[-1] == "requeue 7"
    assert len(shell.calls("srun")) == 1


WAIT = f'{ATTEMPT}; echo 240 >"$ORHPC_JOB_FOLDER/delay"; echo 75 >"$ORHPC_JOB_FOLDER/code"; exit 75'


@pytest.mark.slow
def test_a_job_that_must_wait_is_updated_once_it_is_pending(shell: Shell) -> None:
    """SLURM may take a moment to show the job as pending."""
    shell.program("srun", WAIT)
    shell.program(
        "scontrol",
        f'[ "$1" != update ] || [ "$(grep -c "scontrol update" {shell.folder}/calls)" -gt 2 ] || '
        '{ echo "Job is no longer pending execution" >&2; exit 1; }\n'
        f'echo "{RUNNING.format(restarts=0)}"',
    )
    assert shell.run().returncode == 0
    calls = shell.calls("scontrol")
    assert calls[-4:] == ["requeue 7", *["update JobId=7 StartTime=now+240"] * 3]


def test_a_successor_job_waits_instead_of_the_job(shell: Shell) -> None:
    shell.program("srun", WAIT)
    shell.program("scontrol", f'echo "{RUNNING.format(restarts=0).replace("Requeue=1", "Requeue=0")}"')
    shell.program("sbatch", "echo 8")
    shell.run()
    assert shell.calls("scontrol")[-1] == "update JobId=8 StartTime=now+240"


def test_a_job_without_a_delay_is_not_updated(shell: Shell) -> None:
    assert shell.run().returncode == 0
    assert not [call for call in shell.calls("scontrol") if call.startswith("update")]


@pytest.mark.parametrize(
    ("code", "expedited", "canceled"),
    [(0, True, False), (2, True, True), (4, True, True), (75, True, False), (2, False, False)],
)
def test_a_job_that_has_ended_is_not_held_for_an_expedited_requeue(
    shell: Shell, code: int, expedited: bool, canceled: bool
) -> None:
    """SLURM 25.11 holds such a job after a failure, as if somebody were to release it."""
    flag = "ExpeditedRequeue=Yes " if expedited else ""
    shell.program("scontrol", f'echo "{RUNNING.format(restarts=0)}" "{flag}"')
    shell.program("scancel", "true")
    shell.program("srun", f'{ATTEMPT}; echo {code} >"$ORHPC_JOB_FOLDER/code"; exit {code}')
    result = shell.run()
    assert result.returncode == (0 if code == 75 else code)
    assert shell.calls("scancel") == (["7"] if canceled else [])
    assert ("canceling the job" in result.stdout) is canceled
    assert ("requeue 7" in shell.calls("scontrol")) is (code == 75)


SECOND = "JobId=8 HetJobId=7 JobState={state} Requeue=1 Restarts={restarts} ExcNodeList=n[8-9] StdOut=y"


def heterogeneous(shell: Shell, first: str, second: str = "RUNNING", restarts: int = 0) -> None:
    """Show a job of two components, each on its own line."""
    line = RUNNING.format(restarts=restarts).replace("RUNNING", first)
    shell.program("scontrol", f'echo "{line}"; echo "{SECOND.format(state=second, restarts=restarts)}"')


@pytest.mark.parametrize("restarts", [0, 1])
def test_one_step_spans_all_components_of_a_heterogeneous_job(shell: Shell, restarts: int) -> None:
    heterogeneous(shell, "RUNNING", restarts=restarts)
    assert shell.run(restarts, SLURM_HET_SIZE="3").returncode == 0
    calls = shell.calls("srun")
    assert len(calls) == 1 + restarts
    assert all("--het-group=0-2 --ntasks-per-node=1 " in call for call in calls)
    assert not [call for call in calls if "--nodes" in call]
    assert shell.calls("scontrol")[-1] == "requeue 7"


def test_the_first_component_decides_about_the_requeue(shell: Shell) -> None:
    """The others may still be running when a heterogeneous job is canceled."""
    heterogeneous(shell, "CANCELLED")
    result = shell.run(SLURM_HET_SIZE="2")
    assert "the job is canceled, ending or restarted: not requeued" in result.stdout
    assert "requeue 7" not in shell.calls("scontrol")


def test_nodes_are_excluded_from_all_components_by_the_first(shell: Shell) -> None:
    shell.program(
        "srun", f'{ATTEMPT}; echo n4 >"$ORHPC_JOB_FOLDER/exclude"; echo 75 >"$ORHPC_JOB_FOLDER/code"; exit 75'
    )
    heterogeneous(shell, "RUNNING")
    assert shell.run(SLURM_HET_SIZE="2").returncode == 0
    assert shell.calls("scontrol")[-1] == "update JobId=7 ExcNodeList=n4"


def test_a_heterogeneous_job_that_may_not_be_requeued_has_no_successor(shell: Shell) -> None:
    """sbatch's options for it would be those of one component."""
    line = RUNNING.format(restarts=0).replace("Requeue=1", "Requeue=0")
    shell.program("scontrol", f'echo "{line}"; [ "$1" != requeue ]')
    shell.program("sbatch", "echo 9")
    result = shell.run(SLURM_HET_SIZE="2")
    assert result.returncode == 75
    assert "a heterogeneous job has no successor" in result.stdout
    assert shell.calls("sbatch") == []


def test_an_interpreter_without_the_package_gives_one_error_line(shell: Shell) -> None:
    bare = shell.folder / "bin/bare"
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    result = shell.run(python=str(bare))
    assert result.returncode == 2
    assert (result.stdout + result.stderr).splitlines() == [
        f"orhpc: {bare} has no package orhpc: submit from the folder of its .venv, or set ORHPC_PYTHON"
    ]
    assert not (shell.folder / "calls").exists()


def test_a_submitted_script_contains_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """SBATCH_EXPORT=NONE would remove a variable with its name from the job."""
    config = Config.model_validate({"environments": {"a/b": {"serve": "letters"}}})
    monkeypatch.delenv("ORHPC_PYTHON", raising=False)
    assert f"\npython={sys.executable}\n" in submission.render(config, python=submission.own_python())
    monkeypatch.setenv("ORHPC_PYTHON", "/opt/python")
    assert "\npython=/opt/python\n" in submission.render(config, python=submission.own_python())


@pytest.mark.slow
def test_a_task_that_died_before_its_attempt_does_not_end_the_next_one(shell: Shell) -> None:
    """It leaves the file behind whose lock tells that the first node works."""
    shell.program(
        "srun",
        f'held=$ORHPC_JOB_FOLDER/held; [ "$(grep -c ^srun {shell.folder}/calls)" -gt 1 ] || '
        '{ : >"$held"; exit 139; }\n'
        f'sleep 0.5; {ATTEMPT}; : >"$held.new"; exec 9<"$held.new"; flock 9\n'
        'mv "$held.new" "$held"; sleep 2\n'
        'echo 75 >"$ORHPC_JOB_FOLDER/code"; exit 75',
    )
    result = shell.run()
    assert "killed" not in result.stdout
    assert len(shell.calls("srun")) == 2
    assert shell.calls("scontrol")[-1] == "requeue 7"


def test_a_signal_before_the_run_is_not_lost(shell: Shell) -> None:
    """For example a preemption right after the start, while a cold filesystem reads the interpreter."""
    early = shell.folder / "bin/early"
    early.write_text(f'#!/bin/bash\nkill -USR2 $PPID\nexec {sys.executable} "$@"\n')
    early.chmod(0o755)
    shell.program("srun", '[ -e "$ORHPC_JOB_FOLDER/stop" ] && echo 75 >"$ORHPC_JOB_FOLDER/code"; exit 75')
    result = shell.run(python=str(early))
    assert result.returncode == 0, result.stderr
    assert "SIGUSR2" in result.stdout
    assert shell.calls("scontrol")[-1] == "requeue 7"
    assert len(shell.calls("srun")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("state", "restarts"), [("PENDING", 1), ("COMPLETING", 1), ("RUNNING", 1)])
def test_a_requeue_whose_answer_is_lost_submits_no_successor(shell: Shell, state: str, restarts: int) -> None:
    """A busy controller requeues the job, and then refuses the repeated request."""
    requeued = RUNNING.format(restarts=restarts).replace("JobState=RUNNING", f"JobState={state}")
    shell.program(
        "scontrol",
        f'n=$(grep -c "scontrol requeue" {shell.folder}/calls); if [ "$1" = requeue ]; then\n'
        '[ "$n" = 1 ] && echo "slurm_requeue: Socket timed out on send/recv operation" >&2\n'
        '[ "$n" = 1 ] || echo "Job is pending execution for job 7" >&2\nexit 1; fi\n'
        f'[ "$n" = 0 ] && echo "{RUNNING.format(restarts=0)}" || echo "{requeued}"',
    )
    shell.program("sbatch", "echo 9")
    shell.program("srun", f'{ATTEMPT}; echo n4 >"$ORHPC_JOB_FOLDER/exclude"; exit 75')
    result = shell.run()
    assert result.returncode == 0, result.stdout
    assert "sbatch" not in (shell.folder / "calls").read_text()
    assert shell.calls("scontrol")[-1] == "update JobId=7 ExcNodeList=n4"


def test_a_restart_count_of_another_job_does_not_prevent_the_requeue(shell: Shell) -> None:
    """A job submitted from within a requeued one inherits its variables; SLURM sets only its own's."""
    shell.program("srun", f'{ATTEMPT}; echo "$SLURM_RESTART_COUNT" >known; exit 75')
    assert shell.run(SLURM_RESTART_COUNT="2").returncode == 0
    assert (shell.folder / "known").read_text() == "0\n"
    assert shell.calls("scontrol")[-1] == "requeue 7"


def test_a_successor_avoids_the_same_nodes_and_writes_to_the_same_file(shell: Shell) -> None:
    line = RUNNING.format(restarts=0).replace("(null)", "n[1-2]").replace("Requeue=1", "Requeue=0")
    shell.program("scontrol", f'echo "{line}"')
    shell.program("sbatch", f'printf "<%s>" "$@" >>{shell.folder}/words; echo 8')
    output = shell.folder / "my 100% runs" / "slurm-7.out"
    output.parent.mkdir()
    shell.run()
    with output.open("w") as stdout:
        subprocess.run(
            ["bash", "script", "none.yaml"], cwd=shell.folder, env=shell.variables, stdout=stdout, timeout=60,
            check=False,
        )  # fmt: skip
    to_pipe, to_file = (shell.folder / "words").read_text().split("<--parsable>")[1:]
    assert "<--output=x>" in to_pipe
    assert f"<--output={shell.folder}/my 100%% runs/slurm-7.out>" in to_file
    assert "<--exclude=n[1-2]>" in to_pipe
