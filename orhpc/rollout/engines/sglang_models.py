"""Repairs of SGLang's models, made in every process once it has loaded its model.

SGLang 0.5.16 and 0.5.23 have a fault in models quantized to FP8: the scales of the KV cache
(``BaseKVCacheMethod`` in ``srt/layers/quantization/kv_cache.py``) are parameters, of which an engine that
sleeps loses the content.  Weight syncs do not restore them, as checkpoints do not have them.  With
``kv_cache_dtype: fp8_e4m3`` attention then divides by what the memory happens to contain, and 0.5.16 ends
with an ``AssertionError`` when it reads weights from a folder.

SGLang 0.5.16 has two more in mixtures of experts, which 0.5.23 does not have:

* The routers of GLM-4.5 and GLM-4.7-Flash multiply by a copy of their weight in float32, which they make in
  their first forward pass (``Glm4MoeGate`` in ``srt/models/glm4_moe.py``).  Weight syncs do not reach the
  copy: engines go on to choose experts by the weights with which they started.
* The routers of Mixtral, Llama 4 and MiniMax-M2 do not know their layer.  With routes recorded, the engine
  ends in its first forward pass (``RuntimeError: The expanded size of the tensor``).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orhpc.rollout.engines.sglang_imports import MODEL_RUNNER, AfterImport, wrap_method

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

_COPY = "_weight_fp32"
"""Name of a router's buffer with the copy of its weight."""
_CACHE_SCALES = ("k_scale", "v_scale")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def repair_models() -> None:
    """Let this process repair each model that it loads, once SGLang's model runner is imported."""
    sys.meta_path.insert(0, AfterImport(MODEL_RUNNER, lambda: repair_loaded(sys.modules[MODEL_RUNNER])))


def repair_loaded(module: Any) -> None:
    """Let ``module.ModelRunner.load_model`` repair the model that it has loaded."""

    def load_model(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        if followed := hold_routers_in_float32(self.model):
            log.info("%d routers use their weights, not copies that syncs do not reach", followed)
        if numbered := number_routers(self.model):
            log.info("%d routers know their layers, so that their choices can be recorded", numbered)
        if kept := keep_cache_scales(self.model, random=self.server_args.load_format == "dummy"):
            log.info("the scales of the KV cache of %d attention layers survive sleep", kept)
        return result

    wrap_method(module, "ModelRunner", "load_model", load_model)


def hold_routers_in_float32(model: nn.Module) -> int:
    """Let routers that use a float32 copy of their weight hold the weight itself in float32, as that copy.

    Returns how many have been changed.  Loading rounds nothing, as float32 holds every value of bfloat16.
    """
    from torch import nn

    changed = 0
    for router in model.modules():
        weight = router._parameters.get("weight")
        if _COPY in router._buffers and weight is not None:
            whole = nn.Parameter(weight.detach().float(), requires_grad=False)
            for name, value in vars(weight).items():  # how SGLang loads it
                setattr(whole, name, value)
            router.weight = whole
            router._buffers[_COPY] = whole.detach()
            changed += 1
    return changed


def keep_cache_scales(model: nn.Module, *, random: bool) -> int:
    """Make the scales of the KV cache buffers, which SGLang saves before it sleeps.

    ``random``: the model was filled with random numbers, so the scales are to be 1, as of a checkpoint
    without any.  Returns how many attention layers have been changed.
    """
    changed = 0
    for module in model.modules():
        scales = [module._parameters.pop(name, None) for name in _CACHE_SCALES]
        for name, scale in zip(_CACHE_SCALES, scales, strict=True):
            if scale is not None:
                value = scale.detach()  # the same memory, which graphs may have
                module.register_buffer(name, value.fill_(1.0) if random else value, persistent=False)
                if random:
                    setattr(module, f"{name}_float", 1.0)
        changed += scales[0] is not None
    return changed


def number_routers(model: nn.Module) -> int:
    """Give routers that do not know their layer its number; returns how many have been changed."""
    changed = 0
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if type(module).__name__ == "TopK" and getattr(module, "layer_id", 0) is None and layer:
            module.layer_id = int(layer[1])  # type: ignore[assignment]
            changed += 1
    return changed
