"""Send the rows of a run that its trackers do not have: ``python -m orhpc.tracking RUN``.

A process of its own, because ``orhpc sync`` must not load the trackers' packages.  Each tracker is one line;
a tracker that has everything is left alone, so the command can be repeated.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orhpc.config import Config
from orhpc.config.files import load_config, validate
from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT, ConfigError, OrhpcError, PreflightError, policy_of
from orhpc.launch.checks.trackers import check_tracking_variable
from orhpc.process.secrets import redact
from orhpc.process.terminal import protect_process, safe
from orhpc.rundir import RunDir
from orhpc.rundir.events import each_event, last_events
from orhpc.tracking.backend import Backend, read_marks
from orhpc.tracking.details import DetailsReader
from orhpc.tracking.feed import Feed
from orhpc.tracking.mlflow import Mlflow, tracking_uri
from orhpc.tracking.rows import rows_after
from orhpc.tracking.tensorboard import FOLDER, Tensorboard
from orhpc.tracking.weights_and_biases import WeightsAndBiases, can_log_in


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if every tracker has all rows, 2 for a wrong setting, 3 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m orhpc.tracking")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--mlflow", metavar="URI")
    options = parser.parse_args(arguments)
    rundir = RunDir(options.run_dir)
    try:
        config = _with_options(load_config(rundir.config), options.tensorboard, options.mlflow)
        protect_process(*config.secret_sources)
        backends = list(_backends(config, rundir))
    except OrhpcError as error:
        print(f"orhpc: {safe(' '.join(str(error).split()))}", file=sys.stderr)
        return policy_of(error).exit_code
    if not backends:
        print(f"{rundir.path}: no tracker is enabled in its config; see --tensorboard and --mlflow")
    return max((_send(backend, config, rundir) for backend in backends), default=EXIT_OK)


def _with_options(config: Config, tensorboard: bool, mlflow: str | None) -> Config:
    """The run's config with the trackers that the command line adds.

    Raises:
        ConfigError: the URI is not a server's.
    """
    tree: dict[str, Any] = config.model_dump(mode="json")
    if tensorboard:
        tree["tensorboard"]["enabled"] = True
    if mlflow is not None:
        tree["mlflow"] |= {"enabled": True, "uri": mlflow}
    return validate(tree, "--mlflow")


def _backends(config: Config, rundir: RunDir) -> Iterator[Backend]:
    if config.wandb.enabled:
        yield WeightsAndBiases(config, rundir, must_be_online=True, warn=print)
    if config.tensorboard.enabled:
        yield Tensorboard(rundir)
    if config.mlflow.enabled:
        if not tracking_uri(config):
            raise ConfigError("mlflow.uri: name a tracking server with --mlflow or in MLFLOW_TRACKING_URI")
        if config.mlflow.uri is None:
            check_tracking_variable()  # the address is stored with the marks: it must have no password
        yield Mlflow(config, rundir)


def _send(backend: Backend, config: Config, rundir: RunDir) -> int:
    """Send what one tracker lacks, print a line about it, and return the exit code."""
    feed = Feed(backend, rundir, DetailsReader(rundir, config.tracking))
    try:
        _require(backend)
        count = 0
        # Without a look at the marks, every call would leave an empty file of TensorBoard.
        known = read_marks(rundir, backend.key, backend.target)
        if not backend.durable or rows_after(known, each_event(rundir.events)):
            count = feed.sync()
            events = last_events(rundir.events)
            feed.close(str(events[-1]["event"]) if events else "")
    except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises
        reason = redact(" ".join(str(error).split()))[:300] or type(error).__name__
        print(safe(f"{rundir.path}: {backend.name}: failed: {reason}"), file=sys.stderr)
        return EXIT_PREFLIGHT
    what = f"{count} rows sent" if count else "has every row already"
    where = {"tensorboard": f" (tensorboard --logdir {rundir.path / FOLDER})"}.get(backend.key, "")
    print(safe(f"{rundir.path}: {backend.name}: {what}{where}"))
    return EXIT_OK


def _require(backend: Backend) -> None:
    """Raise PreflightError if a tracker cannot be reached without asking the user for a key."""
    if backend.key != "wandb":
        return
    if not can_log_in():
        raise PreflightError("WANDB_API_KEY is not set here, and `wandb login` has stored no key")
    if os.environ.get("WANDB_MODE", "online") != "online":
        raise PreflightError(f"WANDB_MODE is {os.environ['WANDB_MODE']}; unset it")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a tracker's own threads may wait for a server that is away
