"""Settings of the objective: GRPO and related losses, PPO's critic, and the off-policy correction."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from orhpc.config.base import Fraction, NonNegative, Positive, Section, one_of_or_function

ADVANTAGES = ("group", "leave_one_out", "batch", "group_then_batch", "ppo")
"""Values of ``algorithm.advantage`` that are not functions."""
COMPARING = ("group", "leave_one_out", "group_then_batch")
"""Those that compare a rollout with the others of its prompt group only: equal rewards train nothing."""


class CorrectionSettings(Section):
    """Importance weights that correct a token's loss for the mismatch between engine and trainer.

    ``rho`` is the ratio of the trainer's probability (at the start of the step) to the engine's.  Formulas
    and sources are in :func:`orhpc.train.loss.grpo.correction_weights`.  IcePop is ``mode: mask,
    level: token, low: 0.5, high: 5``; masked importance sampling (MIS) is ``mode: mask, level: sequence,
    low: 0``.
    """

    mode: Literal["none", "truncate", "clip", "mask"] = "none"
    """Weight of a token's loss. ``none``: 1. ``truncate``: ``min(rho, high)``. ``clip``: ``rho`` clipped to
    ``low .. high``. ``mask``: ``rho`` inside ``low .. high``, 0 outside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """What ``rho`` is: the token's ratio (``token``), the product of the ratios of its sample (``sequence``),
    or their geometric mean (``geometric``)."""
    low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of ``rho``, for ``clip`` and ``mask``."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of ``rho``."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A sample is excluded from the loss if any of its tokens has a ratio below this value. Null: off."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.mode in ("clip", "mask") and self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        return self


class OverlongSettings(Section):
    """Reward penalty for rollouts that come close to a length limit: the soft overlong punishment of DAPO
    (arXiv:2503.14476, eq. 13). Recorded rewards and ``reward_mean`` do not include it.

    A rollout of more than ``max_tokens - buffer_tokens`` sampled tokens loses a part of ``penalty`` that
    grows linearly, up to all of it at ``max_tokens``.
    """

    buffer_tokens: NonNegative = 0
    """Width of the interval in which the penalty grows, in sampled tokens. 0: no penalty."""
    max_tokens: Positive | None = None
    """Number of sampled tokens from which on the whole penalty applies. Null: ``max_response_tokens`` of the
    rollout's environment, the limit of one turn."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """Largest amount that is subtracted from a reward."""


class CriticSettings(Section):
    """The critic of ``advantage: ppo``: a second model like the policy, whose head is one number per token.

    It begins with the policy's weights and learns the expected return. Trainers hold it like the policy, with
    its own optimizer; engines never receive it, and exports do not contain it.

    Adam's other settings, the clipping of gradients and the token budget are those of ``train``.
    """

    gamma: Fraction = 1.0
    """Discount of later rewards, per sampled token."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalized advantage estimation (arXiv:1506.02438, equation 16). 1: the return minus the
    value, unbiased. Lower: less variance, more of the critic's error."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.5
    """The value loss does not reward a value for moving further than this from that at the start of the
    step. Null: no clipping."""
    lr: Annotated[float, Field(ge=0)] = 1e-5
    """Learning rate of the critic, constant after its warm-up."""
    lr_warmup_steps: NonNegative = 0
    """Optimizer steps in which the critic's learning rate rises from 0."""
    warmup_steps: NonNegative = 0
    """Training steps at the start of the run that update the critic only, so that the policy does not move
    before values are known. The policy's learning-rate schedule begins after them."""


