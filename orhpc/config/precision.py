"""The ``precision`` setting: what engines and trainers quantize, and which settings contradict it.

FP8 is always block-wise e4m3: weights in blocks of 128 x 128, activations in rows of 128, as in
DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3).  Routers, norms,
embeddings and the head are never quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from orhpc.config import Config

Precision = Literal["bf16", "fp8-rollout", "fp8"]


def precision_problems(c: Config) -> list[str]:
    """List the settings with which a component would silently compute in another precision."""
    if c.precision == "bf16":
        if c.engine.power_of_two_scales:
            return ["engine.power_of_two_scales: needs precision: fp8-rollout or fp8"]
        return []
    wanted = f"precision: {c.precision}"
    problems: list[str] = []
    if c.engine.backend != "sglang":
        problems.append(f"{wanted} needs engine.backend: sglang, which computes in FP8")
    if c.model.dtype != "bfloat16":
        problems.append(f"{wanted} combines FP8 with bfloat16, but model.dtype is {c.model.dtype}")
    if c.engine.dtype not in (None, "bfloat16"):
        problems.append(f"{wanted} combines FP8 with bfloat16, but engine.dtype is {c.engine.dtype}")
    if c.engine.drafts_with_weights:
        problems.append(
            f"{wanted} starts engines with dummy weights, and weight syncs never reach a draft model: turn "
            "speculative decoding off, or use algorithm NGRAM"
        )
    if c.precision == "fp8" and c.train.backend != "megatron":
        problems.append(f"{wanted} trains through TransformerEngine: train.backend: megatron")
    if c.precision == "fp8" and c.placement.device != "cuda":
        problems.append(f"{wanted} trains through TransformerEngine: placement.device: cuda")
    return problems
