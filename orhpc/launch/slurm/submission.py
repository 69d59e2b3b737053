"""Render the batch script of a config and submit it with sbatch through submitit.

submitit finds sbatch, writes the submission file and parses the job id; the script's text is ours.
Nothing is pickled: the job reads only the config file and the run directory.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orhpc.config import Config
from orhpc.config.slurm import NodeGroup
from orhpc.errors import ConfigError, PreflightError
from orhpc.launch import model
from orhpc.launch.slurm import features, scheduler
from orhpc.launch.slurm.batch_script import BODY, CHECK
from orhpc.process.access import folder_mode
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events

DEFAULT_LEAD_S = 300
_LEAST_LEAD_S = 120
_SUBMIT_TIMEOUT_S = 60
_OF_THIS_JOB = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_SIZE", "SLURM_RESTART_COUNT")
"""Variables that a job submitted from within another would inherit, and take for its own."""
_MAIL_TYPES = "BEGIN,END,FAIL,REQUEUE"


def signal_lead(config: Config, rundir: RunDir | None = None) -> int:
    """Seconds before the time limit at which the job is signaled: twice this run's slowest recent commit.

    At least two minutes, because SLURM checks limits about twice a minute.  Five minutes before the first
    commit.
    """
    return lead_and_why(config, rundir)[0]


def lead_and_why(config: Config, rundir: RunDir | None = None) -> tuple[int, str]:
    """The lead in seconds and how it was determined; at most half the time limit."""
    lead_s, why = _wanted_lead(config, rundir)
    half = limit_s(config.slurm.time) // 2 if config.slurm.time is not None else lead_s
    return (half, f"half of slurm.time; {why}") if half < lead_s else (lead_s, why)


def _wanted_lead(config: Config, rundir: RunDir | None) -> tuple[int, str]:
    if config.slurm.signal_lead_s is not None:
        return config.slurm.signal_lead_s, "slurm.signal_lead_s"
    commits = [e["seconds"] for e in read_events(rundir.events) if e["event"] == "commit"] if rundir else []
    if not commits:
        return DEFAULT_LEAD_S, "the run has made no commit yet"
    slowest = max(commits[-5:])
    twice = int(2 * slowest) + 1
    least = f", but no less than {_LEAST_LEAD_S}" if twice < _LEAST_LEAD_S else ""
    return max(_LEAST_LEAD_S, twice), f"twice the slowest of the last commits, {slowest:.1f} s{least}"


def limit_s(time: str) -> int:
    """A time limit in seconds, from sbatch's formats: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(n) for n in rest.split(":")]
    if not dash:
        numbers = [0, *numbers] if len(numbers) < 3 else numbers
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def nodes_to_request(config: Config) -> int:
    """Nodes of the job: those that take part, and the spares.

    Raises:
        ConfigError: a spare could never take another node's place, or ``slurm.node_groups`` leave no node for
            the first group.
    """
    grouped = sum(group.nodes for group in config.slurm.node_groups)
    if grouped >= config.placement.nodes:
        raise ConfigError(
            f"slurm.node_groups: they have {grouped} nodes, which leave none of placement.nodes="
            f"{config.placement.nodes} for the first group"
        )
    if grouped and config.slurm.spares:
        raise ConfigError(
            "slurm.node_groups: a spare node cannot replace a node of another kind: set slurm.spares to 0"
        )
    if config.slurm.spares and config.placement.nodes == 1:
        raise ConfigError(
            "slurm.spares: spares cannot replace a job's first node, and placement.nodes is 1: set it to 0"
        )
    return config.placement.nodes + config.slurm.spares


