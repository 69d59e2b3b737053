"""Throughput of a copy of a rank's state to another node's memory, here to another process over loopback.

    python -m benchmarks.peer_copies [--gb 2] [--repeats 8]

Both sides are those of a run: a rank's copies (orhpc.train.checkpoint.memory) and the other node's holder
(orhpc.train.checkpoint.copy_holder), each with a state folder of its own in /dev/shm.  The first two copies
also allocate the receiver's files.  For comparison, ``memcpy`` is torch's copy of these bytes on one thread.
Loopback costs processor time that a network adapter takes off the hosts, and has no latency: a network gives
other figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from orhpc.train.backend import Shard
from orhpc.train.checkpoint.copy_files import CopyId
from orhpc.train.checkpoint.copy_holder import CopyHolder
from orhpc.train.checkpoint.memory import StateCopies

HOST = "127.0.0.1"


def hold(pipe: Any, folder: str) -> None:
    """The other node: receives until the pipe is closed, then reports its processor time."""
    holder = CopyHolder(Path(folder))
    pipe.send(holder.listen(HOST))
    pipe.recv()
    pipe.send(time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state, 10^9 bytes")
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = torch.rand(int(options.gb * 1e9 / 4))
    shards = [Shard("model/w", state, tuple(state.shape), 0)]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="orhpc-state-") as own,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="orhpc-state-") as other,
    ):
        pipe, theirs = context.Pipe()
        process = context.Process(target=hold, args=(theirs, other))
        process.start()
        target = pipe.recv()
        copies = StateCopies(Path(own), 0, torch.device("cpu"))
        seconds: list[float] = []
        processor = 0.0
        for step in range(options.repeats):
            copies.begin(CopyId(step, "m"), shards, {})
            copies.wait()
            began, used = time.perf_counter(), time.process_time()
            copies.send(CopyId(step, "m"), target)
            while (status := copies.send_status()).busy:
                time.sleep(0.005)
            assert status.error is None, status.error
            seconds.append(time.perf_counter() - began)
            processor += time.process_time() - used
        pipe.send("end")
        received = pipe.recv()
        process.join()
    other_copy = torch.empty_like(state)
    memcpy: list[float] = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        other_copy.copy_(state)
        memcpy.append(time.perf_counter() - began)
    size, sent = options.gb, options.gb * options.repeats
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, {size:g} GB, {options.repeats} copies")
    print(f"first copies   {' '.join(f'{size / s:.2f}' for s in seconds[:2])} GB/s")
    later = [size / s for s in seconds[2:]]
    print(
        f"later copies   {statistics.median(later):.2f} GB/s (median; {min(later):.2f} to {max(later):.2f})"
    )
    print(f"processor time {processor / sent:.2f} s per GB (sender), {received / sent:.2f} (receiver)")
    print(f"memcpy         {size / statistics.median(memcpy[1:]):.2f} GB/s")


if __name__ == "__main__":
    main()
