"""torch's ``expandable_segments`` of its CUDA allocator: on in a trainer's steps that need it, else off.

With it the allocator extends one range of addresses page by page, instead of adding fixed segments in which
micro-batches of other sizes leave gaps.  It has a price: mapping and unmapping the pages of a step
take 2 to 3 ms a GB each, other processes cannot map such memory as they map buckets of weights, and SGLang
cannot release it while trainers use the GPU.  Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The first has precedence in torch 2.10 and newer."""
_OPTION = re.compile(r"(?:^|,)\s*expandable_segments\s*:\s*(\w+)\s*")


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that must be able to release all memory of its GPU."""
    plain = dict(environment)
    for name in _VARIABLES:
        if name in plain:
            plain[name] = _without_option(plain[name])
            if not plain[name]:
                del plain[name]
    return plain


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Let the allocator extend segments in the block, and only there.

    Nothing changes on a CPU, or if the user's environment has ``expandable_segments:False``.
    """
    chosen = _OPTION.search(_options())
    if device.type != "cuda" or (chosen is not None and chosen[1].lower() == "false"):
        yield
        return
    _set(expandable=True)
    try:
        yield
    finally:
        _set(expandable=False)


def use_plain_segments(device: torch.device) -> None:
    """Allocate what can be shared with other processes, also if the user's environment says otherwise."""
    if device.type == "cuda":
        _set(expandable=False)


def _options() -> str:
    """The options in this process's environment."""
    return next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")


def _set(*, expandable: bool) -> None:
    """Change the one option; torch resets the others unless they are repeated."""
    import torch

    others = _without_option(_options())
    option = f"expandable_segments:{expandable}"
    torch._C._accelerator_setAllocatorSettings(  # pyright: ignore[reportAttributeAccessIssue]
        f"{others},{option}" if others else option
    )


def _without_option(given: str) -> str:
    return _OPTION.sub("", given).lstrip(",")
