"""The settings of one environment of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from orhpc.config.base import Machines, Positive, Seconds, Section
from orhpc.config.data import DataSettings

if TYPE_CHECKING:
    from pathlib import Path

    from orhpc.config import RolloutSettings

BUNDLED: dict[str, str] = {
    "arithmetic": "orhpc.environments.arithmetic:Arithmetic",
    "letters": "orhpc.environments.letters:Letters",
    "reasoning-gym": "orhpc.environments.gym:ReasoningGym",
    "treasure": "orhpc.environments.treasure:Treasure",
}
"""Environments that come with the package, by their name in ``environments.NAME.serve``."""

PROMPTS = "orhpc.environments.prompts:Prompts"
"""The environment class of ``environments.NAME.data``."""

OF_ROLLOUT = (
    "n_samples",
    "max_response_tokens",
    "max_total_tokens",
    "system_prompt_template",
    "thinking",
    "tool_timeout_s",
)
"""Settings of ``rollout`` that an environment may override."""


class EnvironmentSettings(Section):
    """One OpenReward environment; its key is ``Organization/Name``, or any name with ``url`` or ``serve``."""

    url: str | None = None
    """Base URL of a running environment server. Null: looked up in OpenReward's service, unless ``serve`` is
    set."""
    serve: str | None = None
    """Environment that the job itself serves: ``package.module:Class``, or a bundled name (``arithmetic``,
    ``letters``, ``reasoning-gym``, ``treasure``). Null: the environment is served elsewhere."""
    serve_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment class of ``serve``."""
    data: DataSettings | None = None
    """Prompts from a file or dataset, judged by a verifier, instead of an environment of your own. Null:
    none."""
    replicas: Machines | None = None
    """Server processes per node with ``serve`` or ``data``, at most ``rollout.workers_per_node``. Null: one
    for every 64 rollouts that a node is expected to have in flight, at most one for every four CPU cores."""
    variant: str | None = None
    """Name of the environment class on a server with several. Null: the server has only one."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Relative share of training tasks that are drawn from this environment. 0: it is used for evaluation
    only."""
    splits: list[str] = Field(default_factory=lambda: ["train"])
    """Task splits to draw training tasks from. ``[]``: the environment is used for evaluation only."""
    num_samples: Positive | None = None
    """Maximum number of tasks per split. Null: all."""
    order: Literal["shuffled", "easy_first"] = "shuffled"
    """Order of the training tasks in the first epoch. ``easy_first``: from the first task to the last, each
    moved at random by at most a tenth of the epoch, for tasks that are sorted by difficulty
    (``data.difficulty``). Later epochs are shuffled."""
    nonterminal_reward: float | None = None
    """Additional step reward of a rollout that did not reach a terminal state. Null: none."""
    reward_reduction: Literal["sum", "mean", "max", "min"] = "sum"
    """How the step rewards of a rollout are reduced to its reward, which is 0.0 if there are none."""
    min_reward: float | None = None
    """Lower bound to which the reduced reward is clamped. Null: no bound."""
    max_reward: float | None = None
    """Upper bound to which the reduced reward is clamped. Null: no bound."""
    max_turns: Positive = 20
    """Maximum number of assistant turns per rollout."""
    n_samples: Positive | None = None
    """Rollouts per prompt group of this environment. Null: ``rollout.n_samples``. With another value a step
    trains on more or fewer samples than ``train.global_batch_size``, divided evenly over its mini-batches."""
    max_response_tokens: Positive | None = None
    """Maximum number of tokens per generation call. Null: ``rollout.max_response_tokens``."""
    max_total_tokens: Positive | None = None
    """Maximum number of tokens of one rollout, at most ``rollout.max_total_tokens``. Null: that setting."""
    system_prompt_template: str | None = None
    """System message. Null: ``rollout.system_prompt_template``."""
    thinking: bool | None = None
    """Use the chat format's thinking mode. Null: ``rollout.thinking``."""
    tool_timeout_s: Seconds | None = None
    """Timeout of one tool call, in seconds. Null: ``rollout.tool_timeout_s``."""
    parallel_calls: Positive = 1
    """Maximum number of tool calls of one turn that run concurrently. 1: sequentially. The model reads their
    results in the order of its calls. An OpenReward server still runs calls of the same tool sequentially
    unless the tool is declared ``concurrent``; the waiting time counts toward the timeout of a call."""
    replay_calls: bool = True
    """After a restart of the run, repeat the tool calls of an unfinished rollout in a new session, so that it
    goes on from its own tokens; if an answer differs from the recorded one, the rollout is generated again.
    Takes effect with ``rollout.partial`` or ``rollout.max_staleness`` above 0. Set it to false if calls must
    not be repeated, because they change something outside of their session, or if their answers differ each
    time, as those of a web search."""
    nudge: str | None = None
    """User message that is sent after an answer without a tool call, so that the model continues. Null: such
    an answer ends the rollout."""
    max_nudges: Positive = 1
    """Maximum number of nudges per rollout. The next answer without a tool call ends the rollout."""
    toolset: str | None = None
    """Name of a built-in toolset of OpenReward, offered in addition to the environment's tools. Null:
    none."""
    max_opening: Positive = 64
    """Maximum number of sessions that one rollout worker opens concurrently. Others wait; the timeout does
    not count the wait."""
    max_answer_mb: Annotated[float, Field(gt=0, le=1000)] = 16.0
    """Maximum size of one answer of the environment, in megabytes (10^6 bytes) after decompression. A larger
    answer fails the rollout."""
    secrets: dict[str, str | None] = Field(default_factory=dict)
    """Secrets that the environment receives, as name and source. Null: the environment variable of that name
    in upper case. ``env:NAME``: another environment variable. ``file:PATH``: a file of mode 0600. Never
    write the value of a secret in a config."""

    def apply_to(self, rollout: RolloutSettings) -> RolloutSettings:
        """Return the rollout settings with this environment's overrides applied."""
        return rollout.model_copy(
            update={name: value for name in OF_ROLLOUT if (value := getattr(self, name)) is not None}
        )

    @property
    def is_served(self) -> bool:
        """Whether the job itself serves the environment."""
        return self.serve is not None or self.data is not None

    def served(self, data: Path) -> tuple[str, dict[str, Any]]:
        """Class and options of an environment that the job serves; ``data``: folder of its task files."""
        if self.data is not None:
            return PROMPTS, {"folder": str(data), "data": self.data.model_dump(mode="json")}
        assert self.serve is not None
        return self.serve, self.serve_options

    @property
    def trains(self) -> bool:
        """Whether training tasks are drawn from this environment."""
        return bool(self.splits) and self.weight > 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.url is not None:
            check_server_url(self.url)
        if sum(map(bool, (self.url, self.serve, self.data))) > 1:
            raise ValueError("url, serve and data exclude each other")
        if self.serve_options and not self.serve:
            raise ValueError("serve_options need serve")
        if None not in (self.min_reward, self.max_reward) and self.min_reward > self.max_reward:  # type: ignore[operator]
            raise ValueError("min_reward is above max_reward")
        check_secret_sources(self.secrets)
        return self


def check_server_url(url: str) -> str:
    """Return the host of a server's URL; raises ValueError, without repeating a password, if it is
    invalid."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"url is not a URL: {error}") from None
    if "@" in url:
        raise ValueError("url contains a user name or a password; use secrets instead")
    if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"url {url!r} is not http://HOST:PORT or https://HOST")
    return host


def check_secret_sources(secrets: dict[str, str | None]) -> None:
    """Raise ValueError for a secret whose source is not null, ``env:NAME`` or ``file:PATH``."""
    for name, source in secrets.items():
        if source is not None and not source.startswith(("env:", "file:")):
            raise ValueError(f"secret {name!r} must be null, env:NAME or file:PATH, never the value itself")
