"""Speed and memory of whole updates of a dense model, by trainer and by what is recomputed and gathered.

    python benchmarks/gpu/dense_update.py --out DIR [--seconds 570] [--size 1.7b 0.6b] [--turns 2] [--gpus 1]

Random weights of Qwen3-1.7B's shapes in micro-batches of 32,768 tokens, and of Qwen3-0.6B's in micro-batches
of 16,384; about 290,000 tokens an update and GPU, in samples of 640 to 1,408 tokens, so that micro-batches
differ in length. All sides get the same micro-batches and compute in bfloat16. They recompute all layers;
"kept" ones none, and "half kept" ones the first half; FSDP gathers weights for every micro-batch, or once an
update. The table shows planned memory and peak. They take turns in one
process: a side is started, makes two updates, of which the first compiles, then those that are timed,
and in the first turn one of two micro-batches under torch's profiler. FLOPs are counted without
recomputation's. A side that fails is noted, and the others go on. Results are written to
``DIR/dense_update.json`` as they are measured; the table is printed last and kept as ``DIR/dense_update.md``.
After ``--seconds`` the program prints what it has and ends. ``--device cpu --size tiny`` (with
``PYTHONPATH=tests/megatron/site``, which stands in for Triton and does not compile) tests the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.config import Config  # noqa: E402
from orhpc.models import read_shape  # noqa: E402
from orhpc.plan.layout import trainer_layout  # noqa: E402
from orhpc.plan.memory import trainer_demand, trainer_memory  # noqa: E402
from orhpc.process.ports import free_ports  # noqa: E402
from orhpc.types import Sample  # noqa: E402
from tests.gpu import megatron_kit as kit  # noqa: E402
from tests.gpu import update_kit  # noqa: E402
from tests.gpu.random_model import QWEN3_06B  # noqa: E402

_06B: dict[str, Any] = QWEN3_06B | {"model_type": "qwen3", "num_hidden_layers": 28}


@dataclass(frozen=True)
class Size:
    """A model, and what an update has to do."""

    model: dict[str, Any]
    tokens: int
    """Of a micro-batch, at most."""
    micro_batches: int
    scale: int = 1
    """Divisor of the samples' lengths."""


SIZES = {
    "1.7b": Size(_06B | {"hidden_size": 2048, "intermediate_size": 6144}, 32768, 9),
    "0.6b": Size(_06B, 16384, 18),
    "tiny": Size(
        _06B | {k: v for k, v in update_kit.TINY.items() if "expert" not in k and "moe" not in k}
        | {"num_hidden_layers": 2}, 1024, 3, 16,
    ),
}  # fmt: skip
SHORTEST, LONGEST = 640, 1408
FILLED = 0.985
"""Share of the micro-batches that samples fill."""
SIDES: dict[str, dict[str, Any]] = {
    "fsdp": {"train": {"backend": "fsdp", "compile": False}},
    "fsdp compiled": {"train": {"backend": "fsdp", "compile": True}},
    "fsdp kept": {"train": {"backend": "fsdp", "compile": True, "gradient_checkpointing": False}},
    "fsdp kept, gathered once": {
        "train": {"backend": "fsdp", "compile": True, "gradient_checkpointing": False, "gather_once": True}
    },
    "fsdp gathered once": {"train": {"backend": "fsdp", "compile": True, "gather_once": True}},
    "fsdp half kept": {"train": {"backend": "fsdp", "compile": True}},
    "fsdp kept, not compiled": {
        "train": {"backend": "fsdp", "compile": False, "gradient_checkpointing": False}
    },
    "megatron": {"train": {"backend": "megatron"}, "megatron": {"recompute": "full"}},
    "megatron kept": {"train": {"backend": "megatron", "gradient_checkpointing": False}},
}
WARM = 2
GIB = 2**30


