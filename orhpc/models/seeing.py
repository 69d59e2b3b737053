"""The forward pass of a model that sees images, for trainers and CPU engines.

The model's own ``forward`` finds an image's tokens by their id.  Here their places are given, because a model
may sample that id too, and because an engine computes an image in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from orhpc.models.images import sees_images
from orhpc.models.rotary import rotate_as_published

VISION_ATTENTION = "sdpa"
"""Attention of vision towers: not causal, over an image or a window of it, without a cache."""


def transformers_config(folder: str, **options: Any) -> Any:
    """Read a folder's ``config.json`` with transformers, and what its release ignores of it.

    ``options``: of ``AutoConfig.from_pretrained``, which raises several kinds of errors.
    """
    config = AutoConfig.from_pretrained(folder, **options)
    rotate_as_published(config)
    return config


def auto_class(config: Any) -> Any:
    """Return transformers' class that loads the model which is trained, with a head for tokens."""
    sees = sees_images({"model_type": config.model_type})
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def attention_of(config: Any, name: str) -> str | dict[str, str]:
    """Return ``attn_implementation``: ``name``, in the decoder only."""
    if not sees_images({"model_type": config.model_type}):
        return name
    return {"text_config": name, "vision_config": VISION_ATTENTION}


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What a vision tower makes of images: one row per token."""

    embeddings_VH: Tensor
    """In place of the placeholders' embeddings."""
    deepstack: tuple[Tensor, ...] = ()
    """Added to the outputs of the first decoder layers, ``[V, H]`` each."""

    @classmethod
    def of(cls, body: Any, pixel_values: Tensor, grids: Tensor) -> ImageFeatures:
        """Compute them.

        Args:
            body: the model without its head.
            pixel_values: patches of all images, ``[patches, values]``.
            grids: int64 ``[images, 3]``, each image's patches in time, rows and columns.
        """
        found = body.visual(pixel_values.to(body.visual.dtype), grid_thw=grids, return_dict=True)
        return cls(found.pooler_output, tuple(getattr(found, "deepstack_features", None) or ()))

    @classmethod
    def joined(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Return the rows of all parts, in order."""
        deepstack = zip(*(part.deepstack for part in parts), strict=True)
        return cls(torch.cat([part.embeddings_VH for part in parts]), tuple(map(torch.cat, deepstack)))

    def rows(self, first: int, last: int) -> ImageFeatures:
        """Return those of some tokens."""
        return ImageFeatures(self.embeddings_VH[first:last], tuple(t[first:last] for t in self.deepstack))


def language_inputs(body: Any, ids_P: Tensor, features: ImageFeatures, slots_V: Tensor) -> Mapping[str, Any]:
    """Return the arguments of the decoder for one row of tokens.

    Args:
        body: the model without its head.
        ids_P: token ids; those of images do not matter.
        features: of the images.
        slots_V: ascending positions of the features in the row.  None of them: the features only keep the
            tower in the computation, where all ranks have to take part in it.
    """
    embeddings_PH = body.get_input_embeddings()(ids_P)
    rows_VH = features.embeddings_VH.to(embeddings_PH.dtype)
    if not len(slots_V):
        unused = sum((t.sum() for t in features.deepstack), rows_VH.sum())
        return {"inputs_embeds": (embeddings_PH + 0 * unused)[None]}
    inputs: dict[str, Any] = {"inputs_embeds": embeddings_PH.index_copy(0, slots_V, rows_VH)[None]}
    if features.deepstack:
        mask_P = slots_V.new_zeros(len(ids_P)).index_fill(0, slots_V, 1).bool()
        inputs |= {"visual_pos_masks": mask_P[None], "deepstack_visual_embeds": list(features.deepstack)}
    return inputs
