"""An engine that ran out of memory starts again with lower limits; and why one has ended."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.process.ports import free_ports
from orhpc.rollout.engines.process import EngineProcess

HOST = "127.0.0.1"


class Printing(EngineProcess):
    """Instead of a server, a process that prints a line and ends."""

    def prints(self, line: str, then: str = "") -> None:
        self._argv = [sys.executable, "-c", f"print({line!r}, flush=True); {then}", "--"]
        self.start()
        end = time.monotonic() + 30
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)


@pytest.fixture
def engine(tmp_path: Path) -> Printing:
    config = load_config("configs/tiny.yaml", ["engine.max_running=32", "engine.memory_fraction=0.7"])
    (port,) = free_ports(1, HOST)
    return Printing(config, "model", HOST, port, None, str(tmp_path / "engine.log"), 0)


def test_only_the_log_since_the_last_start_counts(engine: Printing) -> None:
    assert not engine.ran_out_of_memory()
    engine.prints("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert engine.ran_out_of_memory()
    engine.prints("RuntimeError: something else")
    assert not engine.ran_out_of_memory()


def test_an_engine_says_why_it_has_ended(engine: Printing, tmp_path: Path) -> None:
    log = f"log: {tmp_path / 'engine.log'}"
    assert engine.why_ended() == ""
    engine.prints("AssertionError\nSIGQUIT received", "raise SystemExit(3)")
    assert engine.why_ended() == f"AssertionError; exit code 3; {log}"
    engine.prints("[12:00] serving", "import os; os.kill(os.getpid(), 9)")
    assert engine.why_ended() == f"signal SIGKILL; {log}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: CUDA out of memory.", "MemoryError", "what():  std::bad_alloc",
        "torch.AcceleratorError: CUDA error: out of memory", "RuntimeError: CUDA driver error: out of memory",
        "Failed to CUDA calloc 10485760 bytes", "Failed to CUDA host alloc 4923392 bytes",
        "node-a:12:34 [0] enqueue.cc:1085 NCCL WARN Cuda failure 2 'out of memory'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    ],
)  # fmt: skip
def test_what_libraries_log_is_recognized(engine: Printing, line: str) -> None:
    engine.prints(line)
    assert engine.ran_out_of_memory()


def test_each_time_the_limits_are_lowered(engine: Printing) -> None:
    found = [engine.lower_limits() for _ in range(7)]
    assert found[:3] == [(16, 0.65), (8, 0.6), (4, 0.55)]
    assert [requests for requests, _ in found[3:]] == [2, 1, 1, 1]
    assert all(0 < later < earlier for (_, earlier), (_, later) in itertools.pairwise(found))
    command = engine._argv
    assert command[command.index("--max-running-requests") + 1] == "1"
