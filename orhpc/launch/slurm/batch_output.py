"""SLURM's own lines in a batch script's output, which show more than ``scontrol``.

A job that is preempted without grace time is requeued at once, and ``scontrol`` shows only the requeue;
slurmstepd's line names the preemption.  srun's lines name the tasks that ended, and their exit status.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO (.+?) \*\*\*")
_TASK_ENDED = re.compile(r"^srun: error: (\S+: tasks? [\d,-]+: .+)$", re.MULTILINE)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_FROM_OUTSIDE = re.compile(r"\b(Killed|Terminated)\b")


class BatchOutput:
    """The part of the output that is written after this object is created."""

    def __init__(self, path: Path | None) -> None:
        """``path``: file of the batch script's output; None or no such file if it is not known."""
        self._path = path if path is not None and path.is_file() else None
        self._begin = self._path.stat().st_size if self._path is not None else 0

    @property
    def known(self) -> bool:
        """Whether the output can be read here; a container may not have it mounted."""
        return self._path is not None

    def preempted(self) -> bool:
        """Whether SLURM names a preemption as the reason for the end."""
        return any(why == "PREEMPTION" for why in _CANCELLED.findall(self._text()))

    def ended_tasks(self) -> EndedTasks:
        """The tasks that srun reported as ended with a status other than 0."""
        return EndedTasks(tuple(_TASK_ENDED.findall(self._text())))

    def _text(self) -> str:
        if self._path is None:
            return ""
        with self._path.open("rb") as stream:
            stream.seek(self._begin)
            return stream.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class EndedTasks:
    """srun's lines about tasks, such as ``n1: task 1: Exited with exit code 3``."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.lines)

    @property
    def exit_codes(self) -> set[int]:
        return {int(code) for line in self.lines for code in _EXIT_CODE.findall(line)}

    @property
    def out_of_memory(self) -> bool:
        return any("Out Of Memory" in line for line in self.lines)

    @property
    def killed_from_outside(self) -> bool:
        """Whether every task was ended by SIGKILL or SIGTERM, which indicates an external cause."""
        return bool(self.lines) and all(_FROM_OUTSIDE.search(line) for line in self.lines)
