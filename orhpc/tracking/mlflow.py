"""MLflow: one run of a tracking server for all attempts, found again by a tag.

Metrics carry the time of their event, so that a server with a database stores a repeated row once.  MLflow
has no histograms: quantiles are metrics, and the counts a JSON file of the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from orhpc.config import Config
from orhpc.config.files import leaves
from orhpc.process.secrets import resolve_secrets
from orhpc.rundir import RunDir
from orhpc.tracking.details import COLUMNS, Details
from orhpc.tracking.rows import Marks, Row
from orhpc.tracking.weights_and_biases import run_id

_TAG = "orhpc.id"
_SETTINGS = {
    # Their defaults let one call wait for many minutes; we retry ourselves.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # Compute nodes must not contact servers that the user has not named.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_OTHER_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_MOST_METRICS = 900
_MOST_PARAMS = 100
"""Limits of one call of MLflow's REST API: 1000 metrics, 100 parameters."""
_MOST_CHARACTERS = 500
"""Of a parameter's value: the oldest limit of MLflow's servers."""
_BINS = 30
_QUANTILES = (0.05, 0.5, 0.95)
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}


class Mlflow:
    """Logs to one run of the server."""

    name, key, durable = "MLflow", "mlflow", True

    def __init__(self, config: Config, rundir: RunDir) -> None:
        self._config, self._rundir = config, rundir
        self._client: Any = None
        self._run = ""
        self._tables: list[dict[str, str]] = []

    @property
    def target(self) -> str:
        return f"{tracking_uri(self._config)} {self._config.mlflow.experiment} {self._run}"

    def open(self) -> Marks:
        """Connect to the server, and create or find the run."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        if self._config.mlflow.token is not None:
            values = resolve_secrets({"mlflow.token": self._config.mlflow.token}, {})
            os.environ["MLFLOW_TRACKING_TOKEN"] = values["mlflow.token"]
            for name in _OTHER_LOGIN:
                os.environ.pop(name, None)  # MLflow would prefer them
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=tracking_uri(self._config))
        name = self._config.mlflow.experiment
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{run_id(self._rundir)}'", max_results=1)
        self._run = found[0].info.run_id if found else self._create(number)
        self._tables = json.loads(found[0].data.tags.get("mlflow.loggedArtifacts", "[]")) if found else []
        self._write_settings(found[0].data.params if found else {})
        if found:
            self._client.update_run(self._run, status="RUNNING")
        return Marks()

    def _create(self, experiment: str) -> str:
        tags = {_TAG: run_id(self._rundir), "orhpc.run_directory": str(self._rundir.path)}
        created = self._client.create_run(experiment, run_name=self._config.run.name, tags=tags)
        return created.info.run_id

    def _write_settings(self, there: Mapping[str, str]) -> None:
        """Write the settings that the run lacks: an earlier call may have been its last, or written some.

        ``there``: those that it has, which MLflow does not let us change.
        """
        from mlflow.entities import Param

        settings = {_key(k): v for k, v in leaves(self._config.model_dump(mode="json"))}
        params = [Param(k, str(v)[:_MOST_CHARACTERS]) for k, v in settings.items() if k not in there]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + _MOST_PARAMS])

    def resume(self, marks: Marks) -> None:
        """Nothing to do: MLflow cannot remove points; of a repeated step it shows both."""

    def write(self, row: Row, details: Details | None) -> None:
        from mlflow.entities import Metric

        values = dict(row.metrics)
        if details is not None:
            values |= dict(_quantiles(details))
            self._write_files(row.step, details)
        time = int(row.time * 1000)
        metrics = [Metric(_key(name), value, time, row.step) for name, value in values.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_METRICS])

    def _write_files(self, step: int, details: Details) -> None:
        import numpy as np

        if details.histograms:
            counted = {n: np.histogram(v, _BINS) for n, v in details.histograms.items()}
            content = {n: {"counts": c.tolist(), "edges": e.tolist()} for n, (c, e) in counted.items()}
            self._client.log_dict(self._run, content, f"histograms/step_{step:06d}.json")
        if details.samples:
            path = f"samples/step_{step:06d}.json"
            self._client.log_dict(self._run, {"columns": list(COLUMNS), "data": details.samples}, path)
            if not any(table["path"] == path for table in self._tables):
                # The tag that mlflow.log_table sets: MLflow's pages show these files as tables.
                self._tables = [*self._tables, {"path": path, "type": "table"}][-20:]
                self._client.set_tag(self._run, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def alert(self, text: str, step: int) -> None:
        self._client.set_tag(self._run, "orhpc.last_alert", text[:_MOST_CHARACTERS])

    def close(self, end: str) -> None:
        self._client.set_terminated(self._run, _STATUS.get(end, "KILLED"))


def tracking_uri(config: Config) -> str:
    """The server's address: ``mlflow.uri``, or MLflow's own variable; empty without either."""
    return config.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI", "")


def _key(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)


def _quantiles(details: Details) -> Iterator[tuple[str, float]]:
    import numpy as np

    for name, values in details.histograms.items():
        for quantile, value in zip(_QUANTILES, np.quantile(values, _QUANTILES), strict=True):
            yield f"{name}_p{round(quantile * 100):02d}", float(value)
