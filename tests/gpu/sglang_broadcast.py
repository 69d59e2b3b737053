"""orhpc's broadcast of a weight bucket against a bare NCCL broadcast of the same bytes, on two GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def broadcast_alone(nbytes: int = 512 << 20, count: int = 10) -> list[tuple[str, bool, str]]:
    """orhpc's broadcast of a weight bucket against a bare NCCL broadcast of the same bytes."""
    import torch.multiprocessing as mp

    from orhpc.process.ports import free_ports

    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    ports = free_ports(2, "127.0.0.1")
    ranks = [
        context.Process(target=_broadcasting_rank, args=(rank, ports, nbytes, count, results))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    if any(rank.exitcode != 0 for rank in ranks):
        for rank in ranks:
            rank.kill()
        return [("broadcast alone", False, f"exit codes {[r.exitcode for r in ranks]}")]
    raw, ours = results.get()
    note = f"ours {ours:.1f} GB/s, NCCL {raw:.1f} GB/s, ratio {ours / raw:.2f}"
    return [("broadcast alone", ours / raw >= 0.7, note)]


def _broadcasting_rank(rank: int, ports: list[int], nbytes: int, count: int, results: Any) -> None:
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    import torch
    import torch.distributed as dist

    from orhpc.train.weights.sender import WeightSender
    from orhpc.wire.weights import join_weight_group

    torch.cuda.set_device(rank)
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    where = f"tcp://127.0.0.1:{ports[0]}"
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=2)

    def rate(once: Callable[[int], None]) -> float:
        for i in range(2):
            once(i)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for i in range(count):
            once(i)
        torch.cuda.synchronize()
        return nbytes * count / (time.perf_counter() - started) / 1e9

    raw = rate(lambda i: dist.broadcast(flat, src=0))
    group = {"address": "127.0.0.1", "port": ports[1], "world_size": 2, "timeout_s": 60.0}
    if rank == 0:
        sender = WeightSender(device=torch.device("cuda", 0), group_name="check", **group)

        def send(i: int) -> None:
            sender.wait(i)
            sender.send(i, flat)

        ours = rate(send)
        results.put((raw, ours))
        sender.wait(0)
        sender.wait(1)
    else:
        joined = join_weight_group(rank=1, name="check", backend="nccl", **group)
        rate(lambda i: dist.broadcast(flat, group_src=0, group=joined))
    os._exit(0)  # skips the shutdown of the process groups
