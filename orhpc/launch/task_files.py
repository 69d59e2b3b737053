"""The task files of a run: those of its ``data`` environments and the copy of ``rollout.task_file``.

Both are written once, before the first step: a resumed run has the same tasks, whatever happens to their
sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from orhpc.config import Config
from orhpc.config.data import DataSettings
from orhpc.data.prepared_tasks import listed_tasks
from orhpc.data.task_file import STATES, states_of
from orhpc.launch.model import make_folder
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import has_begun


def ensure(config: Config, rundir: RunDir, stopped: Callable[[], bool] = lambda: False) -> None:
    """Write the task files that are not there, or were written with other settings.

    Before the run's first step they are also written again if a file of their source has changed, since the
    user corrects a file whose rows have failed and repeats the command.

    Args:
        config: of the run.
        rundir: the run directory; it exists.
        stopped: polled while a dataset is read.

    Raises:
        ConfigError: a source or a column is missing, or a row cannot be used.
        HubUnreachable: the hub is needed and cannot be reached from this machine.
        PreflightError: a package is missing here, or the hub keeps failing.
        StopRequested: ``stopped`` returned True.
    """
    if config.rollout.task_file is not None and not (rundir.task_file.exists() and has_begun(rundir)):
        copy = Path(config.rollout.task_file)
        listed_tasks(config, copy)
        write_atomic(rundir.task_file, copy.read_text(encoding="utf-8"))
    for name, settings in config.environments.items():
        if settings.data is None:
            continue
        folder, wanted = rundir.data_of(name), settings.data.source()
        written = folder / "source.json"
        if written.is_file():
            made_from = json.loads(written.read_text())
            states = made_from.pop(STATES, None)
            if made_from == wanted and (has_begun(rundir) or not _changed(settings.data, states)):
                continue
            rundir.discard_buffer()  # rollouts of tasks that may be gone
        words = ["--settings-json", settings.data.model_dump_json(), "--folder", str(folder)]
        make_folder("orhpc.data.task_file", [*words, "--setting", f"environments.{name}.data"], stopped)


def _changed(settings: DataSettings, states: dict[str, list[int]] | None) -> bool:
    """Whether a source is on this machine and has other files than those that were read."""
    now = states_of(settings)
    return states is not None and bool(now) and now != states
