"""Check that the enabled trackers can be used: their packages, and the address of MLflow's server."""

from __future__ import annotations

import importlib.util
import os

from orhpc.config import Config
from orhpc.config.tracking import check_tracking_uri
from orhpc.errors import ConfigError


def check(config: Config) -> str:
    """Check the trackers of a config, without contacting a server.

    Raises:
        ConfigError: a package is missing, or MLflow has no server.
    """
    enabled = {"tensorboard": config.tensorboard.enabled, "mlflow": config.mlflow.enabled}
    if config.mlflow.enabled and config.mlflow.uri is None:
        check_tracking_variable()
    if config.slurm.container.kind == "none" and config.slurm.python is None:
        for name, wanted in enabled.items():
            if wanted and importlib.util.find_spec(name) is None:
                raise ConfigError(f"{name}.enabled: the package is missing; pip install 'orhpc[{name}]'")
    names = ["wandb"] if config.wandb.enabled else []
    return ", ".join(names + [name for name, wanted in enabled.items() if wanted]) or "none is enabled"


def check_tracking_variable() -> None:
    """Raise ConfigError, without repeating a password, if MLFLOW_TRACKING_URI names no MLflow server."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise ConfigError("mlflow.uri: name a tracking server here or in MLFLOW_TRACKING_URI")
    if not uri.startswith("file:"):  # a folder, which only old releases of MLflow write without a switch
        try:
            check_tracking_uri(uri)
        except ValueError as error:
            raise ConfigError(f"MLFLOW_TRACKING_URI: {error}") from None
