"""What weight sync and export need from a trained model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize, unchanged
from orhpc.wire.weights import NamedTensor

if TYPE_CHECKING:
    from orhpc.train.weights.buckets import FlatTensors


class HfNames(Protocol):
    """Maps whole parameters to tensors of a Hugging Face checkpoint."""

    def split(self, name: str, whole: Tensor, /) -> Mapping[str, Tensor]:
        """Return the checkpoint tensors that one whole parameter contains; also on the meta device."""
        ...


class WeightSource(ABC):
    """One rank's part of a model whose parameters can be gathered from all ranks."""

    dtype: torch.dtype
    """Type of the weights in the forward pass, and of exported tensors."""

    @abstractmethod
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every tensor that :meth:`export` accepts, in a fixed order.

        These are all tensors of a checkpoint: parameters, and buffers such as the routers' correction
        biases of DeepSeek-V3, GLM-4-MoE and MiniMax-M2.
        """

    @abstractmethod
    def export_dtypes(self) -> dict[str, torch.dtype]:
        """Return the types of exported tensors that may differ from :attr:`dtype`: those of buffers."""

    @abstractmethod
    def hf_names(self) -> HfNames:
        """Return the mapping from :meth:`parameter_shapes`' names to those of the checkpoint."""

    def expert_parameters(self) -> Mapping[str, int]:
        """Return the parameters that belong to one expert of a layer each: its index, by their names.

        Empty if ranks do not divide experts, or if checkpoints have one tensor for all experts of a layer.
        """
        return {}

    @abstractmethod
    def export(
        self,
        names: Iterable[str],
        blocks: ExpertBlocks | None = None,
        quantize: Quantize = unchanged,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the named parameters whole, on every rank, under Hugging Face names (collective).

        In the model's type, except for :meth:`export_dtypes`.  ``blocks``: ``names`` has experts of this
        rank's block only, and other ranks pass the experts at the same places within their own blocks; for
        sources with :meth:`expert_parameters`.  ``quantize``: what the caller does with all tensors; a rank
        may do it to those that it sends to others, so that fewer bytes move.
        """

    def export_flat(
        self,
        names: Iterable[str],
        blocks: ExpertBlocks | None = None,
        quantize: Quantize = unchanged,
    ) -> Iterator[NamedTensor | FlatTensors]:
        """As :meth:`export`, but in one buffer come several tensors whose bytes ranks sent each other.

        The tensors in it are quantized already, if they are to be.
        """
        yield from self.export(names, blocks, quantize)
