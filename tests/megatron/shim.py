"""Makes megatron-core, which expects CUDA devices everywhere, run on a CPU with gloo.  For tests only.

:func:`install` replaces only the parts of ``torch.cuda`` that megatron-core uses, and gives each of its
modules a ``torch`` in which the device ``"cuda"`` is the CPU.  The arithmetic, the schedules,
the collectives and the optimizer are not replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
import types
import warnings
from typing import Any

import torch

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like", "ones_like")
_installed = False


class _Anything:
    """A stream, an event or a timer whose methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _TorchOnCpu(types.ModuleType):
    """``torch``, with the device ``cuda`` mapped to the CPU in what makes tensors."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and "cuda" in str(device):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def install() -> None:
    """Prepare this process, before megatron-core is used; safe to call again."""
    global _installed
    if _installed:
        return
    _installed = True
    warnings.filterwarnings("ignore")
    _fake_cuda()
    _leave_out_triton()
    import torch._dynamo

    torch._dynamo.config.disable = True
    import megatron.core as core

    for part in (
        "transformer",
        "models.gpt",
        "models.common",
        "optimizer",
        "distributed",
        "pipeline_parallel",
        "tensor_parallel",
    ):
        _import_all(f"megatron.core.{part}")
    importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    assert core is not None
    proxy = _TorchOnCpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]
    _patch_megatron()


def _import_all(package: str) -> None:
    module = importlib.import_module(package)
    for found in pkgutil.iter_modules(module.__path__):
        with contextlib.suppress(Exception):  # modules that need GPU libraries are not used here
            importlib.import_module(f"{package}.{found.name}")
    if package.endswith("transformer"):
        _import_all(f"{package}.moe")


def _fake_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    for name in ("synchronize", "empty_cache", "set_device", "nvtx_range_push"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = cuda.Event = _Anything
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Anything()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = lambda call, **_: call()
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    plain_type = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return plain_type(self, *args, **kwargs)
        return plain_type(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_of  # type: ignore[method-assign,assignment]


def _leave_out_triton() -> None:
    """Stub the only module that imports triton, which is not used here."""
    if importlib.util.find_spec("triton") is None:
        name = "megatron.core.transformer.moe.ops.paged_stash"
        stand_in = types.ModuleType(name)

        def attribute(wanted: str) -> Any:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return _Anything

        stand_in.__getattr__ = attribute  # type: ignore[method-assign]
        sys.modules[name] = stand_in


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    mcore_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved
    _allow_uneven_parts()


def _allow_uneven_parts() -> None:
    """Pad gathers and scatters of parts with different length, which NCCL supports and gloo does not."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gathered(tensor: torch.Tensor, group: Any, sizes: Any = None, *rest: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(tensor, group, sizes, *rest)
        sizes = [int(size) for size in sizes]
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scattered(tensor: torch.Tensor, group: Any, sizes: Any = None, *rest: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter(tensor, group, sizes, *rest)
        total = tensor.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gathered
    mappings._reduce_scatter_along_first_dim = scattered
