"""What the allocator's expandable segments cost and gain, and whether buckets can be shared meanwhile.

    python tests/gpu/expandable_segments.py

In turns with plain and with expandable segments, in a new process each: passes of 48 layers over
micro-batches of different sizes, first in memory that the driver has yet to give, then again; afterwards the
memory is given back.  Prints seconds, and the memory that the allocator held over what tensors used.  Then
another process maps a bucket that was allocated after such a pass; the exit code is 1 if it read other bytes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).parents[2]))

from orhpc.process.cuda_allocator import expandable_segments, use_plain_segments
from orhpc.wire.weights import shared_bucket

LAYERS = 48
TOKENS = (45_056, 31_700, 40_300, 24_576, 44_100)
LAYER_BYTES = (16_384, 32_768, 16_384, 98_304)
"""Of a token: tensors that a layer allocates; it frees all but the first until the pass is over."""
GPU = torch.device("cuda")


def one_pass(tokens: int, chance: random.Random) -> None:
    """Allocate as a forward and backward pass with recomputed layers does; experts' shares vary."""
    kept = []
    for _ in range(LAYERS):
        kept.append(torch.empty(tokens * LAYER_BYTES[0], dtype=torch.uint8, device=GPU))
        _layer(tokens, chance)
    while kept:
        _layer(tokens, chance)
        kept.pop()


def _layer(tokens: int, chance: random.Random) -> None:
    share = chance.uniform(0.7, 1.3)
    held = [torch.empty(int(tokens * b * share), dtype=torch.uint8, device=GPU) for b in LAYER_BYTES[1:]]
    held.append(torch.empty(int(tokens * LAYER_BYTES[-1] * share), dtype=torch.uint8, device=GPU))


def passes(kind: str) -> None:
    """Print one row for a kind of segments."""
    use_plain_segments(GPU)
    torch.empty(1, device=GPU)
    chance = random.Random(1)
    with expandable_segments(GPU):
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            for tokens in TOKENS:
                one_pass(tokens, chance)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    held, used = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    began = time.perf_counter()
    torch.cuda.empty_cache()
    given_back = time.perf_counter() - began
    print(
        f"{kind}: passes {', '.join(f'{s:.3f}' for s in seconds)} s, given back in {given_back:.3f} s; "
        f"held {held / 1e9:.1f} GB for {used / 1e9:.1f} of tensors, {held / used:.3f}",
        flush=True,
    )


def _read(received: multiprocessing.Queue, answer: multiprocessing.Queue) -> None:
    answer.put(int(received.get().sum()))


def sharing() -> bool:
    """Whether another process reads the bytes of a bucket made after a pass with expandable segments."""
    use_plain_segments(GPU)
    with expandable_segments(GPU):
        one_pass(TOKENS[0], random.Random(1))
    bucket = shared_bucket(64 << 20, GPU)
    bucket.fill_(3)
    context = multiprocessing.get_context("spawn")
    sent, answer = context.Queue(), context.Queue()
    reader = context.Process(target=_read, args=(sent, answer))
    reader.start()
    sent.put(bucket)
    right = answer.get(timeout=120) == 3 * bucket.numel()
    reader.join()
    return right


def main() -> int:
    if len(sys.argv) > 1:
        passes(sys.argv[1])
        return 0
    for kind in ("plain", "expandable") * 2:
        chosen = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"} if kind == "plain" else {}
        subprocess.run([sys.executable, __file__, kind], env={**os.environ, **chosen}, check=True)
    right = sharing()
    print("another process read the bucket" if right else "FAIL: another process read other bytes")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
