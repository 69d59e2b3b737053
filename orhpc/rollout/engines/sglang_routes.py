"""SGLang's routes: a cache that takes only the memory that it uses, and answers of a quarter of the bytes.

SGLang 0.5.16 keeps the routed experts of every token for which its KV cache has room in a tensor of pinned
host memory, in every rank (``BaseHostCache`` in ``srt/state_capturer/base.py``).  For Qwen3-30B-A3B with
room for three million tokens that is 4.3 GB a rank, which take seconds to allocate at the start.  Nothing
is copied between this tensor and the GPU: it is only indexed on the CPU.  So ordinary memory serves as well,
whose pages the system provides when they are first used.

An answer has the routes of all its tokens in int32, 1.5 KB a token for that model.  The scheduler, the
detokenizer and the server's process copy and encode them one after the other, so that answers which end at
the same time wait for each other.  The scheduler packs them before it sends them.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from orhpc.rollout.engines.sglang_imports import AfterImport, wrap_method

if TYPE_CHECKING:
    import torch

MODULE = "sglang.srt.state_capturer.base"
CAPTURER = "sglang.srt.state_capturer.routed_experts"


def pack_routes() -> None:
    """Let this process pack the routes of answers, once SGLang's module of them is imported."""
    sys.meta_path.insert(0, AfterImport(CAPTURER, lambda: return_packed(sys.modules[CAPTURER])))


def return_packed(module: Any) -> None:
    """Let ``module.RoutedExpertsCapturer.get_topk``, if there is one, pack the routes that it returns."""
    import torch

    from orhpc.wire.routes import pack_rows

    def packed(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        routes = own(*args, **kwargs)
        if isinstance(routes, torch.Tensor) and routes.dtype == torch.int32 and not routes.is_cuda:
            return torch.from_numpy(pack_rows(routes.numpy()))
        return routes

    wrap_method(module, "RoutedExpertsCapturer", "get_topk", packed)


def allocate_routes_when_used() -> None:
    """Let this process's cache of routes be ordinary host memory, once SGLang's module of it is imported.

    Releases that allocate it in another way than by ``torch.zeros`` (0.5.23) are not changed.
    """
    sys.meta_path.insert(0, AfterImport(MODULE, lambda: leave_unpinned(sys.modules[MODULE])))


def leave_unpinned(module: Any) -> None:
    """Let ``module.BaseHostCache``, if there is one, allocate its zeros by :func:`zeros_on_use`."""
    import torch
    from torch.overrides import TorchFunctionMode

    class ZerosOnUse(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.zeros and kwargs and kwargs.get("pin_memory"):
                return zeros_on_use(*args, dtype=kwargs["dtype"])
            return func(*args, **(kwargs or {}))

    def initialize(own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with ZerosOnUse():
            own(*args, **kwargs)

    wrap_method(module, "BaseHostCache", "__init__", initialize)


def zeros_on_use(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory, whose pages are taken when first used; ``torch.zeros`` writes them all."""
    import torch

    pages = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))  # anonymous memory is zero
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(*shape)
