"""What a model that sees images makes of one: its size, its tokens and its pixel values.

The image processor is the model's own, of transformers.  It runs on PIL wherever it runs, so that workers,
CPU engines and trainers agree to the bit.  An image is resized once, by the worker that receives it, and kept
as PNG: processors leave an image of a fitting size as it is, so SGLang's sees the same pixels too.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orhpc.errors import ModelError
from orhpc.models.families import FAMILIES
from orhpc.models.image_limits import least_max_pixels
from orhpc.types import Image

FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats that are decoded, by PIL's names."""
MAX_DECODED_PIXELS = 1 << 26
"""Maximum pixels of an image as sent: a small file can decompress to gigabytes."""
MAX_ASPECT = 200
"""Maximum ratio of an image's sides, as in the processors of the Qwen series."""


def sees_images(config: Mapping[str, Any]) -> bool:
    """Whether the model of a ``config.json`` is trained with images."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.vision is not None


class ImageProcessor:
    """The image processor of a model folder."""

    def __init__(self, folder: str, *, max_pixels: int | None = None) -> None:
        """``max_pixels``: of an image as the model sees it; None: the processor's own limit.

        Raises ModelError for a model that does not see images, or a folder without an image processor.
        """
        from transformers import AutoImageProcessor

        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None or family.vision is None:
            raise ModelError(f"model.path: {folder}: the model is trained with text only")
        self.text: str = family.vision.text
        """An image in the chat template, with one placeholder."""
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True
            )
            size = self._processor.size
            self.min_pixels, own = int(size["shortest_edge"]), int(size["longest_edge"])
            merge = int(self._processor.merge_size)
            self.factor = int(self._processor.patch_size) * merge
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"model.path: {folder}: no image processor: {reason}") from None
        self.merge = merge
        self.max_pixels = own if max_pixels is None else min(own, max_pixels)
        least = least_max_pixels(self.min_pixels, self.factor)
        if self.max_pixels < least:
            raise ModelError(f"rollout.max_image_pixels: must be at least {least} for this model")

    def fitted(self, data: bytes) -> Image:
        """Decode an image and resize it for the model.

        Raises ValueError for data that are not an image of :data:`FORMATS`, and for one that is too large.
        """
        from PIL import Image as Pil
        from PIL import ImageOps

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Pil.DecompressionBombWarning)  # our own limit is lower
                with Pil.open(io.BytesIO(data), formats=FORMATS) as image:
                    self._check_size(image.width, image.height)
                    image.load()
                    # As transformers does with images that it loads itself.
                    whole = ImageOps.exif_transpose(image).convert("RGB")
        except ValueError:
            raise
        except Pil.UnidentifiedImageError:  # its text has the address of an object in it
            raise ValueError(f"not a readable image ({', '.join(FORMATS)})") from None
        except Pil.DecompressionBombError:  # PIL's own limit, which is higher
            raise ValueError(f"an image of too many pixels; the maximum is {MAX_DECODED_PIXELS}") from None
        except Exception as error:  # noqa: BLE001  # a damaged file makes PIL raise nearly anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"not a readable image ({', '.join(FORMATS)}): {reason}") from None
        height, width = fitting_size(
            whole.height,
            whole.width,
            factor=self.factor,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        if (width, height) != whole.size:
            whole = whole.resize((width, height), Pil.Resampling(int(self._processor.resample)))
        out = io.BytesIO()
        whole.save(out, "PNG", compress_level=1)
        return Image(out.getvalue(), height // self.factor, width // self.factor)

    def _check_size(self, width: int, height: int) -> None:
        if width * height > MAX_DECODED_PIXELS:
            raise ValueError(f"an image of {width} x {height} pixels; the maximum is {MAX_DECODED_PIXELS}")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ValueError(f"an image of {width} x {height} pixels; its sides differ too much")

    def read(self, png: bytes) -> Image:
        """Return the image of a PNG that :meth:`fitted` made; raises ValueError for any other data."""
        from PIL import Image as Pil

        try:
            with Pil.open(io.BytesIO(png), formats=("PNG",)) as image:
                width, height, mode = image.width, image.height, image.mode
        except Exception as error:  # noqa: BLE001
            raise ValueError(f"not a PNG: {type(error).__name__}") from None
        # Not max_pixels: another setting may have been in effect when the image was made.
        if mode != "RGB" or width % self.factor or height % self.factor or not width * height:
            raise ValueError(
                f"a PNG of {width} x {height} pixels ({mode}) is not of a size that the model sees"
            )
        return Image(png, height // self.factor, width // self.factor)

    def pixel_values(self, images: Sequence[Image]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the inputs of the vision tower: normalized patches ``[patches, values]``, one image after
        another, and each image's patches in time, rows and columns, ``[images, 3]``."""
        from PIL import Image as Pil

        decoded = [Pil.open(io.BytesIO(image.png), formats=("PNG",)) for image in images]
        found = self._processor(images=decoded, do_resize=False, return_tensors="np")
        return found["pixel_values"].astype(np.float32, copy=False), found["image_grid_thw"]

    def smallest(self) -> Image:
        """Return a black image of one token."""
        from PIL import Image as Pil

        out = io.BytesIO()
        Pil.new("RGB", (self.factor, self.factor)).save(out, "PNG")
        return Image(out.getvalue(), 1, 1)


def folder_sees(folder: str) -> bool:
    """Whether the model of a folder sees images; False if the folder has no ``config.json``."""
    path = Path(folder, "config.json")
    return path.is_file() and sees_images(json.loads(path.read_text(encoding="utf-8")))


def image_processor(folder: str) -> ImageProcessor | None:
    """Return the processor of a model that sees images; None for others.  Raises ModelError."""
    return ImageProcessor(folder) if folder_sees(folder) else None


def processor_template(folder: str) -> str | None:
    """Return the chat template of a folder's processor, which renders images; the tokenizer's may not.

    Newer folders have one template for both (``chat_template.jinja``), which the tokenizer loads.
    """
    try:
        content = json.loads(Path(folder, "chat_template.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {folder}/chat_template.json cannot be read: {error}") from None
    return content.get("chat_template") if isinstance(content, dict) else None


def fitting_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return height and width as multiples of ``factor`` that keep the ratio as closely as possible.

    Equals ``smart_resize`` of transformers' Qwen2-VL processor, but a very long image is cut down until it
    has at most ``max_pixels``, so that the result fits again.
    """
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        scale, most = math.sqrt(height * width / max_pixels), max_pixels // factor**2
        # Rounding a side up to one patch must not leave the other too long.
        rows = min(most, max(1, math.floor(height / scale / factor)))
        columns = min(most // rows, max(1, math.floor(width / scale / factor)))
        rows = min(rows, most // columns)
    elif rows * columns * factor**2 < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * scale / factor), math.ceil(width * scale / factor)
    return rows * factor, columns * factor
