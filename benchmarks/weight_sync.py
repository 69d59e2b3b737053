"""Processor time of the driver and of the trainer ranks in a weight sync to many engines.

    python -m benchmarks.weight_sync [--base CHECKOUT] [--layers 61] [--engines 64] [--ranks 4]

DeepSeek-V3's names and shapes go out in buckets of 512 MiB of bf16, quantized to FP8, to engines that receive
broadcasts.  Driver (orhpc.driver.fleet.weight_sync), Ray, ranks (orhpc.train.weights.rank_sync) and requests
are those of a run.  The weights are left out: ranks gather and broadcast nothing, and the engines, one
process with a port each, read the requests, count them and answer.  ``--base`` measures an earlier commit's
checkout first, in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

KEY = "key-of-the-fake-engines"
ANSWER = b'{"success": true, "message": "ok"}'
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(ANSWER),
    ANSWER,
)
BUCKET_BYTES = 512 << 20


# --- engines ------------------------------------------------------------------------------------------


class FakeEngine(asyncio.Protocol):
    """One connection to an engine: answers every request once its body has arrived."""

    count = nbytes = updates = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end])
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            whole = end + 4 + (int(lengths[0].split(b":")[1]) if lengths else 0)
            if len(self._data) < whole:
                return
            assert head.startswith(b"GET /health ") or f"Bearer {KEY}".encode() in head
            FakeEngine.count += 1
            FakeEngine.nbytes += whole
            FakeEngine.updates += b"/update_weights_from_distributed" in head
            del self._data[:whole]
            self._transport.write(RESPONSE)


def serve(count: int, pipe: Any) -> None:
    """Listen on ``count`` ports; report them, and at the end what was received."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(FakeEngine, "127.0.0.1", 0, backlog=1024) for _ in range(count)]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.to_thread(pipe.recv)
        pipe.send((FakeEngine.updates, FakeEngine.nbytes))

    asyncio.run(run())


# --- ranks --------------------------------------------------------------------------------------------


class EmptyStage:
    """A rank's buckets without memory."""

    seconds = 0.0

    def __init__(self, *_: Any) -> None: ...

    def fill(self, *_: Any) -> Any:
        import torch

        return torch.empty(0, dtype=torch.uint8)

    def clear(self, **_: Any) -> None: ...


class NoSender:
    """Broadcasts nothing."""

    def send(self, index: int, flat: Any) -> None: ...
    def wait(self, index: int) -> None: ...
    def close(self) -> None: ...


def source_of(folder: str) -> Any:
    """DeepSeek-V3's parameters, one for each tensor of its checkpoint, without values."""
    import torch

    from orhpc.models import read_shape

    class Names:
        def split(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name: whole}

    class Source:
        dtype = torch.bfloat16

        def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
            return {name: tuple(s) for t in read_shape(folder).tensors() for name, s in t.each()}

        def export_dtypes(self) -> dict[str, torch.dtype]:
            return {}

        def hf_names(self) -> Names:
            return Names()

        def export(self, names: Iterable[str], blocks: None = None) -> Iterator[Any]:
            return iter(())

    return Source()


def rank_class() -> type[Any]:
    """A rank with the methods that a sync calls, of this or an earlier commit's trainer rank."""
    from orhpc.train.actor import TrainerRank

    class Rank:
        def __init__(self, rank: int, world: int, folder: str) -> None:
            import torch

            from orhpc.train.process_groups import join_default_group
            from orhpc.train.weights import rank_sync
            from orhpc.train.weights.fp8 import make_quantizer

            torch.set_num_threads(1)
            cpu = torch.device("cpu")
            join_default_group(cpu, "127.0.0.1", f"{folder}/meeting", rank, world, 900.0)
            module: Any = rank_sync
            module.BucketStage = EmptyStage
            quantize = make_quantizer(power_of_two=False)
            self.sync = self._sync = module.RankSync(source_of(folder), quantize, BUCKET_BYTES, cpu, rank)
            self.sync._sender = NoSender() if rank == 0 else None

        def plan_sync(self) -> tuple[int, int]:
            """Numbers of buckets and tensors; planned once in a run."""
            buckets = self.sync.buckets()
            return len(buckets), sum(len(bucket.names) for bucket in buckets)

        def processor_seconds(self) -> float:
            return time.process_time()

    methods = ("weight_buckets", "stage_bucket", "finish_sync", "send_weights", "sync_progress")
    for name in methods:
        if hasattr(TrainerRank, name):
            setattr(Rank, name, getattr(TrainerRank, name))
    return Rank


