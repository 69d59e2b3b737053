"""Measure the phases of a trainer's sleep and wake on one GPU, with small tensors and large ones.

    python tests/gpu/residence_check.py

Takes half a minute. Tensors allocated while the others are awake must not keep the memory of the others
allocated. Prints each phase's median of five rounds after the first, and the time to transfer the bytes over
the bus (one pinned copy of the same size), with torch's default device memory and with
``expandable_segments``, which the driver maps differently. The exit code is the number of phases slower than
four fifths of the bus's speed, plus the cases of memory that was not freed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.train.sleep import residence  # noqa: E402

DEVICE = torch.device("cuda", 0)
SMOLLM2 = [
    (576, 576),
    (192, 576),
    (192, 576),
    (576, 576),
    (1536, 576),
    (1536, 576),
    (576, 1536),
    (576,),
    (576,),
]
"""Parameters of one of SmolLM2-135M's thirty layers."""

Times = dict[str, list[float]]


class Timed(residence.OffloadManager):
    """Measures each phase; a synchronization after each phase makes it slightly longer."""

    def __init__(self, times: Times) -> None:
        super().__init__(DEVICE)
        self.times = times

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.times.setdefault(name, []).append(time.perf_counter() - began)

    def _reserve(self, sizes: object) -> None:
        with self.phase("reserve"):
            super()._reserve(sizes)  # type: ignore[arg-type]

    def _runs(self, blocks: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with self.phase("find runs"):
            found = list(super()._runs(blocks))  # type: ignore[arg-type]
        self.times.setdefault("runs", []).append(len(found))
        return iter(found)


def bus(size: int) -> tuple[float, float]:
    """Seconds to copy this many bytes to the host and back."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    found: list[float] = []
    for target, source in ((host, device), (device, host)):
        rounds: list[float] = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rounds.append(time.perf_counter() - began)
        found.append(statistics.median(rounds[1:]))
    return found[0], found[1]


def compare(name: str, shapes: list[tuple[int, ...]]) -> int:
    tensors = [torch.randn(shape, device=DEVICE) for shape in shapes]
    check = [t[..., :1].clone() for t in tensors]
    times: Times = {}
    whole: Times = {"sleep": [], "wake": []}
    plain, timed = residence.OffloadManager(DEVICE), Timed(times)
    for each in (plain, timed):
        for _ in range(6):
            for what in ("sleep", "wake"):
                each.changing()
                torch.cuda.synchronize()
                began = time.perf_counter()
                each.sleep(tensors) if what == "sleep" else each.wake()
                if each is plain:
                    whole[what].append(time.perf_counter() - began)
    assert all(torch.equal(t[..., :1], was) for t, was in zip(tensors, check, strict=True))
    size = sum(t.nbytes for t in tensors)
    down, up = bus(size)
    wanted = {"sleep": down, "wake": up}
    print(f"{name}: {len(tensors)} tensors, {size / 1e9:.2f} GB")
    missed = 0
    for what, seconds in whole.items():
        median = statistics.median(seconds[1:])
        share = wanted[what] / median
        missed += share < 0.8
        took = f"{median:.4f} s (first {seconds[0]:.2f})"
        print(f"  {what}: {took}, {share:.2f} of the speed of the bus, which takes {wanted[what]:.4f} s")
    for phase, values in times.items():
        print(f"    {phase}: {statistics.median(values[1:]):.4f}")
    print(f"    resize to nothing and back: {resizing(tensors):.4f}; empty_cache {emptying(size):.4f}")
    return missed


def beside() -> int:
    """The waiting time of a trainer when most bytes are moved during its work, and their correctness.

    GEMMs stand for an update and for a sync; the check reads the bytes that arrived last, after them.
    """
    weights = [torch.randn((4096, 4096), device=DEVICE) for _ in range(8)]
    moments = [torch.randint(1000, (4096, 4096), device=DEVICE).float() for _ in range(64)]  # exact sums
    sums = [t.double().sum() for t in moments]
    factor = torch.randn((8192, 8192), device=DEVICE, dtype=torch.bfloat16)
    place = residence.OffloadManager(DEVICE)
    waits: Times = {"sleep": [], "wake": []}
    wrong = 0
    for turn in range(4):
        place.begin(weights, moments)
        _products(factor, 400)
        for what in ("sleep", "wake"):
            torch.cuda.current_stream().synchronize()
            began = time.perf_counter()
            place.sleep(weights, moments) if what == "sleep" else place.wake()
            waits[what].append(time.perf_counter() - began)
        _products(factor, 400)
        place.changing()
        for tensor, total in zip(moments, sums, strict=True):
            wrong += not torch.equal(tensor.double().sum(), total + turn * tensor.numel())
            tensor += 1
    size = sum(t.nbytes for t in (*weights, *moments))
    down, up = bus(size)
    note = ", ".join(f"{what} {statistics.median(seconds[1:]):.4f} s" for what, seconds in waits.items())
    print(f"beside other work, {size / 1e9:.2f} GB, an eighth of it weights: {note}")
    print(f"  over the bus all of it takes {down:.4f} and {up:.4f} s; {wrong} tensors wrong")
    slow = statistics.median(waits["wake"][1:]) > up / 2
    return wrong + slow


def passing() -> int:
    """The delay of a step's small copies by the large ones of sleep and wake, in both directions.

    An update sends each micro-batch's tokens, and every layer's GEMMs need numbers from the host.  If these
    waited for a large copy, overlapping it would not help.
    """
    late = [torch.randn((4096, 4096), device=DEVICE) for _ in range(128)]
    factor = torch.randn((4096, 4096), device=DEVICE, dtype=torch.bfloat16)
    small = torch.ones(4096).pin_memory()
    place = residence.OffloadManager(DEVICE)

    def steps() -> float:
        """Seconds of forty GEMMs, each of which waits for a small copy in both directions."""
        began = time.perf_counter()
        for _ in range(40):
            factor[0].copy_(small.to(DEVICE, non_blocking=True))
            (factor @ factor)[0, :8].tolist()
        return time.perf_counter() - began

    place.sleep([], late)  # allocates the buffer and loads the kernels
    place.wake()
    place.settle()
    torch.cuda.synchronize()
    alone = statistics.median(steps() for _ in range(5))
    took: Times = {"wake": [], "begin": []}
    for _ in range(4):
        place.changing()
        torch.cuda.synchronize()
        place.begin([], late)
        took["begin"].append(steps())
        place.sleep([], late)
        place.wake()
        took["wake"].append(steps())
    whole = bus(sum(t.nbytes for t in late))
    slow = 0
    for (what, seconds), copying in zip(took.items(), reversed(whole), strict=True):
        found = statistics.median(seconds[1:])
        slow += found > alone + copying / 4
        note = f"small copies beside {what}: 40 steps in {found:.4f} s, alone {alone:.4f}"
        print(f"{note}; the large copies take {copying:.4f}")
    return slow


def _products(factor: torch.Tensor, count: int) -> None:
    for _ in range(count):
        factor @ factor


class Careless(residence.OffloadManager):
    """Leaves unused parts of its segments to other tensors."""

    def _fill(self, storages: object) -> None:
        pass


def held_back(kind: type[residence.OffloadManager]) -> float:
    """Share of the tensors' memory that a sleep does not free, in the course of a trainer's steps.

    Tensors that a step caches permanently (position tables, workspaces) leave parts of their segments free,
    and some of the moved tensors are allocated there when they return.
    """
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    tensors = [torch.randn((1024, 1024), device=DEVICE) for _ in range(300)]
    size = sum(t.nbytes for t in tensors)
    place = kind(DEVICE)
    gradients = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    stay: list[torch.Tensor] = []
    shares: list[float] = []
    for _ in range(4):
        awake = torch.cuda.memory_reserved()
        place.drop([gradients])
        dropped = awake - torch.cuda.memory_reserved()
        assert dropped >= size, f"{dropped} of {size} bytes of gradients given back while the rest is there"
        place.sleep(tensors)
        own = sum(t.nbytes for t in stay)
        shares.append((torch.cuda.memory_reserved() - before - own) / size)
        place.wake()
        stay += [torch.empty(mib << 20, dtype=torch.uint8, device=DEVICE) for mib in (3, 2, 12)]
    return max(shares)


def whole_or_not() -> int:
    """Both variants; the careless one shows that the check detects the problem."""
    ours, careless = held_back(residence.OffloadManager), held_back(Careless)
    print(f"held back by what came meanwhile: {ours:.3f} of the memory, without filling {careless:.3f}")
    return int(ours > 0.1)


def resizing(tensors: list[torch.Tensor]) -> float:
    """Seconds to allocate the storages, from memory cached by the allocator."""
    storages = [(t.untyped_storage(), t.untyped_storage().nbytes()) for t in tensors]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for storage, _ in storages:
        storage.resize_(0)
    for storage, size in storages:
        storage.resize_(size)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def emptying(size: int) -> float:
    """Seconds to return one segment to the driver."""
    torch.cuda.empty_cache()
    torch.empty(size, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda.empty_cache()
    return time.perf_counter() - began


def apart(kind: str) -> int:
    """Run the comparison with one kind of device memory in a separate process."""
    print(f"== {kind}", flush=True)
    settings = {} if kind == "usual" else {"PYTORCH_CUDA_ALLOC_CONF": kind}
    return subprocess.run(
        [sys.executable, __file__, kind], env={**os.environ, **settings}, check=False
    ).returncode


def main() -> int:
    if len(sys.argv) == 1:
        return sum(apart(kind) for kind in ("usual", "expandable_segments:True"))
    torch.cuda.set_device(DEVICE)
    missed = whole_or_not()
    states = 3  # weight, and AdamW's two moments
    missed += compare("SmolLM2-135M", [(49152, 576)] * states + SMOLLM2 * 30 * states)
    missed += beside() + passing()
    return missed + compare("large", [(4096, 4096)] * 128)


if __name__ == "__main__":
    sys.exit(main())
