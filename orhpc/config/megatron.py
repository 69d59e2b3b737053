"""Settings of the Megatron trainer, and how its ranks divide the work; without torch.

Ranks are numbered as megatron-core numbers them, order ``tp-cp-ep-dp-pp``: neighbours share tensors,
then a sequence, then experts, then data; pipeline stages lie furthest apart.  One node's ranks are
consecutive, so tensor parallelism stays inside a node wherever ``tp`` divides its devices.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from orhpc.config.base import Fraction, Positive, Section

LARGEST_BETA2 = 0.992
"""For moments in bfloat16: neighbours lie up to 2**-7 apart, and what decays by less may never move."""


class MegatronSettings(Section):
    """How megatron-core divides the model; only with ``train.backend: megatron``."""

    tp: Positive = 1
    """Tensor parallelism; the sequence is divided likewise between the matrix products."""
    pp: Positive = 1
    """Pipeline stages."""
    vpp: Positive = 1
    """Chunks of layers a stage, visited in turn: smaller bubbles, more messages."""
    cp: Positive = 1
    """Context parallelism: ranks that share one sequence."""
    ep: Positive = 1
    """Expert parallelism."""
    etp: Positive = 1
    """Tensor parallelism inside experts."""
    recompute: Literal["full", "selective"] = "full"
    """What ``train.gradient_checkpointing`` computes again in the backward pass: whole layers, or only
    ``recompute_modules`` of them."""
    recompute_modules: list[str] = Field(default_factory=lambda: ["core_attn"])
    """megatron-core's names; only with ``recompute: selective``."""
    overlap: bool = True
    """Reduce gradients during the backward pass."""
    offload_optimizer: Fraction = 0.0
    """Share of the optimiser's state that lives and is updated in host memory."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of Adam's two moments; master weights and sums of gradients stay float32.  ``bfloat16`` saves 4 bytes a
    parameter, on CUDA alone, with ``train.adam_beta2`` of 0.992 or less (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.3, trained so with 0.95)."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig."""

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that together hold one copy of the model's dense part and share its micro-batches."""
        return self.tp * self.cp * self.pp

    def data_ranks(self, ranks: int) -> int:
        """How many ways the batch is divided."""
        return ranks // self.ranks_per_copy

    def problems(self, ranks: int) -> list[str]:
        """What is wrong whatever the model."""
        found: list[str] = []
        if ranks % self.ranks_per_copy:
            found.append(
                f"megatron: tp x cp x pp = {self.tp} x {self.cp} x {self.pp} = {self.ranks_per_copy} "
                f"does not divide {ranks} trainer ranks"
            )
        expert = self.pp * self.ep * self.etp
        if ranks % expert:
            found.append(
                f"megatron: pp x ep x etp = {self.pp} x {self.ep} x {self.etp} = {expert} "
                f"does not divide {ranks} trainer ranks"
            )
        if self.vpp > 1 and self.pp == 1:
            found.append(f"megatron.vpp: {self.vpp} chunks a stage need more than one stage (megatron.pp)")
        return found

    def moment_problems(self, adam_beta2: float, dtype: str) -> list[str]:
        """What moments in bfloat16 cannot be had with."""
        if self.moments_dtype == "float32":
            return []
        wanted = f"megatron.moments_dtype: {self.moments_dtype}"
        found: list[str] = []
        if self.offload_optimizer:
            found.append(f"{wanted}: those in host memory (megatron.offload_optimizer) are float32")
        if adam_beta2 > LARGEST_BETA2:
            found.append(
                f"{wanted} needs train.adam_beta2 of {LARGEST_BETA2} or less, not {adam_beta2}: what second "
                "moments lose in a step would be lost in their rounding"
            )
        if dtype != "bfloat16":
            found.append(f"{wanted} needs model.dtype: bfloat16, not {dtype}")
        return found

    @property
    def moment_bytes(self) -> int:
        """Of both moments of one parameter."""
        return 4 if self.moments_dtype == "bfloat16" else 8