# --- driver -------------------------------------------------------------------------------------------


def write_model(folder: str, layers: int) -> None:
    from tests.model_configs import REAL

    config = {**REAL["DeepSeek-V3"][0], "num_hidden_layers": layers}
    Path(folder, "config.json").write_text(json.dumps(config))


def parts(ports: list[int], ranks: int, folder: str) -> tuple[Any, Any]:
    """The driver's trainers and engines."""
    import ray

    from orhpc.config import Config
    from orhpc.driver.fleet import hang
    from orhpc.driver.fleet.actors import spawn
    from orhpc.driver.fleet.engine_places import Engine
    from orhpc.driver.fleet.engines import Engines
    from orhpc.driver.fleet.trainers import Trainers
    from orhpc.plan.placement import Node, plan

    devices = ranks + len(ports)
    config = Config.model_validate(
        {
            "placement": {
                "device": "cpu", "mode": "split", "devices_per_node": devices, "trainer_devices": ranks,
                "engine_devices": len(ports),
            },
            "engine": {"backend": "cpu"},
            "environments": {"a/b": {"serve": "letters"}},
        }
    )  # fmt: skip
    placed = plan(config, (Node("n0", "127.0.0.1", devices),))
    at = [
        Engine(place, f"http://127.0.0.1:{port}", [])
        for place, port in zip(placed.engines, ports, strict=True)
    ]
    engines = Engines(at, placed, config, KEY)
    engines.enter_group("benchmark")
    trainers = Trainers(lambda: [], "127.0.0.1", hang.UpdateLimit(None), None, one_node=True)
    kind, node = rank_class(), ray.get_runtime_context().get_node_id()
    trainers.ranks = [
        spawn(kind, node, [], rank, ranks, folder, concurrency_groups={"control": 1}) for rank in range(ranks)
    ]
    return trainers, engines


async def measured(trainers: Any, engines: Any, folder: str) -> dict[str, Any]:
    """One sync after all parts have started."""
    from orhpc.driver.fleet.actors import call_all
    from orhpc.driver.fleet.weight_sync import WeightSync

    async def ask(name: str) -> list[Any]:
        return await call_all([getattr(rank, name).remote() for rank in trainers.ranks], name)

    buckets, tensors = (await ask("plan_sync"))[0]
    before, began, own = await ask("processor_seconds"), time.perf_counter(), time.process_time()
    report = await WeightSync(trainers, engines, Path(folder)).send(1)
    own, wall = time.process_time() - own, time.perf_counter() - began
    used = [b - a for a, b in zip(before, await ask("processor_seconds"), strict=True)]
    await engines.pool.close()
    return {
        "buckets": buckets, "tensors": tensors, "GB": round(report["sync_bytes"] / 1e9, 1),
        "driver_cpu_s": round(own, 2), "ranks_cpu_s": [round(s, 2) for s in used], "wall_s": round(wall, 1),
    }  # fmt: skip


def one(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the commit that is first on Python's path."""
    import ray

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    engines = context.Process(target=serve, args=(options.engines, theirs), daemon=True)
    engines.start()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.layers)
        ray.init(num_cpus=options.ranks, include_dashboard=False, log_to_driver=False)
        try:
            trainers, fleet = parts(pipe.recv(), options.ranks, folder)
            found = asyncio.run(measured(trainers, fleet, folder))
        finally:
            ray.shutdown()
    pipe.send(None)
    requests, nbytes = pipe.recv()
    engines.join()
    return found | {"requests": requests, "request_GB": round(nbytes / 1e9, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "engines", "ranks")]
    sides = {"now": Path(__file__).parents[1]} | ({"base": options.base.resolve()} if options.base else {})
    for side in sorted(sides):
        environment = {**os.environ, "PYTHONPATH": str(sides[side]), "RAY_raylet_start_wait_time_s": "300"}
        command = [sys.executable, str(Path(__file__).resolve()), "--one", *sizes]
        result = subprocess.run(
            command, env=environment, cwd=sides[side], stdout=subprocess.PIPE, text=True, check=True
        )
        print(side, result.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
