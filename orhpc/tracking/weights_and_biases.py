"""Weights & Biases.  All attempts continue one W&B run, whose id is kept in the run directory."""

from __future__ import annotations

import logging
import netrc
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit

from orhpc.config import Config
from orhpc.rundir import RunDir, write_atomic
from orhpc.tracking.details import COLUMNS, Details
from orhpc.tracking.rows import NO_STEP, Marks, Row

log = logging.getLogger(__name__)
_START_S = 60.0
"""Seconds to wait for W&B's server."""
_CREATING = threading.Lock()


class WeightsAndBiases:
    """Logs to the run's W&B run: online with a key in the environment, else offline in ``RUN/wandb``."""

    name, key, durable = "W&B", "wandb", False

    def __init__(
        self, config: Config, rundir: RunDir, *, must_be_online: bool = False, warn: Callable[[str], object]
    ) -> None:
        """``must_be_online``: raise if the server does not answer, instead of logging offline."""
        self._config, self._rundir, self._warn = config, rundir, warn
        self._must_be_online = must_be_online
        self._mode: Literal["online", "offline"] = "offline"
        self._run: Any = None
        self._stored = NO_STEP
        """The server's newest step when this attempt connected; it refuses more rows of this step."""
        self._continues = False
        """Whether that is the step from which this attempt continues."""

    @property
    def target(self) -> str:
        w = self._config.wandb
        return f"online {w.entity or ''}/{w.project}" if self._mode == "online" else "offline"

    def open(self) -> Marks:
        """Start W&B.  Rows that an earlier attempt sent to the server are not sent again."""
        wanted = has_key() and _mode() not in ("offline", "dryrun")
        if wanted or self._must_be_online:
            self._mode = "online"
            try:
                return self._start()
            except Exception as error:
                if self._must_be_online:
                    raise
                reason = " ".join(str(error).split())[:300]
                self._warn(
                    f"W&B does not answer ({reason}); its data are stored, and "
                    f"`orhpc sync {self._rundir.path}` sends them"
                )
                self._leave()
        self._mode = "offline"
        return self._start()

    def _start(self) -> Marks:
        import wandb  # takes two seconds, and only the tracker's thread needs it

        w, rundir = self._config.wandb, self._rundir
        self._run = wandb.init(
            project=w.project,
            entity=w.entity,
            group=w.group,
            tags=w.tags,
            name=self._config.run.name,
            id=run_id(rundir),
            resume="allow",
            dir=str(rundir.path),
            mode=self._mode,
            config=self._config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=_START_S),
        )
        self._stored = int(getattr(self._run, "starting_step", 0) or 0) - 1
        return Marks(self._stored, self._stored)

    def _leave(self) -> None:
        """End W&B's service, which still holds the run's id after a failed start."""
        import wandb

        wandb.teardown()

    def resume(self, marks: Marks) -> None:
        """W&B merges rows of one step until the run ends, and then refuses all but those of later steps."""
        self._continues = marks.step == self._stored

    def write(self, row: Row, details: Details | None) -> None:
        values: dict[str, Any] = dict(row.metrics)
        if details is not None:
            import wandb

            values |= {name: wandb.Histogram(found.tolist()) for name, found in details.histograms.items()}
            if details.samples:
                samples: Any = details.samples
                values["samples"] = wandb.Table(columns=list(COLUMNS), data=samples)
        # An attempt that was stopped during an evaluation has only stored the step's own row.
        late = row.evaluation and self._continues and row.step == self._stored
        self._run.log(values, step=row.step + late)

    def alert(self, text: str, step: int) -> None:
        self._run.alert(title="orhpc", text=text, wait_duration=600)

    def close(self, end: str) -> None:
        self._run.finish()


def switched_off() -> bool:
    """Whether the environment switches W&B off, whatever the config says."""
    return _mode() == "disabled"


def _mode() -> str:
    return os.environ.get("WANDB_MODE", "").lower()


def has_key() -> bool:
    """Whether the environment has W&B's key."""
    return bool(os.environ.get("WANDB_API_KEY"))


def can_log_in() -> bool:
    """Whether W&B finds a key: in the environment, or where ``wandb login`` stores it."""
    if has_key():
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(rundir: RunDir) -> str:
    """The W&B id of a run: created once, then the same for every attempt."""
    path = rundir.path / "wandb_id"
    with _CREATING:  # MLflow's thread asks for it too, and both must get the same
        if not path.exists():
            write_atomic(path, secrets.token_hex(8))
        return path.read_text().strip()
