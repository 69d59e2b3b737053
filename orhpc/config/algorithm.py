"""Settings of the objective: GRPO and its relatives, and what corrects for another sampling policy."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orhpc.config.base import Positive, Section


class CorrectionSettings(Section):
    """How a token's loss is corrected for having been sampled by the engine, not by the trainer.

    With ``rho`` the ratio of the trainer's probability (at the start of the step) to the engine's;
    formulas and sources in :func:`orhpc.train.loss.grpo.correction_weights`.  IcePop is ``mode: mask,
    level: token, low: 0.5, high: 5``; masked importance sampling (MIS) is ``mode: mask`` with
    ``level: sequence`` or ``geometric``.
    """

    mode: Literal["none", "truncate", "clip", "mask"] = "none"
    """``truncate``: weight ``min(rho, high)``; ``clip``: ``rho`` within ``low .. high``; ``mask``: ``rho``
    inside that band, 0 outside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """What ``rho`` is: the token's ratio, the product over its sample, or that product's
    geometric mean."""
    low: Annotated[float, Field(ge=0)] = 0.5
    high: Annotated[float, Field(gt=0)] = 2.0
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A sample is left out when any of its tokens has a ratio below this; null: off."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.mode in ("clip", "mask") and self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        return self


class AlgorithmSettings(Section):
    """GRPO and its relatives; formulas and sources in :mod:`orhpc.train.loss.grpo`."""

    normalise_advantage: bool = True
    """Divide advantages by the group's standard deviation.  False together with
    ``normalise_loss: constant`` is Dr.GRPO (arXiv:2503.20783)."""
    loss: Literal["grpo", "gspo", "cispo"] = "grpo"
    eps_clip: Annotated[float, Field(gt=0)] = 0.2
    eps_clip_high: Annotated[float, Field(gt=0)] | None = None
    """Upper bound's distance from 1; null: as ``eps_clip``."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of dual clip for negative advantages; null: off."""
    normalise_loss: Literal["sample", "token", "constant"] = "sample"
    """``sample``: mean over samples of each one's token mean (GRPO, arXiv:2402.03300); ``token``: mean over
    all tokens of the mini-batch (DAPO, arXiv:2503.14476); ``constant``: mean over samples of each one's
    token sum, divided by ``normalise_length`` whatever its length (Dr.GRPO, arXiv:2503.20783)."""
    normalise_length: Positive | None = None
    """Tokens that ``normalise_loss: constant`` divides by, which needs it: Dr.GRPO takes the largest number
    of tokens that the policy may sample for one sample."""
    use_kl_loss: bool = False
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    kl_type: Literal["k1", "k2", "k3", "k3_clamped"] = "k3"
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    use_tis: bool = False
    """Truncated importance sampling against the engine's log-probabilities: short for ``correction``
    with ``mode: truncate`` and ``high: tis_clip``."""
    tis_clip: Annotated[float, Field(gt=0)] = 2.0
    correction: CorrectionSettings = CorrectionSettings()
    old_logprobs: Literal["auto", "always"] = "auto"
    """``auto`` leaves out the pass over old log-probabilities where they equal the current ones:
    one mini-batch a step."""

    @model_validator(mode="after")
    def _one_correction(self) -> Self:
        if self.use_tis and self.correction.mode != "none":
            raise ValueError("use_tis and correction.mode exclude each other")
        return self

    @model_validator(mode="after")
    def _constant_length(self) -> Self:
        if (self.normalise_loss == "constant") != (self.normalise_length is not None):
            raise ValueError("normalise_loss: constant and normalise_length need each other")
        return self

    @model_validator(mode="after")
    def _sequence_ratios(self) -> Self:
        if self.loss == "gspo" and self.correction.mode == "mask" and self.correction.level == "token":
            raise ValueError(
                "loss: gspo has one ratio for each sample, through which a token that correction masks would "
                "keep its gradient; set correction.level: sequence or geometric"
            )
        return self

    @property
    def mismatch_correction(self) -> CorrectionSettings:
        """The correction in force, ``use_tis`` spelt out."""
        if not self.use_tis:
            return self.correction
        return self.correction.model_copy(
            update={"mode": "truncate", "level": "token", "high": self.tis_clip}
        )
