"""The section ``notify``: messages about a run to a webhook."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orhpc.config.base import Number, Seconds, Section
from orhpc.config.environment import check_secret_sources

Occasion = Literal["start", "end", "alarm", "gap"]


class NotifySettings(Section):
    """Messages about a run to a webhook, such as Slack's. For mail, see ``slurm.mail_user``."""

    webhook: str | None = None
    """Source of the URL that receives each message as a JSON object by POST: ``env:NAME`` or ``file:PATH``
    (mode 0600). The URL is a secret and is never written into a config. Null: no messages. A webhook that
    fails never stops a run."""
    events: list[Occasion] = Field(default_factory=lambda: ["start", "end", "alarm", "gap"])
    """``start``: an attempt is ready to train. ``end``: an attempt finished, stopped or failed. ``alarm``: a
    threshold of ``alarms`` was crossed. ``gap``: no step for unusually long."""
    gap_factor: Annotated[float, Number, Field(gt=1, le=1000)] = 5.0
    """A gap is reported after this multiple of the usual time between steps (median of the last 20)."""
    gap_at_least_s: Seconds = 600.0
    """Shortest gap that is reported, in seconds."""

    @model_validator(mode="after")
    def _valid(self) -> Self:
        if self.webhook is not None:
            check_secret_sources({"notify.webhook": self.webhook})
        return self

    @property
    def active(self) -> bool:
        """Whether any message would be sent."""
        return self.webhook is not None and bool(self.events)
