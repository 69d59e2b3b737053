"""The ``slurm`` section: options of the batch job, and how its processes start.

No value can add a line or an option to the batch script: values in #SBATCH lines may contain only a fixed
set of characters, and values in shell commands are single lines that are quoted.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from orhpc.config.base import Machines, NonNegative, Positive, Seconds, Section, Spares

_SBATCH_VALUE = re.compile(r"[A-Za-z0-9_.,:;@=+/%&|*!()\[\]-]+")
_TIME_LIMIT = re.compile(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}")
_OURS = {
    *("signal", "nodes", "ntasks", "ntasks-per-node", "array", "requeue", "no-requeue", "wrap", "job-name"),
    "no-kill",
}


def _sbatch_value(value: str) -> str:
    """Refuse characters that would end the word or the line, or start a comment."""
    if not _SBATCH_VALUE.fullmatch(value):
        raise ValueError(
            f"{value!r}: only letters, digits and _.,:;@=+/%&|*!()[]- are allowed in a #SBATCH line"
        )
    return value


def _one_line(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError(f"{value!r} must be one line of printable text")
    return value


def _time_limit(value: Any) -> Any:
    if value is not None and not (isinstance(value, (str, int)) and _TIME_LIMIT.fullmatch(str(value))):
        raise ValueError(f"{value!r} is not a time limit: minutes, HH:MM:SS or D-HH:MM:SS")
    return None if value is None else str(value)


def _extra_option(value: str) -> str:
    name = re.fullmatch(r"--([a-z][a-z-]*)(=.+)?", _one_line(value))
    if not name:
        raise ValueError(f"{value!r}: write --option or --option=value")
    if name[1] in _OURS:
        raise ValueError(f"{value!r}: --{name[1]} is set by the launcher")
    _sbatch_value(value)
    return value


SbatchValue = Annotated[str, AfterValidator(_sbatch_value)]
OneLine = Annotated[str, AfterValidator(_one_line)]
TimeLimit = Annotated[str | None, BeforeValidator(_time_limit)]
ExtraOption = Annotated[str, AfterValidator(_extra_option)]


class ContainerSettings(Section):
    """The container that the job's processes run in."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """``none``: no container. ``pyxis``: srun's --container options (enroot). ``apptainer``: apptainer
    exec."""
    image: OneLine | None = None
    """Container image, in the notation of the runtime. Needed with ``pyxis`` and ``apptainer``."""
    mounts: list[OneLine] = Field(default_factory=list)
    """Folders to mount, as ``SOURCE:TARGET``, in addition to the working directory and ``run.root``."""

    @model_validator(mode="after")
    def _image_where_needed(self) -> Self:
        if (self.kind == "none") != (self.image is None):
            raise ValueError("container.image is needed by, and only by, kind: pyxis and apptainer")
        return self


class NodeGroup(Section):
    """Nodes of another kind. Null: as in ``slurm``."""

    nodes: Machines
    """Number of nodes."""
    partition: SbatchValue | None = None
    """Partition of these nodes."""
    qos: SbatchValue | None = None
    """Quality of service."""
    constraint: SbatchValue | None = None
    """Features that these nodes must have."""
    reservation: SbatchValue | None = None
    """A reservation to use."""
    gpus_per_node: NonNegative | None = None
    """GPUs requested per node."""
    cpus_per_task: Positive | None = None
    """CPU cores per node."""
    mem: SbatchValue | None = None
    """Memory per node, in SLURM's notation."""


class SlurmSettings(Section):
    """The batch job. Null: the cluster's default."""

    partition: SbatchValue | None = None
    """As in ``sbatch``: partitions, separated by commas."""
    account: SbatchValue | None = None
    """As in ``sbatch``: the account that is charged."""
    qos: SbatchValue | None = None
    """As in ``sbatch``: quality of service."""
    time: TimeLimit = None
    """Time limit: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``. A job that reaches it is requeued and resumes."""
    gpus_per_node: NonNegative | None = None
    """GPUs requested per node. Null: ``placement.devices_per_node`` if ``placement.device`` is ``cuda``, else
    none."""
    cpus_per_task: Positive | None = None
    """CPU cores per node. Set it on clusters whose nodes are shared between jobs."""
    mem: SbatchValue | None = "0"
    """Memory per node, in SLURM's notation (``200G``). ``0``: all of it."""
    exclusive: bool = True
    """Request nodes that no other job uses."""
    constraint: SbatchValue | None = None
    """As in ``sbatch``: features that nodes must have."""
    reservation: SbatchValue | None = None
    """As in ``sbatch``: a reservation to use."""
    spares: Spares = 0
    """Nodes to request in addition to ``placement.nodes``. They wait, and one takes the place of a node that
    is lost, without a requeue."""
    node_groups: list[NodeGroup] = Field(default_factory=list)
    """Further kinds of nodes, for a heterogeneous job, each as ``{nodes: 2, constraint: a100}``: ``nodes``
    and any of ``partition``, ``qos``, ``constraint``, ``reservation``, ``gpus_per_node``, ``cpus_per_task``
    and ``mem``. They are the last of ``placement.nodes``, where engines run with ``placement.mode: split``;
    the settings of this section describe the first."""
    expedited_requeue: bool = False
    """Submit with ``--requeue=expedite`` (SLURM 25.11 and newer, if the site allows it): after a node failure
    SLURM restarts the job at once, ahead of all others. Elsewhere it has no effect, and a line says so."""
    exclude_slow_nodes: bool = False
    """Requeue the job without a node on which a trainer rank has computed 1.5 times slower than the other
    ranks for ten steps. Otherwise the run only reports it."""
    exclude: SbatchValue | None = None
    """Nodes to exclude, in SLURM's notation."""
    mail_user: SbatchValue | None = None
    """Address to which SLURM sends mail about the job, even if its nodes are lost. Null: no mail, unless
    ``mail_type`` is set."""
    mail_type: SbatchValue | None = None
    """Occasions, in SLURM's notation. Null: ``BEGIN,END,FAIL,REQUEUE`` if there is a ``mail_user``."""
    extra_sbatch: list[ExtraOption] = Field(default_factory=list)
    """Further options of sbatch, as ``--option=value``."""
    srun_args: list[OneLine] = Field(default_factory=list)
    """Further arguments of srun."""
    modules: list[OneLine] = Field(default_factory=list)
    """Environment modules to load before anything else."""
    container: ContainerSettings = ContainerSettings()
    python: OneLine | None = None
    """Python interpreter of the job. Null: the launcher's, ``.venv/bin/python`` or ``python3``."""
    signal_lead_s: Positive | None = None
    """Seconds before the time limit at which the job stops and commits. Null: twice the slowest of the run's
    last commits."""
    interface: OneLine | None = None
    """Network interface for traffic between the job's nodes. Null: the one that the node's name resolves
    to."""
    health_command: OneLine | None = None
    """Shell command that is run on every node at each start; a node where it fails is excluded. Null:
    none."""
    start_timeout_s: Seconds = 300.0
    """Seconds that the first node waits for the others."""
