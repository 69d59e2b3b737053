"""The ``megatron`` section: parallelism and memory of the Megatron trainer. Does not import torch.

Ranks have megatron-core's order ``tp-cp-ep-dp-pp``: tensor-parallel ranks are adjacent, pipeline stages are
furthest apart.  The ranks of a node are consecutive, so tensor parallelism stays inside a node if ``tp``
divides the node's devices.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from orhpc.config.base import Fraction, Positive, Section, nearest

LARGEST_BETA2 = 0.992
"""Largest ``adam_beta2`` for moments in bfloat16, whose relative spacing is up to 2**-7: a moment that decays
by less in a step may be rounded back to its old value."""


RECOMPUTABLE = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that megatron-core 0.19 can recompute."""


def _next_to(size: int, ranks: int) -> str:
    """The divisors of ``ranks`` next to a size that does not divide them, for a message."""
    return nearest(size, [n for n in range(1, ranks + 1) if ranks % n == 0])


class MegatronSettings(Section):
    """Parallelism and memory of megatron-core; only with ``train.backend: megatron``."""

    tp: Positive = 1
    """Tensor-parallel size. With more than 1, sequence parallelism is also used."""
    pp: Positive = 1
    """Pipeline-parallel size: number of pipeline stages."""
    vpp: Positive = 1
    """Virtual pipeline size: chunks of layers per pipeline stage (interleaved schedule). More chunks give
    smaller bubbles and more communication; more than 1 needs ``pp`` > 1."""
    cp: Positive = 1
    """Context-parallel size: ranks that share each sequence."""
    ep: Positive = 1
    """Expert-parallel size: ranks over which a layer's experts are divided (MoE models)."""
    etp: Positive = 1
    """Tensor-parallel size within an expert (MoE models)."""
    recompute: Literal["full", "selective", "auto"] = "full"
    """What ``train.gradient_checkpointing`` recomputes in the backward pass. ``full``: whole layers.
    ``selective``: only ``recompute_modules``. ``auto``: as little as the device's memory allows by the plan,
    with 5 % to spare; nothing, cheap modules, or whole layers, as few as possible."""
    recompute_modules: list[str] = Field(default_factory=lambda: ["core_attn"])
    """Modules to recompute with ``recompute: selective``, by megatron-core's names."""
    recompute_layers: Positive | None = None
    """With ``recompute: full``: how many layers of each pipeline stage, the first ones, are recomputed; the
    others keep their activations. Null: all."""
    overlap: bool = True
    """Overlap the gradient reduction with the backward pass."""
    overlap_moe_expert_parallel_comm: bool = False
    """Overlap the all-to-alls of experts with the computation of another micro-batch: the forward pass of one
    runs together with the backward pass of the one before. Needs ``ep`` > 1, ``model.dtype: bfloat16``,
    memory for one layer more, and activations that are not recomputed in whole layers or in whole mixtures
    (``moe``)."""
    counts_from_routes: bool = False
    """Count the tokens of each expert from the recorded routes, on the host before a micro-batch begins,
    instead of waiting for the device's counts in every layer. Needs ``train.routing_replay``."""
    offload_optimizer: Fraction = 0.0
    """Fraction of the optimizer state that is stored and updated in host memory. Saves GPU memory; slower."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of Adam's two moments; master weights stay float32. ``bfloat16`` saves 4 bytes per parameter,
    divided over the ranks that hold it. It needs CUDA and ``train.adam_beta2`` of 0.992 or less (DeepSeek-V3,
    arXiv:2412.19437, section 3.3.3, used 0.95)."""
    gradients_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are summed over micro-batches and over ranks. ``bfloat16`` saves 2 bytes
    per parameter on every rank that holds it, and halves what the reduction sends; each sum is rounded to 8
    significant bits. It needs CUDA, and an optimizer that is all on the device or all in host memory."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig, by their names."""

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that together hold one copy of the dense parameters and share micro-batches."""
        return self.tp * self.cp * self.pp

    def data_ranks(self, ranks: int) -> int:
        """Return the data-parallel size."""
        return ranks // self.ranks_per_copy

    def problems(self, ranks: int) -> list[str]:
        """List the problems that do not depend on the model."""
        found: list[str] = []
        if ranks % self.ranks_per_copy:
            found.append(
                f"megatron: tp x cp x pp = {self.tp} x {self.cp} x {self.pp} = {self.ranks_per_copy} "
                f"does not divide {ranks} trainer ranks; {_next_to(self.ranks_per_copy, ranks)} would"
            )
        expert = self.pp * self.ep * self.etp
        if ranks % expert:
            found.append(
                f"megatron: pp x ep x etp = {self.pp} x {self.ep} x {self.etp} = {expert} "
                f"does not divide {ranks} trainer ranks; {_next_to(expert, ranks)} would"
            )
        if self.vpp > 1 and self.pp == 1:
            found.append(f"megatron.vpp: {self.vpp} chunks per stage need more than one stage (megatron.pp)")
        if unknown := [name for name in self.recompute_modules if name not in RECOMPUTABLE]:
            found.append(f"megatron.recompute_modules: {unknown[0]!r} is none of {', '.join(RECOMPUTABLE)}")
        if self.recompute_layers is not None and (self.recompute != "full" or self.vpp > 1):
            other = "megatron.vpp > 1" if self.vpp > 1 else f"megatron.recompute: {self.recompute}"
            found.append(f"megatron.recompute_layers: not with {other}")
        return found

    def overlap_problems(self, dtype: str, *, recomputes: bool) -> list[str]:
        """List the settings with which all-to-alls cannot be overlapped with another micro-batch.

        ``recomputes``: ``train.gradient_checkpointing``.
        """
        if not self.overlap_moe_expert_parallel_comm:
            return []
        wanted = "megatron.overlap_moe_expert_parallel_comm"
        found: list[str] = []
        if self.ep == 1:
            found.append(f"{wanted} needs megatron.ep > 1: without it there is no all-to-all")
        if dtype != "bfloat16":
            found.append(f"{wanted} needs model.dtype: bfloat16, not {dtype}")
        if self.pp > 1 and self.vpp == 1:
            found.append(f"{wanted} needs megatron.vpp > 1 in a pipeline (megatron.pp = {self.pp})")
        if recomputes and self.recompute == "full":
            found.append(
                f"{wanted} cannot recompute whole layers: set megatron.recompute to auto or selective, or "
                "train.gradient_checkpointing to false"
            )
        if recomputes and self.recompute == "selective" and "moe" in self.recompute_modules:
            found.append(f"{wanted}: megatron.recompute_modules must not have moe")
        return found

    def gradient_problems(self, dtype: str) -> list[str]:
        """List the settings that gradients in bfloat16 cannot be combined with."""
        if self.gradients_dtype == "float32":
            return []
        wanted = f"megatron.gradients_dtype: {self.gradients_dtype}"
        found: list[str] = []
        if 0 < self.offload_optimizer < 1:
            # megatron-core's optimizer does not wait until it has converted the device's part to float32.
            found.append(f"{wanted}: megatron.offload_optimizer must be 0 or 1, not {self.offload_optimizer}")
        if dtype != "bfloat16":
            found.append(f"{wanted} needs model.dtype: bfloat16, not {dtype}")
        return found

    def moment_problems(self, adam_beta2: float, dtype: str) -> list[str]:
        """List the settings that moments in bfloat16 cannot be combined with."""
        if self.moments_dtype == "float32":
            return []
        wanted = f"megatron.moments_dtype: {self.moments_dtype}"
        found: list[str] = []
        if self.offload_optimizer:
            found.append(f"{wanted}: moments in host memory (megatron.offload_optimizer) are float32")
        if adam_beta2 > LARGEST_BETA2:
            found.append(
                f"{wanted} needs train.adam_beta2 of {LARGEST_BETA2} or less, not {adam_beta2}: rounding "
                "would cancel the decay of the second moments"
            )
        if dtype != "bfloat16":
            found.append(f"{wanted} needs model.dtype: bfloat16, not {dtype}")
        return found

    @property
    def moment_bytes(self) -> int:
        """Bytes of both moments of one parameter."""
        return 4 if self.moments_dtype == "bfloat16" else 8

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the accumulated gradient of one parameter."""
        return 2 if self.gradients_dtype == "bfloat16" else 4
