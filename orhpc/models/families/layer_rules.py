"""Rules that several families share: which layers have experts, and the spans of their attention.

A rule gets the values of ``config.json``, completed with the family's defaults, and in most cases the
index of a layer.  A rule that only one family follows is in that family's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# --- which layers of a model with experts have them -------------------------------------------------


def every_layer(values: Mapping[str, Any], index: int) -> bool:
    return True


def after_first(values: Mapping[str, Any], index: int) -> bool:
    """All but the first layers."""
    return index >= values["first_k_dense_replace"]


def by_mlp_type(values: Mapping[str, Any], index: int) -> bool:
    """Layers listed as sparse; without a list, all but the first ones."""
    kinds = values.get("mlp_layer_types")
    return kinds[index] == "sparse" if kinds else after_first(values, index)


# --- width of the shared experts --------------------------------------------------------------------


def no_shared_experts(values: Mapping[str, Any], width: int) -> int:
    return 0


def counted_shared_experts(values: Mapping[str, Any], width: int) -> int:
    """``n_shared_experts``, each with the width of a routed expert."""
    return width * int(values.get("n_shared_experts") or 0)


# --- maximum number of keys per token; None: unlimited ----------------------------------------------


def unlimited(values: Mapping[str, Any], index: int) -> int | None:
    return None


def window_if(values: Mapping[str, Any], sliding: bool) -> int | None:
    """The sliding window, if the layer has one."""
    return values.get("sliding_window") if sliding else None


def window_in_all_layers(values: Mapping[str, Any], index: int) -> int | None:
    return window_if(values, True)
