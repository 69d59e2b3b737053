"""What SLURM itself writes into a batch script's output, where it says more than ``scontrol`` does.

A job that is preempted without grace time is requeued at once, and ``scontrol`` shows nothing but that;
slurmstepd's line names the preemption.  srun's lines name the tasks that ended, and how.
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
    """The part of the output that this start of the job has written, from when this is made."""

    def __init__(self, path: Path | None) -> None:
        """``path``: where the batch script's output goes; None or no file where that is not known."""
        self._path = path if path is not None and path.is_file() else None
        self._begin = self._path.stat().st_size if self._path is not None else 0

    @property
    def known(self) -> bool:
        """Whether it can be read here; a container may not see it."""
        return self._path is not None

    def preempted(self) -> bool:
        """Whether SLURM names a preemption as the reason for the end."""
        return any(why == "PREEMPTION" for why in _CANCELLED.findall(self._text()))

    def ended_tasks(self) -> EndedTasks:
        """The tasks that srun saw end otherwise than with exit code 0."""
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
        """Whether each was ended by SIGKILL or SIGTERM, which no fault of its own sends."""
        return bool(self.lines) and all(_FROM_OUTSIDE.search(line) for line in self.lines)
