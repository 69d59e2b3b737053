"""Which failure of the project an error of torch becomes."""

from __future__ import annotations

import errno

import pytest
import torch

from orhpc.errors import InfraError, OrhpcError, OutOfMemory
from orhpc.train.process_groups import typed_failures


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (RuntimeError("CUDA error: out of memory"), OutOfMemory),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            OutOfMemory,
        ),
        (RuntimeError("NCCL error: unhandled cuda error, NCCL version 2.27: out of memory"), OutOfMemory),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OutOfMemory),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), InfraError),
        (RuntimeError("NCCL communicator was aborted on rank 3"), InfraError),
    ],
)
def test_an_error_of_torch_gets_its_type(error: Exception, expected: type[OrhpcError]) -> None:
    with pytest.raises(expected, match="wake: "), typed_failures("wake"):
        raise error


def test_an_error_of_the_program_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught, typed_failures("wake"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(caught.value, OrhpcError)
