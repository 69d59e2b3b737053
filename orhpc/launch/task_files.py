"""The task files of a run's ``data`` environments: written once, before the first attempt."""

from __future__ import annotations

import json
from collections.abc import Callable

from orhpc.config import Config
from orhpc.launch.model import make_folder
from orhpc.rundir import RunDir


def ensure(config: Config, rundir: RunDir, stopped: Callable[[], bool] = lambda: False) -> None:
    """Write the task files that are not there, or were written with other settings.

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
    for name, settings in config.environments.items():
        if settings.data is None:
            continue
        folder, wanted = rundir.data_of(name), settings.data.source()
        written = folder / "source.json"
        if written.is_file() and json.loads(written.read_text()) == wanted:
            continue
        words = ["--settings-json", settings.data.model_dump_json(), "--folder", str(folder)]
        make_folder("orhpc.data.task_file", [*words, "--setting", f"environments.{name}.data"], stopped)
