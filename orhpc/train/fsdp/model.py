"""A transformers model as the trainer uses it: packed passes that return log-probabilities or values."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from orhpc.errors import ModelError
from orhpc.models.seeing import ImageFeatures, language_inputs
from orhpc.train.attention.packing import Packing
from orhpc.train.backend import VALUE_HEAD
from orhpc.train.batch import PackedBatch, PackedImages
from orhpc.train.fsdp.routing_replay import RoutedRows, RouterReplay
from orhpc.train.hf_model import logit_scaling_of, model_parameters
from orhpc.train.loss.head import token_logprobs
from orhpc.train.pinned import to_device

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceImages:
    """A :class:`~orhpc.train.batch.PackedImages` on the model's device."""

    pixel_values: Tensor
    grids: Tensor
    slots_V: Tensor
    positions_3P: Tensor

    @classmethod
    def of(cls, images: PackedImages, device: torch.device) -> DeviceImages:
        return cls(
            pixel_values=to_device(images.pixel_values, device),
            grids=to_device(images.grids, device),
            slots_V=to_device(images.slots_V, device),
            positions_3P=to_device(images.positions_3P, device),
        )


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A :class:`~orhpc.train.batch.PackedBatch` on the model's device."""

    input_ids_P: Tensor
    position_ids_P: Tensor
    packing: Packing
    rows_R: Tensor
    """Slots whose target was sampled; the head computes only these."""
    targets_R: Tensor
    mask_P: Tensor
    segments_P: Tensor
    n_segments: int
    rollout_logprobs_P: Tensor
    advantages_P: Tensor
    routed: RoutedRows | None = None
    """Expert routes recorded at sampling time, if they were fetched."""
    images: DeviceImages | None = None
    """Of a model that sees images."""

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> DeviceBatch:
        rows_R = np.nonzero(batch.loss_mask_P)[0]
        return cls(
            input_ids_P=to_device(batch.input_ids_P, device),
            position_ids_P=to_device(batch.position_ids_P, device),
            packing=Packing(batch.cu_seqlens.tolist(), device),
            rows_R=to_device(rows_R, device),
            targets_R=to_device(batch.targets_P[rows_R], device),
            mask_P=to_device(batch.loss_mask_P, device),
            segments_P=to_device(batch.segments_P, device),
            n_segments=len(batch.cu_seqlens) - 1,
            rollout_logprobs_P=to_device(batch.rollout_logprobs_P, device),
            advantages_P=to_device(batch.advantages_P, device),
            routed=RoutedRows.of(batch, device),
            images=None if batch.images is None else DeviceImages.of(batch.images, device),
        )


class PackedModel(nn.Module):
    """Decoder and head in one module.

    They are one module because the head's weight must be gathered while it is used, which FSDP does only
    inside the root module's forward and backward.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def _hidden(self, batch: DeviceBatch) -> Tensor:
        """Return the last hidden state, ``[P, H]``."""
        body = self.hf.base_model
        if body is self.hf:  # Llama 4's text model does not set base_model_prefix
            body = self.hf.model
        if batch.images is not None:
            return self._seeing(body, batch, batch.images)
        output = body(
            input_ids=batch.input_ids_P[None],
            position_ids=batch.position_ids_P[None],
            packing=batch.packing,
            use_cache=False,
        )
        return output.last_hidden_state[0]

    def _seeing(self, body: Any, batch: DeviceBatch, images: DeviceImages) -> Tensor:
        features = ImageFeatures.of(body, images.pixel_values, images.grids)
        output = body.language_model(
            **language_inputs(body, batch.input_ids_P, features, images.slots_V),
            position_ids=images.positions_3P[:, None],
            packing=batch.packing,
            use_cache=False,
        )
        return output.last_hidden_state[0]


class ValueModel(PackedModel):
    """The critic: the decoder with one number per token, the expected return before its next token.

    The head has no bias, as in transformers' classes for sequence classification, which TRL uses.  Its
    weights are not initialized here.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        """``hf`` loses its own head."""
        super().__init__(hf)
        head = hf.get_output_embeddings()
        for name, module in list(hf.named_modules()):
            if module is head:
                owner, _, attribute = name.rpartition(".")
                setattr(hf.get_submodule(owner), attribute, nn.Identity())
        example = next(hf.parameters())
        width = hf.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1, bias=False, dtype=example.dtype, device=example.device)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return every parameter once, the decoder's under the policy's names, in the same order on all
        ranks."""
        return [*model_parameters(self.hf), (VALUE_HEAD, self.get_parameter(VALUE_HEAD))]

    def forward(self, batch: DeviceBatch) -> Tensor:
        """Return ``values_P``, float32, 0 where the mask is False."""
        hidden_RH = self._hidden(batch).index_select(0, batch.rows_R)
        values_R = nn.functional.linear(hidden_RH.float(), self.value_head.weight.float())[:, 0]
        return values_R.new_zeros(len(batch.input_ids_P)).index_copy(0, batch.rows_R, values_R)


class LogprobModel(PackedModel):
    """The policy or the reference: its forward returns log-probabilities instead of logits."""

    def __init__(
        self, hf: PreTrainedModel, *, temperature: float, chunk: int, routers: RouterReplay | None = None
    ) -> None:
        super().__init__(hf)
        self.routers = routers
        self.scaling = logit_scaling_of(hf.config, temperature)
        self.chunk = chunk
        head = hf.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"{type(hf).__name__}: its head is a {type(head).__name__}, not a linear layer")

    def forward(self, batch: DeviceBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return ``logprobs_P`` and ``entropy_P``, float32, 0 where the mask is False."""
        if self.routers is not None:
            # Passes without gradient are not counted: they see the same tokens as the update.
            self.routers.start(batch.routed, counted=torch.is_grad_enabled())
        hidden_PH = self._hidden(batch)
        head = self._head()
        logprobs_R, entropy_R = token_logprobs(
            hidden_PH.index_select(0, batch.rows_R),
            head.weight,
            head.bias,
            batch.targets_R,
            scaling=self.scaling,
            chunk=self.chunk,
            entropy_gradient=entropy_gradient,
        )
        zeros_P = logprobs_R.new_zeros(len(batch.input_ids_P))
        return (
            zeros_P.index_copy(0, batch.rows_R, logprobs_R),
            zeros_P.index_copy(0, batch.rows_R, entropy_R),
        )

    def _head(self) -> nn.Linear:
        head = self.hf.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head