def header(config: Config, lead_s: int) -> list[str]:
    """The ``#SBATCH`` lines; those of further kinds of nodes follow ``#SBATCH hetjob``."""
    s = config.slurm
    nodes = nodes_to_request(config) - sum(group.nodes for group in s.node_groups)
    first = [
        *_resources(config, nodes, None, lead_s),
        # With an address alone, SLURM sends nothing.
        ("mail-user", s.mail_user),
        ("mail-type", s.mail_type or (_MAIL_TYPES if s.mail_user is not None else None)),
    ]
    lines = [*_lines(first), *s.extra_sbatch]
    for group in s.node_groups:
        lines += ["hetjob", *_lines(_resources(config, group.nodes, group, lead_s)), *s.extra_sbatch]
    return [f"#SBATCH {line}" for line in lines]


def _resources(config: Config, nodes: int, group: NodeGroup | None, lead_s: int) -> list[tuple[str, object]]:
    """sbatch's options for nodes of one kind; ``group`` replaces settings of the section."""
    s = config.slurm

    def of_group(name: str) -> object:
        own = getattr(group, name, None)
        return getattr(s, name) if own is None else own

    gpus = of_group("gpus_per_node")
    if gpus is None:
        gpus = config.placement.devices_per_node if config.placement.device == "cuda" else 0
    return [
        ("job-name", "orhpc"),
        ("nodes", nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", gpus or None),
        ("cpus-per-task", of_group("cpus_per_task")),
        ("mem", of_group("mem")),
        ("exclusive", s.exclusive or None),
        ("time", s.time),
        ("signal", f"B:USR2@{lead_s}"),
        ("requeue", True),
        ("no-kill", s.spares > 0 or None),
        ("open-mode", "append"),
        ("output", "slurm-%j.out"),
        ("partition", of_group("partition")),
        ("account", s.account),
        ("qos", of_group("qos")),
        ("constraint", of_group("constraint")),
        ("reservation", of_group("reservation")),
        ("exclude", s.exclude),
    ]


def _lines(options: Sequence[tuple[str, object]]) -> list[str]:
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in options if v is not None]


def render(
    config: Config,
    lead_s: int = DEFAULT_LEAD_S,
    python: str | None = None,
    elements: Mapping[int, Sequence[str]] | None = None,
) -> str:
    """The complete batch script; the config file and overrides are its arguments.

    Args:
        config: the run's settings.
        lead_s: seconds before the time limit at which the job is signaled.
        python: the interpreter if neither ``slurm.python`` nor a container sets one.
        elements: the arguments of each element of a job array, by index; null: not an array.
    """
    s = config.slurm
    srun_args = [*map(shlex.quote, s.srun_args)]
    inside: list[str] = []
    image = shlex.quote(s.container.image or "")
    root = str(Path(config.run.root).absolute())
    shared = [root, *(str(folder) for folder in model.where_models_are(config))]
    mounts = [*(f"{folder}:{folder}" for folder in dict.fromkeys(shared)), *s.container.mounts]
    if s.container.kind == "pyxis":
        more = shlex.quote("".join("," + m for m in mounts)) if mounts else ""
        srun_args += [f"--container-image={image}", '--container-workdir="$PWD"']
        srun_args += [f'--container-mounts="$PWD:$PWD,$job_folder:$job_folder"{more}']
    elif s.container.kind == "apptainer":
        inside = ["apptainer", "exec", "--nv", '--bind="$PWD"', '--bind="$job_folder"', '--pwd="$PWD"']
        inside += [*(f"--bind={shlex.quote(m)}" for m in mounts), image]
    if s.python is not None:
        python = shlex.quote(s.python)
    elif s.container.kind != "none":
        python = "python3"
    else:
        python = shlex.quote(python) if python is not None else ""
    check = CHECK.strip("\n") + "\n" if s.container.kind == "none" else ""
    modules = "".join(f"module load {shlex.quote(m)}\n" for m in s.modules)
    body = BODY.replace("@MODULES@\n", modules).replace("@CHECK@\n", check)
    body = (
        body.replace("@SPARES@", str(s.spares))
        .replace("@PYTHON@", python)
        .replace("@SRUN_ARGS@", "".join(f" {a}" for a in srun_args))
    )
    body = body.replace("@INSIDE@", "".join(f"{w} " for w in inside))
    # Last, because settings are text in which a later replacement could find its mark.
    body = body.replace("@ELEMENTS@\n", _choose_arguments(elements) if elements is not None else "", 1)
    return "#!/bin/bash\n" + "\n".join(header(config, lead_s)) + "\n" + body


