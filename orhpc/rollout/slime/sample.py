"""The sample that slime's functions receive and return, with slime's field names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ClassVar


class Status(Enum):
    """How far a sample is; ``Sample.Status`` in slime."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One rollout, as slime's functions see it."""

    Status: ClassVar[type[Status]] = Status

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    """The prompt in the model's chat format."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    response: str = ""
    response_length: int = 0
    """Tokens after the prompt."""
    label: Any = None
    """The task's field ``label``, if it has one."""
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """One number for each token of the response: 1 for those to train on."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    """The task, as the environment's server describes it."""
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None

    @property
    def effective_response_length(self) -> int:
        """Number of tokens to train on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry ``args.reward_key``."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward

    def to_dict(self) -> dict[str, Any]:
        """All fields, with the status as text."""
        return {**asdict(self), "status": self.status.value}

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: list[int],
        log_probs: list[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Append tokens of the model (``trainable``) or of a tool."""
        mask = self.loss_mask if self.loss_mask is not None else [1] * self.response_length
        before = self.rollout_log_probs or [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.response += text
        self.response_length += len(tokens)
        self.loss_mask = [*mask, *([int(trainable)] * len(tokens))]
        self.rollout_log_probs = [*before, *(log_probs or [0.0] * len(tokens))]
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Take the weight version and the status from an engine's answer."""
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = STATUS_OF[meta_info["finish_reason"]["type"]]


STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Status by an engine's finish reason."""
