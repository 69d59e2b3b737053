"""Which errors say that memory is exhausted: of torch, CUDA, and libraries that allocate without torch.

NCCL, cuBLAS, cuDNN and TransformerEngine allocate from the driver.  What they cannot get may lie free in the
cache of torch's allocator, and their errors have no class: only the text tells.
"""

from __future__ import annotations

import errno
import re

_SIGNS = (
    "out of memory",  # CUDA, its driver, TransformerEngine, Triton, NCCL's "Cuda failure 2 'out of memory'"
    "out_of_memory",  # CUDA_ERROR_OUT_OF_MEMORY
    "cudaerrormemoryallocation",
    "failed to cuda calloc",  # NCCL: device memory
    "failed to cuda malloc",
    "failed to cuda host alloc",  # NCCL: pinned memory
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "host_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
    "device_allocation_failed",
    "can't allocate memory",  # torch's allocator on CPUs
    "cannot allocate memory",  # ENOMEM in the text of another error
    "not enough memory",
)
"""Parts of the texts, in lower case."""
_OTHER_NCCL_FAILURES = (
    *("ncclsystemerror", "ncclremoteerror", "ncclinternalerror", "ncclinvalidusage", "ncclinvalidargument"),
    *("system error", "remote process exited"),
)
"""Kinds of NCCL's failures that are not of CUDA.  What follows as "Last error" may be older than the failure:
NCCL keeps the last warning of the process, which after a recovery from a lack of memory names memory."""
_CUDA_FAILURE = re.compile(r"cuda failure (\d+)")
_MEMORY_ALLOCATION = "2"
"""Number of cudaErrorMemoryAllocation."""


def exhausted_memory(error: BaseException) -> bool:
    """Whether this error says that device or host memory did not suffice."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's; Ray's
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _says_exhausted(str(error).lower())


def _says_exhausted(text: str) -> bool:
    if "nccl" in text:
        if any(failure in text for failure in _OTHER_NCCL_FAILURES):
            return False
        number = _CUDA_FAILURE.search(text)
        if number is not None and number[1] != _MEMORY_ALLOCATION:
            return False
    return any(sign in text for sign in _SIGNS)
