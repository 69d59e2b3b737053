"""The ``precision`` switch: what engines and trainers quantise, and what contradicts it.

FP8 is block-wise e4m3 throughout: weights in blocks of 128 x 128, activations in rows of 128, as
DeepSeek-V3 is trained and published (https://arxiv.org/abs/2412.19437, section 3.3).  Routers, norms,
embeddings and the head are never quantised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from orhpc.config import Config

Precision = Literal["bf16", "fp8-rollout", "fp8"]


def precision_problems(c: Config) -> list[str]:
    """Everything under which a part would compute unquantised, or quantised in another way, in silence."""
    if c.precision == "bf16":
        if c.engine.power_of_two_scales:
            return ["engine.power_of_two_scales: needs precision: fp8-rollout or fp8"]
        return []
    wanted = f"precision: {c.precision}"
    problems: list[str] = []
    if c.engine.backend != "sglang":
        problems.append(f"{wanted} needs engine.backend: sglang, which computes in FP8")
    if c.model.dtype != "bfloat16":
        problems.append(f"{wanted} is FP8 beside bfloat16, but model.dtype is {c.model.dtype}")
    if c.engine.dtype not in (None, "bfloat16"):
        problems.append(f"{wanted} is FP8 beside bfloat16, but engine.dtype is {c.engine.dtype}")
    if c.engine.drafts_with_weights:
        problems.append(
            f"{wanted} starts engines without the files' weights, and a draft model never gets any: leave "
            "speculative decoding out, or draft with NGRAM"
        )
    if c.precision == "fp8" and c.train.backend != "megatron":
        problems.append(f"{wanted} trains through TransformerEngine: train.backend: megatron")
    if c.precision == "fp8" and c.placement.device != "cuda":
        problems.append(f"{wanted} trains through TransformerEngine: placement.device: cuda")
    return problems
