"""Images against transformers' own processors: sizes, pixels, tokens, positions."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from orhpc.config.files import load_config
from orhpc.errors import ModelError
from orhpc.launch.checks import checklist
from orhpc.models import shape_of
from orhpc.models.image_limits import check_max_pixels
from orhpc.models.images import MAX_DECODED_PIXELS, ImageProcessor, fitting_size, sees_images
from orhpc.types import PlacedImage
from orhpc.wire.images import collapsed, expanded, rotary_positions
from tests.model_configs import SEEING, TINY
from tests.seeing_models import picture, seeing_model, write_processor


def folder_of(folder: Path, name: str = "qwen2.5-vl", **more: Any) -> str:
    write_processor(folder, SEEING[name]["vision_config"]["patch_size"], **more)
    (folder / "config.json").write_text(f'{{"model_type": "{SEEING[name]["model_type"]}"}}')
    return str(folder)


def test_sizes_equal_transformers_and_fit_again() -> None:
    rng = np.random.default_rng(3)
    for _ in range(3000):
        height, width = (int(2 ** rng.uniform(0, 12)) for _ in range(2))
        factor = int(rng.choice([28, 32]))
        bounds = {
            "min_pixels": int(rng.choice([3136, 65536])),
            "max_pixels": int(rng.choice([262144, 1 << 20])),
        }
        if max(height, width) > 200 * min(height, width):
            continue
        ours = fitting_size(height, width, factor=factor, **bounds)
        theirs = smart_resize(height, width, factor=factor, **bounds)
        if theirs[0] * theirs[1] <= bounds["max_pixels"]:
            assert ours == theirs
        assert ours[0] * ours[1] <= bounds["max_pixels"]
        assert smart_resize(*ours, factor=factor, **bounds) == ours


@pytest.mark.parametrize("name", sorted(SEEING))
@pytest.mark.parametrize(("width", "height", "kind"), [(61, 203, "PNG"), (400, 70, "JPEG"), (30, 31, "WEBP")])
def test_pixel_values_equal_the_processors_own(
    tmp_path: Path, name: str, width: int, height: int, kind: str
) -> None:
    folder = folder_of(tmp_path, name, max_pixels=20_000)
    data = picture(width, height, kind=kind)
    ours = ImageProcessor(folder)
    image = ours.fitted(data)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=[Pil.open(io.BytesIO(data))], return_tensors="np"
    )
    pixels, grids = ours.pixel_values([image])
    assert np.array_equal(pixels, theirs["pixel_values"].astype(np.float32))
    assert np.array_equal(grids, theirs["image_grid_thw"])
    assert image.tokens == grids.prod() // 4
    assert ours.read(image.png) == image
    # SGLang's processor gets the PNG and may resize: it must not change it.
    again = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=[Pil.open(io.BytesIO(image.png))], return_tensors="np"
    )
    assert np.array_equal(again["pixel_values"], theirs["pixel_values"])


def test_fewer_pixels_are_allowed_by_a_setting(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert ImageProcessor(folder).fitted(picture(280, 280)).tokens == 100
    assert ImageProcessor(folder, max_pixels=20_000).fitted(picture(280, 280)).tokens == 25
    with pytest.raises(ModelError, match="max_image_pixels: must be at least 3136"):
        ImageProcessor(folder, max_pixels=100)


@pytest.mark.parametrize("name", sorted(SEEING))
def test_too_few_pixels_are_refused_before_the_queue(tmp_path: Path, name: str) -> None:
    processor = ImageProcessor(folder_of(tmp_path, name))
    least = 4 * max(processor.min_pixels, processor.factor**2)
    ImageProcessor(str(tmp_path), max_pixels=least)
    check_max_pixels(tmp_path, least)
    words = [f"model.path={tmp_path}", f"rollout.max_image_pixels={least - 1}"]
    check = next(c for c in checklist.of_config(load_config("gpu-smollm2.yaml", words)) if c.name == "model")
    with pytest.raises(ModelError, match=f"rollout.max_image_pixels: must be at least {least} for"):
        check.run()


@pytest.mark.parametrize("name", sorted(SEEING))
def test_too_few_pixels_are_refused_of_what_is_here_of_a_hub_model(tmp_path: Path, name: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SEEING[name]))
    least = 4 * (2 * SEEING[name]["vision_config"]["patch_size"]) ** 2
    check_max_pixels(tmp_path, least)
    with pytest.raises(ModelError, match=f"rollout.max_image_pixels: must be at least {least} for"):
        check_max_pixels(tmp_path, least - 1)
    config.write_text(json.dumps(SEEING[name] | {"vision_config": {"patch_size": "large"}}))
    with pytest.raises(ModelError, match="sizes of patches are invalid"):
        check_max_pixels(tmp_path, least)
    config.write_text(json.dumps(TINY["llama"]))
    check_max_pixels(tmp_path, 1)


def bomb() -> bytes:
    """A PNG that declares 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    head = (60_000).to_bytes(4) * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1 << 16)))