def samples_of(size: Size, gpus: int) -> list[Sample]:
    """As many samples as fill the micro-batches of all GPUs."""
    generator = np.random.default_rng(3)
    wanted, lengths = FILLED * size.tokens * size.micro_batches * gpus, list[int]()
    while sum(lengths) < wanted:
        lengths.append(int(generator.integers(SHORTEST, LONGEST + 1)) // size.scale)
    return kit.make_samples(lengths[:-1], size.model["vocab_size"])


def config_of(size: Size, device: str, side: str, gpus: int) -> Config:
    """A trainer whose weights do not change, so that every update is the same."""
    sections = dict(SIDES[side])
    same: dict[str, Any] = {
        "lr": 1e-30, "weight_decay": 0.0, "max_tokens_per_gpu": size.tokens, "gradient_checkpointing": True,
        "gather_once": False,
    }  # fmt: skip
    if side == "fsdp half kept":
        same["recompute_layers"] = max(1, size.model["num_hidden_layers"] // 2)
    return kit.make_config(gpus, device, train=same | sections.pop("train"), **sections)


class Bench:
    """What is measured, and the file that it is written to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.monotonic() + options.seconds
        self.starts = 0
        self.found: dict[str, dict[str, Any]] = {"versions": {"torch": torch.__version__}}
        if options.device == "cuda":
            self.found["versions"]["device"] = torch.cuda.get_device_name()

    def left(self) -> float:
        return self.until - time.monotonic()

    def put(self, name: str, **values: Any) -> None:
        """Add values to a row, and write all rows, on the first rank."""
        self.found[name] = self.found.get(name, {}) | values
        if self.options.rank:
            return
        path = self.options.out / "dense_update.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1))
        part.replace(path)
        print(f"{name}: {str(values)[:1500]}", flush=True)

    def run(self) -> None:
        """All sides of all sizes, in turns."""
        for turn in range(self.options.turns):
            for name in self.options.size:
                for side in self.options.sides:
                    row = self.found.get(f"{name}, {side}", {})
                    # Several ranks have to do the same, and their clocks differ.
                    short = self.options.gpus == 1 and self.left() < 1.2 * row.get("turn_s", 0.0)
                    if "failed" in row or short:
                        continue
                    began = time.monotonic()
                    self._attempt(name, side, turn)
                    self.put(f"{name}, {side}", turn_s=round(time.monotonic() - began, 1))

    def _attempt(self, name: str, side: str, turn: int) -> None:
        trainer: Any = None
        try:
            size, folder = make_folder(name, self.options, self.options.device)
            began = time.monotonic()
            config = config_of(size, self.options.device, side, self.options.gpus)
            planned = trainer_memory(read_shape(folder), trainer_layout(config), trainer_demand(config)).total
            port, self.starts = self.options.port and self.options.port + self.starts, self.starts + 1
            trainer = kit.start(config, folder, self.options.rank, self.options.gpus, port)
            started = round(time.monotonic() - began, 1)
            self.put(f"{name}, {side}", start_s=started, planned_gib=round(planned / GIB, 2))
            self._measure(f"{name}, {side}", trainer, size, folder, turn)
        except Exception as error:
            traceback.print_exc()
            self.put(f"{name}, {side}", failed=f"{type(error).__name__}: {str(error)[:300]}")
        if trainer is not None:
            with contextlib.suppress(Exception):
                kit.close(trainer)
        trainer = None
        update_kit.empty()

    def _measure(self, name: str, trainer: Any, size: Size, folder: Path, turn: int) -> None:
        samples = samples_of(size, self.options.gpus)
        minibatch = update_kit.planned(samples, self.options.gpus, size.tokens)
        row = self.found[name]
        self.put(name, tokens=sum(s.length for s in samples), micro_batches=len(minibatch.ranks[0]))
        warm = update_kit.run_steps(trainer, minibatch, WARM).seconds
        self.put(name, warm_s=[*row.get("warm_s", []), *(round(s, 3) for s in warm)])
        if self.options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds: list[float] = list(row.get("all_s", []))
        for _ in range(self.options.steps):
            timed = update_kit.run_steps(trainer, minibatch, 1)
            seconds += [round(s, 4) for s in timed.seconds]
            self.put(name, **self._numbers(seconds, timed, samples, folder))
        if turn == 0 and self.options.device == "cuda":
            few = replace(minibatch, ranks=tuple(rank[:2] for rank in minibatch.ranks))
            self.put(name, profile=update_kit.profiled(trainer, few))

    def _numbers(
        self, seconds: list[float], timed: update_kit.Timed, samples: Sequence[Sample], folder: Path
    ) -> dict[str, Any]:
        middle = statistics.median(seconds)
        each = middle * self.options.gpus
        return {
            "all_s": seconds,
            "seconds": round(middle, 4),
            "tokens_s": round(sum(s.length for s in samples) / each),
            "tflops": round(update_kit.flops(folder, samples) / each / 1e12, 1),
            "peak_gib": round(timed.peak / GIB, 2),
            "grad_norm": timed.metrics["grad_norm"],
            "parts_s": {k: round(v, 4) for k, v in timed.metrics.items() if "seconds" in k},
        }


COLUMNS = (
    "model", "side", "s", "tokens/s", "TFLOP/s", "peak GiB", "planned", "ratio to megatron",
    "gradient norm", "first update, s",
)  # fmt: skip
KINDS = ("GEMM", "attention", "elementwise", "copy", "optimizer")


def table(found: dict[str, dict[str, Any]], sizes: Sequence[str]) -> str:
    """Markdown: a row for each side of each size; ``ratio``: its time over Megatron's."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    kinds = [
        f"| model | side | profiled, s | GPU idle | {' | '.join(KINDS)} | other | kernels | host waits |",
        "|---" * (7 + len(KINDS)) + "|",
    ]
    others: list[str] = []
    for size in sizes:
        base = found.get(f"{size}, megatron", {}).get("seconds")
        for side in SIDES:
            row = found.get(f"{size}, {side}", {})
            if "seconds" in row:
                ratio = f"{row['seconds'] / base:.3f}" if base else ""
                shown = ("seconds", "tokens_s", "tflops", "peak_gib", "planned_gib")
                cells = [*(row[name] for name in shown), ratio]
                cells += [f"{row['grad_norm']:.6g}", row["warm_s"][0]]
                lines.append(f"| {size} | {side} | {' | '.join(map(str, cells))} |")
            if profile := row.get("profile"):
                by = dict(profile["by_kind"])
                parts = [f"{by.pop(kind, 0.0):.3f}" for kind in KINDS]
                parts += [f"{sum(by.values()):.3f}", str(profile["kernels"]), str(profile["host_waits"])]
                start = f"| {size} | {side} | {profile['profiled_s']} | {profile['idle_share']}"
                kinds.append(f"{start} | {' | '.join(parts)} |")
            if "failed" in row:
                others.append(f"{size}, {side}: failed: {row['failed']}")
    return "\n".join([*lines, "", *kinds, "", *(others or ["failed: nothing"])])


def finish(bench: Bench) -> None:
    text = table(bench.found, bench.options.size)
    (bench.options.out / "dense_update.md").write_text(text + "\n")
    print(text, flush=True)


def end_in_time(bench: Bench) -> None:
    """Print what there is and end the process when the time is over."""

    def end() -> None:
        print("no time left", flush=True)
        finish(bench)
        os._exit(0 if any("seconds" in row for row in bench.found.values()) else 1)

    timer = threading.Timer(bench.left(), end)
    timer.daemon = True
    timer.start()


def make_folder(name: str, options: argparse.Namespace, device: str) -> tuple[Size, Path]:
    """Write random weights of a size, unless they are there."""
    size = SIZES[name]
    if options.layers:
        size = replace(size, model=size.model | {"num_hidden_layers": options.layers})
    return size, kit.make_folder(f"dense-{name}-{size.model['num_hidden_layers']}", size.model, device)


def run_ranks(options: argparse.Namespace) -> int:
    """Run this program once for each GPU, of which it sees no other; the first one reports."""
    for name in options.size:
        make_folder(name, options, "cpu")
    starts = options.turns * len(options.size) * len(options.sides)
    port = free_ports(starts, "127.0.0.1", consecutive=True)[0]
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--port", str(port), "--rank", str(rank)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in range(options.gpus)
    ]
    code = ranks[0].wait()
    for other in ranks[1:]:
        other.kill()
        other.wait()
    return code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=570.0, help="all of it")
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["1.7b", "0.6b"])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed updates of a side in a turn")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="of this machine, over which FSDP shards")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gpus > 1 and not options.port:
        return run_ranks(options)
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    if options.rank:
        bench.run()
        return 0
    end_in_time(bench)
    bench.run()
    finish(bench)
    return sum("failed" in row for row in bench.found.values())


if __name__ == "__main__":
    sys.exit(main())
