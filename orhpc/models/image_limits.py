"""The least size that images of a model may be limited to; for login nodes, from JSON files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orhpc.errors import ModelError
from orhpc.models.families import FAMILIES


def least_max_pixels(min_pixels: int, factor: int) -> int:
    """Return the least maximum of an image's pixels with which every image can be resized.

    A small image is enlarged to at least the minimum, in whole patches, and must still fit.

    Args:
        min_pixels: of the model's image processor.
        factor: length in pixels of the square that is one token.
    """
    return 4 * max(min_pixels, factor**2)


def check_max_pixels(folder: Path, max_pixels: int) -> None:
    """Check ``rollout.max_image_pixels`` for the model of a folder, if that sees images.

    A folder of which only ``config.json`` has been fetched has no minimum of its processor yet, only the size
    of patches.  What the files do not say is left to the job, which loads the processor itself.

    Raises:
        ModelError: no image would fit.
    """
    config = _read(folder / "config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.vision is None:
        return
    vision, processor = config.get("vision_config", {}), _read(folder / "preprocessor_config.json")
    patch = processor.get("patch_size", vision.get("patch_size", 0))
    merge = processor.get("merge_size", vision.get("spatial_merge_size", 0))
    size = processor.get("size") or {}
    least = least_max_pixels(processor.get("min_pixels") or size.get("shortest_edge", 0), patch * merge)
    if max_pixels < least:
        raise ModelError(f"rollout.max_image_pixels: must be at least {least} for this model")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
