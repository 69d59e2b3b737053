"""Settings of rollouts: how many, how they are sampled, and which of them are trained on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from orhpc.config.base import (
    Machines,
    Name,
    NonNegative,
    Positive,
    Seconds,
    Section,
    one_of_or_function,
)

GROUP_FILTERS = ("none", "equal_rewards")
"""Values of ``rollout.filter`` that are not functions."""


class RolloutSettings(Section):
    """How rollouts are generated."""

    batch_size: Positive = 32
    """Prompt groups per step."""
    n_samples: Positive = 16
    """Rollouts per prompt group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The trainer divides its logits by the same value."""
    top_p: float = 1.0
    """Must be 1: truncated sampling draws from a different policy than the one that is trained."""
    top_k: int = -1
    """Must be -1 (off), for the same reason."""
    min_p: float = 0.0
    """Must be 0 (off), for the same reason."""
    max_response_tokens: Positive = 4096
    """Maximum number of tokens sampled in one generation call (one assistant turn)."""
    max_total_tokens: Positive = 32768
    """Maximum number of tokens of one rollout, including the prompt and the environment's text."""
    max_images: NonNegative = 16
    """Maximum number of images of one rollout that the model is shown, if it sees images; a text takes the
    place of further ones. 0: none, as for models that do not see."""
    max_image_pixels: Positive = 1_003_520
    """Maximum number of pixels of an image as the model sees it; larger images are resized. An image has one
    token per 28 x 28 pixels (Qwen2.5-VL) or 32 x 32 (Qwen3-VL), which ``max_total_tokens`` includes."""
    thinking: bool = False
    """Use the chat format's thinking mode."""
    system_prompt_template: str | None = None
    """System message. ``{tools}`` is replaced by the tool descriptions; other braces are left unchanged.
    Null: the chat format's default text."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Oversampling factor: prompt groups started per step, relative to ``batch_size``. The step uses the
    first ``batch_size`` groups to finish. The others are started again in the next step or, with ``partial``,
    go on from the tokens that they have."""
    partial: bool = False
    """Carry groups that a step has started and not used over to the next step, also with ``max_staleness`` 0
    (above 0 they always are): those that have finished are trained on then, the others go on from their own
    tokens in their open environment sessions. The trained tokens may then be one policy version old; for
    older ones see ``stale_tokens``. Takes effect with ``oversample`` above 1."""
    max_carried_steps: Positive = 32
    """Steps across which an unfinished group is carried at most; the step after them waits until it has
    finished. It limits how old tokens become and how long environment sessions stay open."""
    filter: str = "none"
    """Which prompt groups are trained on. ``none``: all. ``equal_rewards``: drop groups whose rewards are all
    equal, which give no gradient, and start others in their place (dynamic sampling of DAPO,
    arXiv:2503.14476). ``package.module:function``: drop those for which the function of a
    ``orhpc.types.PromptGroup`` returns False."""
    max_refills: NonNegative = 3
    """Replacement groups that a step may start for filtered or failed ones, as a multiple of
    ``batch_size``."""
    max_staleness: NonNegative = 0
    """Maximum age of the tokens that are trained on, in policy versions. 0: synchronous training, with tokens
    of the current policy only unless ``partial`` is set; larger values let engines generate while the trainer
    trains."""
    stale_tokens: Literal["mask", "train", "regenerate"] = "mask"
    """What happens to older tokens: a long rollout that goes on across several weight syncs begins with them.
    ``mask``: they are left out of the loss, the rest of the rollout is trained on. ``train``: they are
    trained on too, so ``max_staleness`` only limits how many groups are started ahead. ``regenerate``: the
    group is generated again, once; long rollouts are then trained on less often than short ones. A group
    that has only older tokens is generated again in any case."""
    task_file: str | None = None
    """Task file that lists the tasks to train on, with their environments and splits, as ``orhpc
    prepare-tasks`` and OpenReward's ``prepare_tasks.py`` write it. The run keeps a copy. Null: all tasks of
    the environments' ``splits``."""
    workers_per_node: Machines | None = 4
    """Rollout worker processes per node. Null: one for every 128 rollouts that a node is expected to have in
    flight, at most one for every four CPU cores, and at most 8; but as many as the ``replicas`` of an
    environment."""
    max_concurrent: Positive = 512
    """Maximum number of rollouts in flight per worker."""
    retries: NonNegative = 2
    """Retries of one rollout, each in a new session, after its environment or engine failed."""
    max_failing_rollouts: Annotated[float, Field(ge=0)] = 0.5
    """Failed rollouts that are tolerated per prompt group: a fraction of its rollouts if below 1 (rounded
    down), else a number. The group is trained with the remaining rollouts, at least two. A group with more
    failures is dropped and replaced (``max_refills``)."""
    failing_environment: Literal["stop", "leave_out"] = "stop"
    """What happens when an environment fails permanently. ``stop``: end the attempt, with exit code 75 if its
    server may recover and 2 if only its code fails. ``leave_out``: continue with the tasks of the other
    environments, and try it again at the next start."""
    failing_environment_after: Positive = 64
    """Consecutive failed rollouts, each after its ``retries``, after which an environment counts as
    permanently failing."""
    max_user_errors: NonNegative = 1000
    """Maximum number of rollouts (for a filter: groups) that may fail because your agent, reward, verifier or
    filter function raises, counted since the last start. Each is left out of training; one more ends the run
    with exit code 2. The tracebacks are in ``attempts/NNN/user_errors.log``, each once. A function that
    raises in at least three rollouts, and in half of those begun, before the first succeeds ends the run at
    once."""
    tool_timeout_s: Seconds = 600.0
    """Timeout of one tool call, in seconds, until enough calls of an environment have been measured. From
    then on it is ten times the longest answered call, at least 30 s."""
    session_timeout_s: Seconds = 120.0
    """Timeout for opening an environment session and reading its prompt, in seconds."""
    worker_timeout_s: Seconds = 600.0
    """Seconds after which a rollout worker that answers nothing is restarted: its event loop is blocked, for
    example by your own agent or reward. Its stack is then in ``attempts/NNN/stacks.log``."""
    environment_start_timeout_s: Seconds = 600.0
    """Timeout for the start of an environment server, in seconds."""
    custom_agent: str | None = None
    """``package.module:function`` that replaces the agent loop. Its signature is in orhpc.rollout.agent.
    ``slime:package.module:function``: one written for slime or miles, ``generate(args, sample,
    sampling_params)``. Null: the built-in loop."""
    custom_reward: str | None = None
    """``package.module:function`` that computes the reward of a finished rollout.
    ``slime:package.module:function``: one written for slime or miles, ``rm(args, sample)``; with
    ``slime-group:`` it is ``rm(args, samples)`` of a whole group. Null: the environment's rewards."""
    record_routes: bool = False
    """Record the experts that the engines chose for each token (MoE models only). Needed by
    ``train.routing_replay``."""
    openreward_upload: bool = False
    """Upload rollouts to OpenReward in the background. Needs OPENREWARD_API_KEY."""
    openreward_run_name: Name | None = None
    """Name of the uploaded run. Null: ``run.name``."""

    @property
    def carries(self) -> bool:
        """Whether groups that a step has started and not used are carried over to the next one."""
        return self.partial or self.max_staleness > 0

    @property
    def max_age(self) -> int:
        """Maximum age, in policy versions, of tokens that are not stale."""
        return max(self.max_staleness, int(self.partial))

    @field_validator("filter")
    @classmethod
    def _known_filter(cls, value: str) -> str:
        return one_of_or_function(value, GROUP_FILTERS)

    @model_validator(mode="after")
    def _caps(self) -> Self:
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{name}={getattr(self, name)} is refused for training rollouts: the engine's "
                    f"log-probabilities would be of another policy; leave it at {off} (evaluation may set it)"
                )
        if self.max_response_tokens >= self.max_total_tokens:
            raise ValueError("max_response_tokens must be below max_total_tokens")
        return self