def _choose_arguments(elements: Mapping[int, Sequence[str]]) -> str:
    """Shell code that sets the script's arguments to those of the array's element."""
    cases = "".join(f"  {i}) set -- {shlex.join(words)} ;;\n" for i, words in elements.items())
    unknown = '  *) echo "orhpc: the array has no element ${SLURM_ARRAY_TASK_ID:-}" >&2 && exit 2 ;;\n'
    return f"case ${{SLURM_ARRAY_TASK_ID:-}} in\n{cases}{unknown}esac\n"


def own_python() -> str:
    """The interpreter of a submitted job, by path because SBATCH_EXPORT may drop ORHPC_PYTHON."""
    return os.environ.get("ORHPC_PYTHON") or sys.executable


def test_submission(config: Config) -> str:
    """Check with ``sbatch --test-only`` that the cluster has nodes for the job; nothing is submitted.

    Raises:
        PreflightError: sbatch refuses the script, with sbatch's message.
    """
    if shutil.which("sbatch") is None:
        return "there is no sbatch here to ask"
    with tempfile.NamedTemporaryFile("w", prefix="orhpc-", suffix=".sbatch") as script:
        script.write(render(config))
        script.flush()
        answer = scheduler.query("sbatch", "--test-only", script.name)
    lines = [line.removeprefix("sbatch: ") for line in answer.stderr.splitlines() if line.strip()]
    if answer.returncode:
        raise PreflightError(f"sbatch refuses: {'; '.join(lines)[-300:]}")
    return next((line for line in lines if " to start at " in line), "sbatch accepts it")


def sbatch_arguments(
    config: Config,
    rundir: RunDir,
    config_path: str,
    overrides: Sequence[str],
    say: Callable[[str], object],
) -> tuple[list[str], list[str]]:
    """Options before and arguments after the script on sbatch's command line.

    ``say`` receives a line for each setting that this cluster's SLURM does not support.
    """
    options = ["--output", str(rundir.path / features.output_name())]
    options += ["--job-name", f"orhpc-{config.run.name}", *features.requeue_options(config, say)]
    return options, [config_path, *overrides]


def submit(
    config: Config,
    rundir: RunDir,
    config_path: str,
    overrides: Sequence[str],
    say: Callable[[str], object],
) -> str:
    """Submit the job from the current directory and return its id; ``say``: as of :func:`sbatch_arguments`.

    Raises:
        PreflightError: sbatch is missing, refuses, or does not answer in time.
    """
    text = render(config, signal_lead(config, rundir), own_python())
    options, arguments = sbatch_arguments(config, rundir, config_path, overrides, say)
    return sbatch(text, options, arguments, rundir.path / "submitted")


def sbatch(text: str, options: Sequence[str], arguments: Sequence[str], folder: Path) -> str:
    """Submit a batch script and return the job's id.

    Args:
        text: the script.
        options: of sbatch.
        arguments: of the script.
        folder: keeps what was submitted; it is created.

    Raises:
        PreflightError: sbatch is missing, refuses, or does not answer in time.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    command = ["timeout", str(_SUBMIT_TIMEOUT_S), "env"]
    command += [word for name in _OF_THIS_JOB for word in ("-u", name)]

    class Executor(SlurmExecutor):
        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return text

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return [*command, "sbatch", *options, str(submission_file_path), *arguments]

    folder.mkdir(mode=folder_mode(), exist_ok=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the raised error has the same text
            return Executor(folder)._submit_command("").job_id
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        raise PreflightError(f"sbatch: {' '.join(str(error).split())[-400:]}") from None
