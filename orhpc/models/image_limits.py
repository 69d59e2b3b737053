"""The least size that images of a model may be limited to; for login nodes, from JSON files alone."""

from __future__ import annotations

from pathlib import Path

from orhpc.errors import ModelError
from orhpc.models.families import FAMILIES
from orhpc.models.folders import read_object


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
    of patches; the job loads the processor itself.

    Raises:
        ModelError: no image would fit, or a size is no number.
    """
    config, processor = read_object(folder / "config.json"), read_object(folder / "preprocessor_config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.vision is None:
        return
    tower = {**family.vision.defaults, **(config.get("vision_config") or {})}
    patch = processor.get("patch_size", tower["patch_size"])
    merge = processor.get("merge_size", tower["spatial_merge_size"])
    smallest = processor.get("min_pixels") or (processor.get("size") or {}).get("shortest_edge", 0)
    try:
        least = least_max_pixels(smallest, patch * merge)
    except TypeError as error:
        raise ModelError(f"model.path: {folder}: sizes of patches are invalid: {error}") from None
    if max_pixels < least:
        raise ModelError(f"rollout.max_image_pixels: must be at least {least} for this model")