class AlgorithmSettings(Section):
    """Advantages and loss. Formulas and sources are in orhpc.train.loss.advantages and
    orhpc.train.loss.grpo."""

    advantage: str = "group"
    """What a rollout's reward is compared with. ``group``: the mean of its prompt group (GRPO,
    arXiv:2402.03300). ``leave_one_out``: the mean of the other rollouts of its group (RLOO,
    arXiv:2402.14740). ``batch``: the mean over the step's trained tokens (REINFORCE++, arXiv:2501.03262).
    ``group_then_batch``: the mean of its group; then advantages are normalized over these tokens (REINFORCE++
    with baseline). ``ppo``: what a critic expects at each token, which then has its own advantage (PPO,
    arXiv:1707.06347; see ``critic``). ``package.module:function``: a function of a list of
    ``orhpc.types.PromptGroup`` that returns, for each, one number per trainable rollout."""
    normalise_advantage: bool = True
    """Divide advantages by a standard deviation: of the group's rewards with ``group`` and
    ``leave_one_out``, of the step with ``batch`` and ``group_then_batch``. ``ppo``: subtract the mean and
    divide by the standard deviation of the step's trained tokens. Not used with a function. False together
    with ``normalise_loss: constant`` is Dr.GRPO (arXiv:2503.20783); published RLOO uses false."""
    critic: CriticSettings = CriticSettings()
    overlong: OverlongSettings = OverlongSettings()
    mask_truncated: bool = False
    """Do not train on rollouts that were cut off at a length limit; their rewards still count for the
    advantages of their group (overlong filtering of DAPO, arXiv:2503.14476, section 3.4)."""
    loss: Literal["grpo", "gspo", "cispo"] = "grpo"
    """Policy loss: GRPO (arXiv:2402.03300), GSPO (arXiv:2507.18071) or CISPO (arXiv:2506.13585)."""
    eps_clip: Annotated[float, Field(gt=0)] = 0.2
    """The policy ratio is clipped from below at 1 - ``eps_clip``."""
    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """The policy ratio is clipped from above at 1 + ``eps_clip_high``. Null: the value of ``eps_clip``."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of dual-clip PPO for negative advantages (arXiv:1912.09729), not with ``loss: cispo``. Null:
    off."""
    normalise_loss: Literal["sample", "token", "constant"] = "sample"
    """How token losses are averaged. ``sample``: mean over each sample's tokens, then over samples (GRPO,
    arXiv:2402.03300). ``token``: mean over all tokens of the mini-batch (DAPO, arXiv:2503.14476).
    ``constant``: sum over each sample's tokens divided by ``normalise_length``, then mean over samples
    (Dr.GRPO, arXiv:2503.20783)."""
    normalise_length: Positive | None = None
    """Number of tokens that ``normalise_loss: constant`` divides by; required there, null otherwise. Dr.GRPO
    uses the largest number of tokens that the policy may sample for one sample."""
    use_kl_loss: bool = False
    """Add a KL penalty against the model of ``model.path``, whose frozen copy takes additional memory."""
    use_kl_reward: bool = False
    """Subtract the KL penalty from the rewards instead: a token's advantage is lowered by ``kl_coef`` times
    the sum, over it and all later sampled tokens of the rollout, of log p - log p_ref (arXiv:2203.02155,
    equation 2; arXiv:2501.03262). Advantages are normalized before; with ``advantage: ppo`` the penalty is
    part of each token's reward, and advantages are normalized after."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL penalty."""
    kl_type: Literal["k1", "k2", "k3", "k3_clamped"] = "k3"
    """Estimator of the KL divergence with ``use_kl_loss`` (Schulman 2020, "Approximating KL Divergence").
    ``k2`` has the gradient of the divergence, ``k3`` nearly so close to the reference. ``k1`` has a gradient
    of 0 in expectation: it is no penalty. ``k3_clamped``: bounded to 10 per token."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus. 0: off."""
    use_tis: bool = False
    """Truncated importance sampling against the engine's log-probabilities. Short for ``correction`` with
    ``mode: truncate`` and ``high: tis_clip``."""
    tis_clip: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the importance weight with ``use_tis``."""
    correction: CorrectionSettings = CorrectionSettings()
    old_logprobs: Literal["auto", "always"] = "auto"
    """Forward pass for the log-probabilities at the start of the step. ``auto``: skipped if there is one
    mini-batch per step, because they then equal the current ones. ``always``: never skipped."""

    @property
    def has_critic(self) -> bool:
        """Whether trainers hold a critic."""
        return self.advantage == "ppo"

    @property
    def needs_reference(self) -> bool:
        """Whether the model of ``model.path`` is kept beside the one that is trained."""
        return self.use_kl_loss or self.use_kl_reward

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, value: str) -> str:
        return one_of_or_function(value, ADVANTAGES)

    @model_validator(mode="after")
    def _only_ppo_has_a_critic(self) -> Self:
        if not self.has_critic and self.critic != CriticSettings():
            raise ValueError(f"critic: has settings, but advantage is {self.advantage}, not ppo")
        return self

    @model_validator(mode="after")
    def _functions_see_plain_rewards(self) -> Self:
        if self.overlong.buffer_tokens and self.advantage not in ADVANTAGES:
            raise ValueError(
                f"overlong: has settings, but advantage is the function {self.advantage}, which gets the "
                "rewards without a penalty; subtract it there"
            )
        return self

    @model_validator(mode="after")
    def _dual_clip_of_a_clipped_loss(self) -> Self:
        if self.dual_clip is not None and self.loss == "cispo":
            raise ValueError(
                "dual_clip: bounds the clipped losses grpo and gspo; loss: cispo has no such bound"
            )
        return self

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        if self.use_tis and self.correction.mode != "none":
            raise ValueError("use_tis and correction.mode exclude each other")
        return self

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if self.use_kl_loss and self.use_kl_reward:
            raise ValueError("use_kl_loss and use_kl_reward exclude each other")
        return self

    @model_validator(mode="after")
    def _constant_length(self) -> Self:
        if (self.normalise_loss == "constant") != (self.normalise_length is not None):
            raise ValueError("normalise_loss: constant and normalise_length need each other")
        return self

    @property
    def mismatch_correction(self) -> CorrectionSettings:
        """The effective correction, with ``use_tis`` expanded."""
        if not self.use_tis:
            return self.correction
        return self.correction.model_copy(
            update={"mode": "truncate", "level": "token", "high": self.tis_clip}
        )
