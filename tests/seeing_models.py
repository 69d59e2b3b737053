"""Tiny random models that see images, with the tokenizer and processor files of a model folder."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from tests.model_configs import SEEING

CONTROLS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{%- macro show(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for item in content -%}{%- if item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in item -%}{{- item.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' -}}{{- show(m.content) -}}{{- '\\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\\n' -}}{{- show(m.content) -}}{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Renders contents and results of tools as Qwen3-VL's template does."""
STD, MEAN = [0.26862954, 0.26130258, 0.27577711], [0.48145466, 0.4578275, 0.40821073]


def write_processor(folder: Path, patch: int, *, max_pixels: int = 1 << 20) -> dict[str, int]:
    """Write a byte-level tokenizer and the image processor; return the ids of the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROLS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    about = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": (2 * patch) ** 2,
        "max_pixels": max_pixels,
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return {token: int(inner.token_to_id(token)) for token in CONTROLS}


def seeing_model(
    name: str,
    folder: Path,
    *,
    max_pixels: int = 1 << 20,
    std: float = 0.15,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Write a tiny model of :data:`SEEING` as a model folder, and return it.

    ``std``: of the random weights; by default large enough that every part matters.
    ``text``, ``vision``: other sizes of the two parts.
    """
    content: dict[str, Any] = json.loads(json.dumps(SEEING[name]))
    content["text_config"] |= text or {}
    content["vision_config"] |= vision or {}
    ids = write_processor(folder, content["vision_config"]["patch_size"], max_pixels=max_pixels)
    content["text_config"] |= {"vocab_size": len(ids) + 256, "eos_token_id": ids["<|im_end|>"]}
    for key, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        content[key] = ids[token]
    torch.manual_seed(7)
    model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**content), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    model.save_pretrained(folder)
    return model.eval()


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """An encoded image of random pixels."""
    rng = np.random.default_rng(seed)
    out = io.BytesIO()
    Pil.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(out, kind)
    return out.getvalue()


def seeing_models(root: Path) -> dict[str, str]:
    """Write a folder of each model that sees; returns the folders by name."""
    for name in SEEING:
        seeing_model(name, root / name)
    return {name: str(root / name) for name in SEEING}