def gif() -> bytes:
    out = io.BytesIO()
    Pil.new("RGB", (60, 60)).save(out, "GIF")
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", r"not a readable image \(PNG, JPEG, WEBP\)$"),
        (b"not an image at all", r"not a readable image \(PNG, JPEG, WEBP\)$"),
        (picture(60, 60)[:-2000], "not a readable image"),
        (gif(), r"not a readable image \(PNG, JPEG, WEBP\)$"),
        (bomb(), f"pixels; the maximum is {MAX_DECODED_PIXELS}$"),
        (picture(2, 600), "its sides differ too much"),
    ],
)
def test_hostile_images_are_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    processor = ImageProcessor(folder_of(tmp_path))
    with pytest.raises(ValueError, match=problem):
        processor.fitted(data)
    assert MAX_DECODED_PIXELS < 60_000**2


def test_models_without_a_usable_processor_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="text only"):
        ImageProcessor(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ModelError, match="no image processor"):
        ImageProcessor(str(tmp_path))
    assert not any(sees_images(content) for content in TINY.values())
    assert all(sees_images(content) for content in SEEING.values())


@pytest.mark.parametrize("name", sorted(SEEING))
def test_positions_equal_transformers(tmp_path: Path, name: str) -> None:
    model: Any = seeing_model(name, tmp_path)
    processor, token = ImageProcessor(str(tmp_path)), model.config.image_token_id
    images = [processor.fitted(picture(w, h, w)) for w, h in ((140, 60), (64, 200), (64, 64))]
    ids, placed = expanded([1, 2, token, 3, token, token, 4, 5], images, token)
    _, grids = processor.pixel_values(images)
    types = torch.tensor([[int(i == token) for i in ids]])
    # Neighboring images are separated by markers in every real rollout; transformers needs that.
    ids2, placed2 = expanded([1, 2, token, 3, token, 9, token, 4, 5], images, token, at=7)
    types = torch.tensor([[int(i == token) for i in ids2]])
    theirs, _ = model.model.get_rope_index(
        torch.tensor([ids2]), mm_token_type_ids=types, image_grid_thw=torch.from_numpy(grids)
    )
    shifted = [PlacedImage(p.image, p.start - 7) for p in placed2]
    assert np.array_equal(rotary_positions(len(ids2), shifted), theirs[:, 0].numpy())
    assert [p.end - p.start for p in placed] == [i.tokens for i in images]
    assert collapsed(np.array(ids, np.int32), placed).tolist() == [1, 2, token, 3, token, token, 4, 5]
    with pytest.raises(ValueError, match="1 placeholders for 3 images"):
        expanded([token], images, token)


@pytest.mark.parametrize("name", sorted(SEEING))
def test_names_and_shapes_equal_those_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = seeing_model(name, tmp_path)
    content = model.config.to_dict()
    found = revert_weight_conversion(model, dict(model.state_dict()))
    shape = shape_of(content)
    assert {n: tuple(t.shape) for n, t in found.items()} == dict(i for t in shape.tensors() for i in t.each())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    tower = sum(p.numel() for p in model.model.visual.parameters())
    assert shape.parameters - shape.active_parameters == tower
    flat = {**content, **content["text_config"], "model_type": content["model_type"], "text_config": None}
    assert shape_of(flat) == shape  # as the hub's Qwen2.5-VL has it
