"""The ``slurm:`` section of a config: what the batch script asks for and how its processes start.

No value can add a line or an option to the script: header words are matched against a fixed set of
characters, and what the shell sees is one line that the renderer quotes.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from orhpc.config.base import NonNegative, Positive, Seconds, Section

_SBATCH_VALUE = re.compile(r"[A-Za-z0-9_.,:;@=+/%&|*!()\[\]-]+")
_TIME_LIMIT = re.compile(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}")
_OURS = {"signal", "nodes", "ntasks", "ntasks-per-node", "array", "requeue", "no-requeue", "wrap", "job-name"}


def _sbatch_value(value: str) -> str:
    """One word of a batch script's header: nothing that ends the word, the line or starts a comment."""
    if not _SBATCH_VALUE.fullmatch(value):
        raise ValueError(
            f"{value!r}: only letters, digits and _.,:;@=+/%&|*!()[]- may stand in a #SBATCH line"
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
        raise ValueError(f"{value!r}: --{name[1]} is the launcher's own")
    _sbatch_value(value)
    return value


SbatchValue = Annotated[str, AfterValidator(_sbatch_value)]
OneLine = Annotated[str, AfterValidator(_one_line)]
TimeLimit = Annotated[str | None, BeforeValidator(_time_limit)]
ExtraOption = Annotated[str, AfterValidator(_extra_option)]


class ContainerSettings(Section):
    """What the job's processes run in."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """``pyxis``: srun's --container options (enroot); ``apptainer``: apptainer exec."""
    image: OneLine | None = None
    """Image, in the runtime's own notation."""
    mounts: list[OneLine] = Field(default_factory=list)
    """``SOURCE:TARGET`` folders beside the working directory and the run root."""

    @model_validator(mode="after")
    def _image_where_needed(self) -> Self:
        if (self.kind == "none") != (self.image is None):
            raise ValueError("container.image is needed by, and only by, kind: pyxis and apptainer")
        return self


class SlurmSettings(Section):
    """The batch job.  Null leaves an option to the site's default."""

    partition: SbatchValue | None = None
    account: SbatchValue | None = None
    qos: SbatchValue | None = None
    time: TimeLimit = None
    """Minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``; the job comes back after it."""
    gpus_per_node: NonNegative | None = None
    """Null: ``placement.devices_per_node`` where the device is cuda, else none."""
    cpus_per_task: Positive | None = None
    """CPU cores a node, where nodes are shared."""
    mem: SbatchValue | None = "0"
    """Memory a node; ``0`` is all of it."""
    exclusive: bool = True
    """No other job on the nodes."""
    constraint: SbatchValue | None = None
    reservation: SbatchValue | None = None
    exclude: SbatchValue | None = None
    """Nodes to stay away from, in SLURM's notation."""
    mail_user: SbatchValue | None = None
    mail_type: SbatchValue | None = None
    extra_sbatch: list[ExtraOption] = Field(default_factory=list)
    """Further ``--option=value`` lines."""
    srun_args: list[OneLine] = Field(default_factory=list)
    """Further words for srun."""
    modules: list[OneLine] = Field(default_factory=list)
    """Environment modules to load before anything else."""
    container: ContainerSettings = ContainerSettings()
    python: OneLine | None = None
    """Interpreter of the job; null: that of the launcher, ``.venv/bin/python``, or ``python3``."""
    signal_lead_s: Positive | None = None
    """Seconds before the time limit at which the job stops and commits; null: twice the commit
    time measured in this run."""
    interface: OneLine | None = None
    """Network interface of the job's own traffic; null: the one that the node's name resolves to."""
    health_command: OneLine | None = None
    """Shell command that has to succeed on every node at each start; else the node is excluded."""
    start_timeout_s: Seconds = 300.0
    """How long the first node waits for the others."""
