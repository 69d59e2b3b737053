"""The batch script rendered from a config; no value in the config can inject code or options."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import ConfigError
from orhpc.launch.slurm import submission
from orhpc.launch.slurm.batch_script import BODY
from orhpc.launch.slurm.scheduler import JobInfo
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from tests.cpu_time import run_within

ROOT = Path(__file__).parents[4]
DEFAULT = ROOT / "configs/default.yaml"


def config_of(**settings_: object) -> Config:
    return Config.model_validate({"environments": {"a/b": {"serve": "letters"}}, "slurm": settings_})


def head_of(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith("#SBATCH")]


def test_the_script_in_the_repository_equals_the_rendered_one() -> None:
    assert (ROOT / "slurm/train.sbatch").read_text() == submission.render(load_config(DEFAULT))
    without_gpus = submission.render(load_config(ROOT / "configs/tiny.yaml"))
    assert (ROOT / "slurm/train-cpu.sbatch").read_text() == without_gpus
    assert not [line for line in head_of(without_gpus) if "gpu" in line]


def test_spares_are_requested_in_addition_and_the_job_survives_a_lost_node() -> None:
    config = load_config(DEFAULT, ["placement.nodes=4", "slurm.spares=2"])
    script = submission.render(config)
    assert {"#SBATCH --nodes=6", "#SBATCH --no-kill"} <= set(head_of(script))
    assert "\nspares=2\n" in script
    without = submission.render(load_config(DEFAULT, ["placement.nodes=4"]))
    assert "#SBATCH --nodes=4" in head_of(without)
    assert "#SBATCH --no-kill" not in head_of(without)
    with pytest.raises(ConfigError, match=r"^slurm\.spares: spares cannot replace a job's first node"):
        submission.render(load_config(DEFAULT, ["slurm.spares=1"]))


def test_each_kind_of_node_is_a_component_of_the_job() -> None:
    groups = "[{nodes: 2, partition: a100, mem: 300G, gpus_per_node: 8}, {nodes: 1, constraint: big, qos: q}]"
    config = load_config(
        DEFAULT, ["placement.nodes=7", "slurm.partition=h100", "slurm.time=60", f"slurm.node_groups={groups}",
                  "slurm.account=acc", "slurm.extra_sbatch=[--comment=x]", "slurm.mail_user=me@site.org"],
    )  # fmt: skip
    text = "\n".join(head_of(submission.render(config, 77)))
    parts = [set(part.split("\n#SBATCH --")) for part in text.split("\n#SBATCH hetjob")]
    of_all = {"signal=B:USR2@77", "requeue", "exclusive", "time=60", "account=acc", "comment=x"}
    assert len(parts) == 3
    assert all(of_all | {"ntasks-per-node=1", "open-mode=append"} <= part for part in parts)
    assert {"nodes=4", "partition=h100", "mem=0", "gpus-per-node=4", "mail-user=me@site.org"} <= parts[0]
    assert {"nodes=2", "partition=a100", "mem=300G", "gpus-per-node=8"} <= parts[1]
    assert {"nodes=1", "partition=h100", "mem=0", "gpus-per-node=4", "constraint=big", "qos=q"} <= parts[2]
    assert not [line for part in parts[1:] for line in part if line.startswith("mail")]
    assert "hetjob" not in submission.render(load_config(DEFAULT))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["placement.nodes=2", "slurm.node_groups=[{nodes: 2}]"], "leave none of placement.nodes=2"),
        (["placement.nodes=4", "slurm.node_groups=[{nodes: 2}]", "slurm.spares=1"], "set slurm.spares to 0"),
        (["slurm.node_groups=[{nodes: 0}]"], "slurm.node_groups"),
        (["slurm.node_groups=[{partition: a}]"], "slurm.node_groups"),
        (["slurm.node_groups=[{nodes: 1, partition: 'a b'}]"], "in a #SBATCH line"),
        (['slurm.node_groups=[{nodes: 1, mem: "1\\n#SBATCH --x"}]'], "in a #SBATCH line"),
        (["slurm.node_groups=[{nodes: 1, devices: 4}]"], "devices"),
    ],
)
def test_groups_of_nodes_that_cannot_be_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        submission.render(load_config(DEFAULT, words))


def test_every_setting_reaches_the_header() -> None:
    config = config_of(
        partition="gpu,big", account="acc", qos="high", time="1-12:00:00", gpus_per_node=8, cpus_per_task=64,
        mem="500G", constraint="a100&ib", reservation="r_1", exclude="n[1-4,7]", mail_user="me@site.org",
        mail_type="END,FAIL", extra_sbatch=["--comment=x", "--switches=1"],
    )  # fmt: skip
    head = head_of(submission.render(config, 77))
    for line in (
        "partition=gpu,big", "account=acc", "qos=high", "time=1-12:00:00", "gpus-per-node=8", "mem=500G",
        "cpus-per-task=64", "constraint=a100&ib", "reservation=r_1", "exclude=n[1-4,7]", "comment=x",
        "mail-user=me@site.org", "mail-type=END,FAIL", "switches=1", "signal=B:USR2@77", "exclusive",
    ):  # fmt: skip
        assert f"#SBATCH --{line}" in head


_FIELDS = ["partition", "account", "qos", "mem", "constraint", "reservation", "exclude", "mail_user", "time"]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(_FIELDS), st.text(max_size=30) | st.from_regex(r"\A[a-z]+[\n\r #'\"$`\\]+--x\Z"))
def test_no_header_value_adds_a_line_or_an_option(field: str, value: str) -> None:
    try:
        config = config_of(**{field: value})
    except ValueError:
        return
    plain, changed = head_of(submission.render(config_of())), head_of(submission.render(config))
    if field == "mail_user":  # which selects the usual occasions
        plain = [*plain, "#SBATCH --mail-type=BEGIN,END,FAIL,REQUEUE"]
    option = field.replace("_", "-")
    assert [x for x in changed if x not in plain] in ([], [f"#SBATCH --{option}={value}"])
    assert not re.search(r"\s", value)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["python", "modules", "image", "mounts", "srun_args"]), st.text(min_size=1, max_size=30)
)
def test_every_value_stays_one_shell_word(field: str, value: str) -> None:
    marked = value + "'; echo INJECTED; '"
    tree: dict[str, object] = {field: [marked] if field in ("modules", "srun_args") else marked}
    if field in ("image", "mounts"):
        image = {"kind": "apptainer", "image": "i.sif"}
        tree = {"container": image | {field: [marked] if field == "mounts" else marked}}
    try:
        script = submission.render(config_of(**tree))
    except ValueError:
        assert not marked.isprintable()
        return
    # Let the shell itself split the lines: run them with every command replaced by an echo.
    lines = [x for x in script.splitlines() if "INJECTED" in x]
    stub = "srun() { :; }; module() { :; }; apptainer() { :; }; job_folder=/tmp\n"
    text = "\n".join(
        x.removesuffix("\\").strip() if "python=" in x else f": {x.removesuffix('&')}" for x in lines
    )
    result = subprocess.run(["bash", "-c", stub + text], capture_output=True, text=True, check=False)
    assert "INJECTED" not in result.stdout.splitlines()
    assert "syntax" not in result.stderr


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("slurm.partition='a b'", "slurm.partition"),
        ('slurm.account="a\\nb"', "slurm.account"),
        ("slurm.extra_sbatch=['--signal=USR1@5']", "--signal is set by the launcher"),
        ("slurm.extra_sbatch=['comment=x']", "write --option"),
        ("slurm.time=tomorrow", "is not a time limit"),
        ("slurm.container.kind=pyxis", "container.image is needed"),
    ],
)
def test_bad_slurm_settings_are_named(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(DEFAULT, [override])


def test_times_with_colons_are_passed_unchanged() -> None:
    assert load_config(DEFAULT, ["slurm.time=4:00:00"]).slurm.time == "4:00:00"
    assert load_config(DEFAULT, ["slurm.time=90"]).slurm.time == "90"


def test_the_signal_lead_is_twice_the_measured_commit_time(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    assert submission.signal_lead(config_of(), rundir) == submission.DEFAULT_LEAD_S
    log = EventLog(rundir.events, 1)
    log.write("commit", step=1, seconds=3.0)
    assert submission.signal_lead(config_of(), rundir) == 120
    log.write("commit", step=2, seconds=200.0)
    assert submission.signal_lead(config_of(), rundir) == 401
    assert submission.signal_lead(config_of(signal_lead_s=30), rundir) == 30
    log.close()


@pytest.mark.parametrize(
    ("time_", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:02:03", 3723),
        ("2-3", 183600),
        ("2-03:04", 183840),
        ("1-0:0:5", 86405),
    ],
)
def test_time_limits_are_parsed_like_sbatch(time_: str, seconds: int) -> None:
    assert submission.limit_s(time_) == seconds


def test_a_short_job_is_not_signaled_right_after_its_start() -> None:
    assert "#SBATCH --signal=B:USR2@150" in head_of(
        submission.render(config_of(), submission.signal_lead(config_of(time="5")))
    )
    assert submission.signal_lead(config_of(time="10")) == 300
    assert submission.lead_and_why(config_of(time="5")) == (
        150,
        "half of slurm.time; the run has made no commit yet",
    )


@pytest.mark.slow
def test_dry_run_prints_everything_quickly_and_without_slurm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orhpc.launch", "configs/qwen3-30b-a3b.yaml", "--dry-run"]
    command += ["--nodes", "3", f"run.root={tmp_path}"]
    result = run_within(command, 12, cwd=ROOT, env={"PATH": "/nowhere"})  # about five times
    assert result.returncode == 0, result.stderr
    for part in ("#SBATCH --nodes=3", "#SBATCH --gpus-per-node=8", "srun ", "batch_size: 128", "rank: 23"):
        assert part in result.stdout
    assert not list(tmp_path.iterdir())


def test_job_info_is_parsed_from_scontrol_s_output() -> None:
    line = "JobId=7 JobName=x JobState=RUNNING EndTime=2030-01-01T00:00:00 PreemptTime=None Comment=a=b"
    info = JobInfo.parse(line)
    assert (info.state, info.being_preempted) == ("RUNNING", False)
    assert info.seconds_left(0) is not None
    assert JobInfo.parse(line.replace("PreemptTime=None", "PreemptTime=2030-01-01T00:00:00")).being_preempted
    assert JobInfo.parse(line.replace("2030-01-01T00:00:00", "Unknown")).seconds_left() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "restarts", "back"),
    [
        ("RUNNING", 1, True),
        ("SIGNALING", 1, True),  # SLURM's state of a running job while it delivers a signal
        ("SIGNALING", 2, False),  # of a newer start
        ("COMPLETING", 1, False),
        ("CANCELLED", 1, False),
    ],
)
def test_only_a_running_job_is_requeued(tmp_path: Path, state: str, restarts: int, back: bool) -> None:
    programs = {
        "srun": '[ "${!#}" != true ] || exit 0\n'
        f'echo "{tmp_path}/attempt" >"$ORHPC_JOB_FOLDER/attempt"; exit 75',
        "scontrol": f'[ "$1" = requeue ] && touch "{tmp_path}/requeued"; '
        f'now=RUNNING n=1; [ ! -e "{tmp_path}/began" ] || now={state} n={restarts}; '
        f'touch "{tmp_path}/began"; '
        'echo "JobId=7 JobState=$now Requeue=1 Restarts=$n ExcNodeList=(null) StdOut=x"',
    }
    (tmp_path / "attempt").mkdir()
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": "1", "ORHPC_PYTHON": sys.executable,
    }  # fmt: skip
    script = ROOT / "slurm/train.sbatch"
    result = subprocess.run(
        ["bash", str(script), "none.yaml"], env=variables, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (tmp_path / "requeued").exists() is back, result.stdout + result.stderr
    assert result.returncode == (0 if back else 75)
    assert ("not requeued" in result.stdout) is not back


@pytest.mark.slow
def test_no_signal_is_lost_while_slurm_is_queried_about_the_previous_one(tmp_path: Path) -> None:
    """bash loses signals while a trap waits for a program: two in five within 60 ms of the first."""
    handler = BODY[BODY.index("stop() {") : BODY.index("# If SLURM may not requeue")]
    script = tmp_path / "script"
    script.write_text(
        "job_folder=$(mktemp -d -p " + str(tmp_path) + ")\nshow_job() { sleep 0.05; echo described; }\n"
        f"{handler}exec 3<&0\ncat <&3 >/dev/null & task=$!\necho ready\n"  # until communicate() below
        'while true; do wait "$task"; kill -0 "$task" 2>/dev/null || break; done\nwait\n'
        'cat "$job_folder/first" "$job_folder/again"\n'
    )
    pipe = subprocess.PIPE
    shells = [subprocess.Popen(["bash", script], stdin=pipe, stdout=pipe, text=True) for _ in range(12)]
    for index, shell in enumerate(shells):
        assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGUSR2)
        assert "SIGUSR2" in shell.stdout.readline()  # bash may merge two simultaneous signals
        time.sleep(0.005 * index)
        shell.send_signal(signal.SIGTERM)
    output = [shell.communicate()[0] for shell in shells]
    assert all("SIGTERM" in text for text in output), output
    assert all(text.endswith("described\ndescribed\n") for text in output), output
