"""Rotary positions by ``config.json``: which kinds change with the length of a batch; without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orhpc.models.families import FAMILIES

_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
"""Keys of a config from which SGLang reads the longest context, the first that is set."""


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return a folder's ``config.json``, which is a valid one."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def read_text_config(folder: Path) -> Mapping[str, Any]:
    """Return the language model's part of a folder's ``config.json``, which is a valid one."""
    whole = read_config(folder)
    return whole.get("text_config") or whole


def context_of(text: Mapping[str, Any]) -> int | None:
    """Return the longest context with which SGLang serves a model; null: its config has no length.

    As ``get_context_length`` in SGLang 0.5's ``srt/utils/hf_transformers``: a factor counts unless the config
    also has the original length, and not for llama3.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = 1
    if isinstance(rope, Mapping) and "original_max_position_embeddings" not in rope:
        factor = 1 if rope.get("rope_type") == "llama3" else rope.get("factor") or 1
    lengths = (text.get(key) for key in _LENGTHS)
    length = next((length for length in lengths if length is not None), None)
    if not isinstance(length, (int, float)) or not isinstance(factor, (int, float)):
        return None
    return int(factor * length)


def rotary_kinds(text: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield kind and settings of a language model's rotary positions, for each kind of layer that has some.

    ``text``: the keys of the language model's config, with transformers' names of any release.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return
    for values in [rope] if "rope_type" in rope or "type" in rope else rope.values():
        if isinstance(values, Mapping):
            yield str(values.get("rope_type") or values.get("type") or "default"), values


def rotate_as_published(config: Any) -> None:
    """Let a model rotate as much of each head as its published config says (MiniMax-M2: ``rotary_dim``).

    ``config``: of transformers, whose release 5.12 ignores the key and rotates whole heads; 5.23 reads it
    (transformers' issue 48241, pull request 48486).
    """
    family = FAMILIES.get(config.model_type)
    rotated = getattr(config, family.rotated_key, None) if family is not None and family.rotated_key else None
    rope = getattr(config, "rope_parameters", None)
    if rotated and isinstance(rope, dict):
        rope.setdefault("partial_rotary_factor", rotated / config.head_dim)


def changing_positions(text: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the kind of length-dependent rotary positions, and the length up to which they are constant.

    transformers computes such frequencies from the longest sequence of a batch (``dynamic_rope_update``), so
    beyond that length a sample's values depend on the other samples of its batch, and on whether
    keys were cached before the sequence grew.  Null: the model's positions do not change, or the config does
    not say from which length on.
    """
    found: list[tuple[int, str]] = []
    longest = text.get("max_position_embeddings")
    for kind, values in rotary_kinds(text):
        bound = None
        if kind == "longrope":
            own = "original_max_position_embeddings"
            bound = values.get(own) or text.get(own) or longest
        elif "dynamic" in kind:
            bound = longest
        if isinstance(bound, (int, float)):
            found.append((int(bound), kind))
    return (min(found)[1], min(found)[0]) if found else None
