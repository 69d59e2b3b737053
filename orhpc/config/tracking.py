"""The sections ``tracking``, ``wandb``, ``tensorboard`` and ``mlflow``: where a run's metrics go."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from orhpc.config.base import Name, Number, Positive, Section
from orhpc.config.environment import check_secret_sources

Experiment = Annotated[Name, Field(max_length=200)]
Samples = Annotated[int, Number, Field(ge=0, le=100)]


class TrackingSettings(Section):
    """What W&B, TensorBoard and MLflow get of the rollouts, in addition to the metrics of a step."""

    samples: Samples = 4
    """Rollouts per step in a table with prompt, answer, reward and advantage. They are spread evenly from the
    lowest to the highest reward. 0: no table."""
    histograms: bool = True
    """Histograms of rewards, advantages, response lengths, and log-probability differences between trainer
    and engine."""
    interval: Positive = 1
    """Steps between two tables and histograms. Metrics are written for every step."""


class WandbSettings(Section):
    """Weights & Biases. Without WANDB_API_KEY it logs offline. Its failures never stop a run."""

    enabled: bool = True
    """Whether the run is logged to W&B."""
    project: Name = "orhpc"
    """W&B's project."""
    entity: Name | None = None
    """W&B's user or team. Null: the key's default."""
    group: Name | None = None
    """W&B's group of runs."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run in W&B."""


class TensorboardSettings(Section):
    """TensorBoard: event files in ``RUN/tensorboard``. Needs the package tensorboard."""

    enabled: bool = False
    """Whether the run is logged to TensorBoard files."""


class MlflowSettings(Section):
    """An MLflow tracking server. Needs the package mlflow-skinny. Its failures never stop a run."""

    enabled: bool = False
    """Whether the run is logged to an MLflow server."""
    uri: str | None = None
    """Address of the server: ``https://HOST``, ``http://HOST:PORT``, or ``databricks``. Null: the environment
    variable ``MLFLOW_TRACKING_URI``."""
    experiment: Experiment = "orhpc"
    """Experiment of the run; it is created if it does not exist."""
    token: str | None = None
    """Source of the access token: ``env:NAME`` or ``file:PATH`` (mode 0600). Null: MLflow's own variables,
    such as ``MLFLOW_TRACKING_TOKEN``."""

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if self.uri is not None:
            check_tracking_uri(self.uri)
        if self.token is not None:
            check_secret_sources({"mlflow.token": self.token})
        return self


def check_tracking_uri(uri: str) -> None:
    """Raise ValueError, without repeating a password, for a URI that is no MLflow server's."""
    if uri == "databricks" or uri.startswith("databricks://"):
        return
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"uri is not a URL: {error}") from None
    if "@" in uri:
        raise ValueError("uri contains a user name or a password; use mlflow.token or MLflow's variables")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ValueError(f"uri {uri[:100]!r} is not http://HOST:PORT, https://HOST or databricks")
