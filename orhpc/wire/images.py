"""Images on their way from environments to engines and trainers: where they are in a rollout's tokens.

A rollout holds one placeholder token for each merged patch of an image.  Engines are sent one placeholder per
image, which they expand themselves (SGLang 0.5.16: ``BaseMultimodalProcessor._expand_input_ids``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from orhpc.types import Image, PlacedImage


def expanded(
    ids: Sequence[int], images: Sequence[Image], token: int, *, at: int = 0
) -> tuple[list[int], list[PlacedImage]]:
    """Replace the i-th occurrence of ``token`` by as many as the i-th image has.

    Args:
        ids: one placeholder per image.
        images: in the same order.
        token: the placeholder's id.
        at: position of the first id in its rollout.

    Raises ValueError if ``ids`` has another number of placeholders than there are images.
    """
    found = sum(1 for i in ids if i == token)
    if found != len(images):
        raise ValueError(f"{found} placeholders for {len(images)} images")
    out: list[int] = []
    placed: list[PlacedImage] = []
    left = iter(images)
    for i in ids:
        if i != token:
            out.append(i)
            continue
        image = next(left)
        placed.append(PlacedImage(image, at + len(out)))
        out.extend([token] * image.tokens)
    return out, placed


def collapsed(ids: NDArray[np.int32], images: Iterable[PlacedImage]) -> NDArray[np.int32]:
    """Undo :func:`expanded`: keep only the first placeholder of each image."""
    keep = np.ones(len(ids), np.bool_)
    for placed in images:
        keep[placed.start + 1 : placed.end] = False
    return ids[keep]


def rotary_positions(length: int, images: Sequence[PlacedImage]) -> NDArray[np.int64]:
    """Positions of a rollout's tokens for multimodal rotary embeddings: time, row and column, ``[3, T]``.

    Text counts up on all axes together.  An image's tokens have one time, and rows and columns that count
    from it; the text after it goes on from the larger of its sides (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    positions = np.empty((3, length), np.int64)
    done = following = 0
    for placed in images:
        positions[:, done : placed.start] = following + np.arange(placed.start - done)
        following += placed.start - done
        rows, columns = placed.image.rows, placed.image.columns
        where = slice(placed.start, placed.end)
        positions[0, where] = following
        positions[1, where] = following + np.repeat(np.arange(rows), columns)
        positions[2, where] = following + np.tile(np.arange(columns), rows)
        following += max(rows, columns)
        done = placed.end
    positions[:, done:] = following + np.arange(length - done)
    return positions
