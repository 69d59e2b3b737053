"""The settings of one environment of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from orhpc.config.base import Machines, Positive, Seconds, Section

if TYPE_CHECKING:
    from orhpc.config import RolloutSettings

BUNDLED: dict[str, str] = {
    "arithmetic": "orhpc.environments.arithmetic:Arithmetic",
    "letters": "orhpc.environments.letters:Letters",
    "reasoning-gym": "orhpc.environments.gym:ReasoningGym",
    "treasure": "orhpc.environments.treasure:Treasure",
}
"""Environments that come with the package, by the name that ``environments.NAME.serve`` gives them."""

OF_ROLLOUT = (
    "n_samples",
    "max_response_tokens",
    "max_total_tokens",
    "system_prompt_template",
    "thinking",
    "tool_timeout_s",
)
"""Settings of ``rollout`` that an environment may have its own values of."""


class EnvironmentSettings(Section):
    """One OpenReward environment; the key is ``Organisation/Name``, or any name with ``url``."""

    url: str | None = None
    """Base URL of a server; null: resolved by OpenReward's service."""
    serve: str | None = None
    """The job serves it itself: ``package.module:Class`` or a bundled name."""
    serve_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword settings of a served environment."""
    replicas: Machines | None = None
    """Server processes a node when served by the job, at most one a rollout worker; null: one for every 64
    rollouts that a node is expected to have in flight, on at most a quarter of its cores."""
    variant: str | None = None
    """Environment class on a server with several, as the server spells it."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Share of training tasks drawn from it, relative to the others'; 0: none, it is for evaluation only."""
    splits: Annotated[list[str], Field(default_factory=lambda: ["train"])]
    """Task splits to draw training tasks from; ``[]``: the environment is for evaluation only."""
    num_samples: Positive | None = None
    """Cap on tasks a split; null: all."""
    nonterminal_reward: float | None = None
    """Appended when the rollout never reached a terminal state."""
    reward_reduction: Literal["sum", "mean", "max", "min"] = "sum"
    """Of step rewards; of none it gives 0.0."""
    min_reward: float | None = None
    """Clamp, after reduction."""
    max_reward: float | None = None
    max_turns: Positive = 20
    """Assistant turns a rollout."""
    n_samples: Positive | None = None
    """Rollouts a prompt group of this environment; null: ``rollout.n_samples``.  A step then trains on
    more or fewer samples than ``train.global_batch_size``, divided evenly over its mini-batches."""
    max_response_tokens: Positive | None = None
    """Tokens of one generation call; null: ``rollout.max_response_tokens``."""
    max_total_tokens: Positive | None = None
    """Tokens of one rollout; null: ``rollout.max_total_tokens``, which it may not exceed."""
    system_prompt_template: str | None = None
    """System message; null: ``rollout.system_prompt_template``."""
    thinking: bool | None = None
    """The chat format's thinking mode; null: ``rollout.thinking``."""
    tool_timeout_s: Seconds | None = None
    """Deadline of one tool call; null: ``rollout.tool_timeout_s``."""
    parallel_calls: Positive = 1
    """Tool calls of one turn that run at the same time; 1: one after the other.  The model reads their
    results in the order of its calls.  An OpenReward server still runs calls of the same tool one after
    the other, unless the tool is declared ``concurrent``; such waits count for a call's deadline."""
    nudge: str | None = None
    """User message sent after a plain answer that no tool takes, so that the model goes on; null: such an
    answer ends the rollout."""
    max_nudges: Positive = 1
    """Nudges a rollout; a plain answer after the last one ends it."""
    toolset: str | None = None
    """Name of a built-in toolset of OpenReward that sessions offer in addition to the environment's tools."""
    max_opening: Positive = 64
    """Sessions that one rollout worker opens at a time; others wait their turn, without a deadline."""
    max_answer_mb: Annotated[float, Field(gt=0, le=1000)] = 16.0
    """Megabytes (10^6 bytes, after decompression) that one answer of the environment may have; a rollout
    whose environment sends more fails."""
    secrets: dict[str, str | None] = Field(default_factory=dict)
    """Name to source: null reads the environment variable of that name in upper case, ``env:NAME``
    another one, ``file:PATH`` a file of mode 0600.  Values never stand here."""

    def over(self, rollout: RolloutSettings) -> RolloutSettings:
        """Return the rollout settings with this environment's own values in their places."""
        return rollout.model_copy(
            update={name: value for name in OF_ROLLOUT if (value := getattr(self, name)) is not None}
        )

    @property
    def trains(self) -> bool:
        """Whether training tasks are drawn from it."""
        return bool(self.splits) and self.weight > 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.url is not None:
            check_server_url(self.url)
        if self.url and self.serve:
            raise ValueError("url and serve exclude each other")
        if self.serve_options and not self.serve:
            raise ValueError("serve_options need serve")
        if None not in (self.min_reward, self.max_reward) and self.min_reward > self.max_reward:  # type: ignore[operator]
            raise ValueError("min_reward is above max_reward")
        check_secret_sources(self.secrets)
        return self


def check_server_url(url: str) -> str:
    """Return the host of a server's URL; raises ValueError, which repeats no password, for any other text."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"url is no URL: {error}") from None
    if "@" in url:
        raise ValueError("url holds a user name or a password; they never stand in a config; use secrets")
    if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"url {url!r} is not http://HOST:PORT or https://HOST")
    return host


def check_secret_sources(secrets: dict[str, str | None]) -> None:
    """Raises ValueError for a secret whose source is neither null, ``env:NAME`` nor ``file:PATH``."""
    for name, source in secrets.items():
        if source is not None and not source.startswith(("env:", "file:")):
            raise ValueError(
                f"secret {name!r} must be null, env:NAME or file:PATH; values never stand in a config"
            )
