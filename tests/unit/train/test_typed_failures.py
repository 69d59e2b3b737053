"""Which failure of the project an error of torch becomes."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from orhpc.errors import InfraError, NonFinite, OrhpcError, OutOfMemory, WeightSyncFailed
from orhpc.train.actor import TrainerRank
from orhpc.train.batch import plan_batches
from orhpc.train.pace import pace_seconds
from orhpc.train.process_groups import typed_failures
from orhpc.train.weights.sender import failing_as
from tests.trainer_kit import MAX_TOKENS, make_samples

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {code} (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\n{name}\nLast error:\n{last}"
)
"""The text of torch around NCCL's."""
KINDS = {
    "cuda": ("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed."),
    "system": (
        "unhandled system error",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    ),
    "internal": ("internal error", "ncclInternalError: Internal check failed."),
    "usage": ("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
    "remote": (
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely.",
    ),
}


def nccl_error(kind: str, last: str) -> dist.DistBackendError:
    """An error of NCCL as torch raises it; ``last``: the last warning of the process."""
    code, name = KINDS[kind]
    return dist.DistBackendError(NCCL.format(code=code, name=name, last=last))


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 4096 bytes"),
    RuntimeError("unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://x"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("/TransformerEngine/common/x.cpp:12 in function f: CUDA Error: out of memory"),
    nccl_error("cuda", "Failed to CUDA calloc 10485760 bytes"),
    nccl_error("cuda", "Failed to CUDA calloc async 2432 bytes"),
    nccl_error("cuda", "Failed to CUDA host alloc 4923392 bytes"),
    nccl_error("cuda", "Failed to CUDA malloc 536870912 bytes"),
    nccl_error("cuda", "Cuda failure 2 'out of memory'"),
    nccl_error("cuda", "Cuda failure 'out of memory'"),
    RuntimeError("NCCL error: unhandled cuda error, NCCL version 2.27: out of memory"),
    dist.DistBackendError("x/" * 300 + str(nccl_error("cuda", "Failed to CUDA calloc 8 bytes"))),
]
COMMUNICATION = [
    OSError(errno.ECONNRESET, "Connection reset by peer"),
    RuntimeError("NCCL communicator was aborted on rank 3"),
    RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
    dist.DistNetworkError("The client socket has timed out after 60000ms"),
    nccl_error("cuda", "Cuda failure 1 'invalid argument'"),
    nccl_error("cuda", "Cuda failure 700 'an illegal memory access was encountered'"),
    nccl_error("system", "Error while creating shared memory segment /dev/shm/nccl-a (size 33030528)"),
    nccl_error("system", "Call to ibv_reg_mr failed with error Cannot allocate memory"),
    nccl_error("internal", "Failed to CUDA calloc 8 bytes"),  # of an earlier failure, as below
    nccl_error("usage", "Failed to CUDA calloc 8 bytes"),
    nccl_error("remote", "socketProgress: Connection closed by remote peer node-b<51159>"),
    # NCCL keeps the last warning of the process, here of a failure from which the run has recovered.
    nccl_error("remote", "Failed to CUDA calloc 10485760 bytes"),
    nccl_error("system", "Cuda failure 2 'out of memory'"),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(error, OutOfMemory) for error in NO_MEMORY] + [(error, InfraError) for error in COMMUNICATION],
    ids=lambda value: f"{value}"[-60:].strip() if isinstance(value, Exception) else value.__name__,
)
def test_an_error_of_torch_gets_its_type(error: Exception, expected: type[OrhpcError]) -> None:
    with pytest.raises(expected, match="wake: "), typed_failures("wake"):
        raise error


@pytest.mark.parametrize(
    ("errors", "expected"), [(NO_MEMORY, OutOfMemory), (COMMUNICATION, WeightSyncFailed)]
)
def test_a_transfer_of_weights_fails_as_the_rest(errors: list[Exception], expected: type[OrhpcError]) -> None:
    for error in errors:
        if not isinstance(error, MemoryError):  # it passes, and typed_failures converts it
            with pytest.raises(expected, match="no bucket: "), failing_as("no bucket"):
                raise error


def test_a_device_without_memory_for_a_library_has_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace is only a diagnosis: it ends no run."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(torch, "mm", fails)
    assert pace_seconds(torch.device("cpu")) is None


def test_an_error_of_the_program_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught, typed_failures("wake"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(caught.value, OrhpcError)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1])
def test_a_step_that_is_not_finite_says_how_many_updates_it_had_made(
    make: Callable[..., TrainerRank], broken: int
) -> None:
    rank = make(minibatches=2)
    before = [shard.tensor.clone() for shard in rank.backend.shards()]
    samples = [
        replace(s, advantage=float("nan")) if i == 4 * broken else s for i, s in enumerate(make_samples(8))
    ]
    batches = plan_batches(samples, ranks=1, n_minibatches=2, max_tokens=MAX_TOKENS).minibatches
    with pytest.raises(NonFinite) as caught:
        rank.step(batches, step=0)
    after = [shard.tensor for shard in rank.backend.shards()]
    assert all(map(torch.equal, before, after)) is (broken == 0)
    assert (
        pickle.loads(pickle.dumps(caught.value)).made == broken == rank.backend.progress()["optimiser_steps"]
    )
