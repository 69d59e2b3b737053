"""Shows a rollout's images to a model that sees.

In texts, :data:`~orhpc.rollout.environment.tools.IMAGE_MARK` stands for an image.  An image is decoded once,
when its environment sends it; from then on the rollout holds it at the size that the model sees.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pybase64

from orhpc.config import RolloutSettings
from orhpc.errors import BadAnswer, ConfigError
from orhpc.models.images import ImageProcessor
from orhpc.rollout.environment.tools import IMAGE_MARK, ToolResult
from orhpc.types import Image, PlacedImage
from orhpc.wire.images import expanded

LEFT_OUT = "[an image was left out: at most {most} are shown]"


class ImageReader:
    """Decodes images for the rollouts of one model, and puts their tokens in place."""

    def __init__(self, processor: ImageProcessor, token: int, video_token: int | None, most: int) -> None:
        """``token``, ``video_token``: placeholders; ``most``: maximum number of images of a rollout."""
        self._processor = processor
        self._most = most
        self.token = token
        self.stops: tuple[int, ...] = tuple(t for t in (token, video_token) if t is not None)
        """Ids that end a turn and the rollout: in a prompt, engines take them for an image's."""

    @classmethod
    def of(cls, model_dir: str, settings: RolloutSettings) -> ImageReader:
        """Raises ModelError for a folder without an image processor."""
        processor = ImageProcessor(model_dir, max_pixels=settings.max_image_pixels)
        config = json.loads(Path(model_dir, "config.json").read_text(encoding="utf-8"))
        return cls(
            processor, int(config["image_token_id"]), config.get("video_token_id"), settings.max_images
        )

    @property
    def text(self) -> str:
        """An image in the chat template."""
        return self._processor.text

    async def read(self, text: str, data: Sequence[str], *, seen: int, what: str) -> tuple[str, list[Image]]:
        """Decode the images of a text, in order; a notice takes the place of those that are too many.

        Args:
            text: with a mark for each image; if it was truncated, for fewer.
            data: base64, one per image.
            seen: number of images that the rollout has already.
            what: origin of the images, for messages.

        Raises:
            BadAnswer: one is not a readable image.
        """
        first, *rest = text.split(IMAGE_MARK)
        room = max(0, self._most - seen)
        images = [await asyncio.to_thread(self._decoded, one, what) for one in data[: min(room, len(rest))]]
        pieces = [first]
        for number, following in enumerate(rest):
            mark = IMAGE_MARK if number < len(images) else LEFT_OUT.format(most=self._most)
            pieces += [mark, following]
        return "".join(pieces), images

    async def shown(self, result: ToolResult, *, seen: int, what: str) -> ToolResult:
        """Decode the images of a tool's result; raises BadAnswer.

        A mark without an image, as in an error that repeats what the model wrote, is replaced: it would
        become a placeholder.
        """
        if not result.images:
            return replace(result, text=result.text.replace(IMAGE_MARK, "\ufffd"))
        text, images = await self.read(result.text, result.images, seen=seen, what=what)
        return replace(result, text=text, images=(), shown=tuple(images))

    def _decoded(self, data: str, what: str) -> Image:
        try:
            content = pybase64.b64decode(data, validate=True)
        except ValueError as error:
            is_url = data.startswith(("data:", "http:", "https:"))
            problem = "a URL, not base64" if is_url else f"not base64: {error}"
            raise BadAnswer(f"{what}: an image cannot be used: its data are {problem}") from None
        try:
            return self._processor.fitted(content)
        except ValueError as error:
            raise BadAnswer(f"{what}: an image cannot be used: {error}") from None

    def placed(
        self, ids: list[int], images: Sequence[Image], *, at: int
    ) -> tuple[list[int], list[PlacedImage]]:
        """Replace each image's placeholder by as many as it has tokens; ``at``: position of the first id."""
        try:
            return expanded(ids, images, self.token, at=at)
        except ValueError as error:
            raise ConfigError(
                f"rollout.system_prompt_template: must not contain an image's placeholder ({error})"
            ) from None


def described(text: str, images: Sequence[Image]) -> str:
    """Return the text for people: with the size in tokens in place of each image."""
    for image in images:
        text = text.replace(IMAGE_MARK, f"[image of {image.columns} x {image.rows} tokens]", 1)
    return text
