"""Speed and memory of the Megatron trainer's update of a mixture of experts on one GPU or two.

    python benchmarks/gpu/moe_update.py --out DIR [--gpus 1] [--seconds 280] [--layers 4]

A random model of Qwen3-30B-A3B's layer shapes (128 experts, 8 per token) routes its tokens itself once; these
routes, uneven as they are, are then replayed by every update, as in a run. On one GPU: ``recompute`` full,
full for the first two layers, selective and none, each with micro-batches of 8,192, 16,384 and 32,768 tokens,
taking turns in one process. On two: tensors divided (TP 2, EP 2) against whole tensors (TP 1, EP 2) with and
without overlapped all-to-alls; gradients are compared as well. ``counted``: with
``megatron.counts_from_routes``. An update of 65,536 tokens a GPU is timed from before its batches are packed
until its optimizer has ended; FLOPs are counted without recomputation's. The memory that ``orhpc plan``
computes is printed beside the measured peak; a variant that does not fit is skipped. The fastest variant is
profiled once, last. Results are written to ``DIR/moe_update.json`` as they are measured; the table is printed
last. ``--device cpu`` (with ``PYTHONPATH=tests/megatron/site``) tests the program on a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tests.gpu import update_kit as kit  # noqa: E402
from tests.gpu.megatron_kit import MOE, WORK, close, make_folder, start  # noqa: E402
from tests.gpu.update_kit import Variant  # noqa: E402

ALONE = "TP 1 EP 1"
LAYOUTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "TP 2 EP 2": {"tp": 2, "ep": 2},
    "TP 1 EP 2": {"ep": 2},
}
A_GPU = 65536
"""Tokens of an update for each GPU."""
PROFILE_S = 20.0
"""Seconds that are left for the profile: with less, no further variant is timed."""


class Results:
    """What was measured, written to a file after each value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, layout: str, name: str, value: Any) -> None:
        self.found.setdefault(layout, {})[name] = value
        self.path.write_text(json.dumps(self.found, indent=1))
        short = {k: v for k, v in value.items() if k != "metrics"} if isinstance(value, dict) else value
        print(f"{layout}, {name}: {str(short)[:600]}", flush=True)


@contextmanager
def noted(results: Results, layout: str, name: str) -> Iterator[None]:
    """Write a failure down instead of ending the program."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        results.put(layout, name, {"failed": f"{type(error).__name__}: {str(error)[:300]}"})


# --- one layout, in the process of each rank -------------------------------------------------------------


class Bench:
    """One rank of a layout, and what it updates on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.name = options, options.worker
        self.until = time.monotonic() + options.seconds
        self.world = 1 if self.name == ALONE else 2
        self.scale = 32 if options.device == "cpu" else 1
        self.tokens = [t // self.scale for t in options.tokens]
        content = MOE | {"num_hidden_layers": options.layers}
        self.content = content | (kit.TINY if options.device == "cpu" else {})
        self.folder = make_folder(f"update-{options.device}-{options.layers}", self.content, options.device)
        self.results = Results(options.out / (f"{self.name.replace(' ', '')}-{options.rank}.json"))
        layout = LAYOUTS[self.name]
        self.config = kit.make_config(self.world, options.device, layout, max(self.tokens))
        self.trainer = start(self.config, self.folder, options.rank, self.world, options.port)
        self.samples = self._samples()
        self.flops = kit.flops(self.folder, self.samples) / self.world

    def _samples(self) -> list[Any]:
        count = A_GPU // sum(kit.LENGTHS)
        saved = WORK / f"routes-{self.options.device}-{self.options.layers}.npz"
        vocabulary = self.content["vocab_size"]
        if self.world == 1:
            both = kit.samples_of(2 * count, vocabulary, None, self.scale)
            routes = kit.record_routes(self.trainer, both)
            np.savez(saved, **routes)  # type: ignore[arg-type]
        routes = dict(np.load(saved))
        experts = self.content["num_experts"]
        self.results.put(self.name, "skew over two ranks", kit.skew(routes, experts, 2))
        self.results.put(self.name, "skew over four ranks", kit.skew(routes, experts, 4))
        return kit.samples_of(self.world * count, vocabulary, routes, self.scale)

    def left(self) -> float:
        return self.until - time.monotonic()

    def time_variants(self, variants: list[Variant]) -> str | None:
        """Time the variants in turns; return the name of the fastest."""
        found: dict[Variant, list[kit.Timed]] = {}
        for turn in range(self.options.turns):
            for variant in variants:
                if turn and variant not in found:
                    continue
                with noted(self.results, self.name, variant.name):
                    if timed := self._timed(variant):
                        found.setdefault(variant, []).append(timed)
                if variant in found:
                    self._put(variant, found[variant])
                if self._agreed_late(variant, turn):
                    return self._fastest(found)
        return self._fastest(found)

    def _agreed_late(self, variant: Variant, turn: int) -> bool:
        """Whether the time is over, on any rank."""
        late = torch.tensor(float(self.left() < PROFILE_S))
        if self.world > 1:
            late = late.to(self.trainer.device)
            torch.distributed.all_reduce(late)
        if float(late) > 0:
            print(f"no time left after {variant.name}, turn {turn}", flush=True)
        return float(late) > 0

    def _timed(self, variant: Variant) -> kit.Timed | None:
        minibatch = self._planned(variant)
        count = len(minibatch.ranks[0])
        plan = kit.plan_of(self.config, self.folder, variant, count)
        if not kit.fits(plan):
            self.results.put(
                self.name, variant.name, {"skipped": f"planned {kit.gib(plan.total)} GiB do not fit"}
            )
            return None
        kit.set_mode(self.trainer, variant)
        kit.empty()
        try:
            kit.run_steps(self.trainer, minibatch, 1)
            return kit.run_steps(self.trainer, minibatch, self.options.steps)
        except Exception as error:
            if "memory" not in str(error).lower() or self.world > 1:
                raise
            self.results.put(self.name, variant.name, {"skipped": f"out of memory: {str(error)[:200]}"})
            kit.after_failure(self.trainer)
            return None

    def _planned(self, variant: Variant) -> Any:
        return kit.planned(self.samples, self.config.data_ranks, variant.tokens)

    def _put(self, variant: Variant, turns: list[kit.Timed]) -> None:
        seconds = [s for turn in turns for s in turn.seconds]
        middle = float(np.median(seconds))
        minibatch = self._planned(variant)
        micro_batches = len(minibatch.ranks[0])
        plan = kit.plan_of(self.config, self.folder, variant, micro_batches)
        tokens = sum(s.length for s in self.samples) / self.world
        peak = max(turn.peak for turn in turns)
        self.results.put(
            self.name,
            variant.name,
            {
                "seconds": round(middle, 4),
                "fastest": round(min(seconds), 4),
                "slowest": round(max(seconds), 4),
                "tflops": round(self.flops / middle / 1e12, 1),
                "tokens_s": round(tokens / middle),
                "micro_batches": micro_batches,
                "peak_gib": kit.gib(peak),
                "planned_gib": kit.gib(plan.total),
                "measured_over_planned": round(peak / plan.total, 4),
                "planned_parts": {n: kit.gib(b) for n, b in plan.parts().items() if b},
                "metrics": turns[-1].metrics,
            },
        )

    def _fastest(self, found: dict[Variant, list[kit.Timed]]) -> str | None:
        if not found:
            return None
        best = min(found, key=lambda v: float(np.median([s for t in found[v] for s in t.seconds])))
        return best.name

    def profile(self, variant: Variant) -> None:
        kit.set_mode(self.trainer, variant)
        kit.empty()
        with noted(self.results, self.name, f"profile of {variant.name}"):
            found = kit.profiled(self.trainer, self._planned(variant))
            self.results.put(self.name, f"profile of {variant.name}", found)

    def compare_gradients(self, tokens: int) -> None:
        """Relative differences from the plain schedule's, whose own differ by the order of sums."""
        minibatch = self._planned(Variant("none", tokens))
        ways = {"plain again": Variant("none", tokens), "counted": Variant("none", tokens, counted=True)}
        if self.name == "TP 1 EP 2":
            ways["overlapped"] = Variant("none", tokens, overlap=True)
        kit.set_mode(self.trainer, ways["plain again"])
        plain = kit.gradients(self.trainer, minibatch)
        found: dict[str, float] = {}
        for name, variant in ways.items():
            kit.set_mode(self.trainer, variant)
            found[name] = kit.distance(kit.gradients(self.trainer, minibatch), plain)
        self.results.put(self.name, "gradients", found)


def work(options: argparse.Namespace) -> int:
    """Body of one rank's process."""
    bench = Bench(options)
    on_cpu = options.device == "cpu"
    modes = [mode for mode in options.modes if not (on_cpu and mode == "selective")]
    variants = [Variant(mode, tokens) for tokens in bench.tokens for mode in modes]
    if not (bench.world == 1 and len(modes) == 1):
        variants += [Variant("none", tokens, counted=True) for tokens in bench.tokens]
    if options.worker == "TP 1 EP 2":
        unlike = [mode for mode in modes if "full" not in mode]
        variants += [Variant(mode, tokens, overlap=True) for tokens in bench.tokens for mode in unlike]
        variants += [Variant("none", tokens, overlap=True, counted=True) for tokens in bench.tokens]
    if bench.world > 1:
        with noted(bench.results, options.worker, "gradients"):
            bench.compare_gradients(min(bench.tokens))
    best = bench.time_variants(variants)
    chosen = next((v for v in variants if v.name == best), None)
    # Both ranks of two must profile the same variant: rank 0's choice.
    if bench.world > 1:
        index = torch.tensor(-1 if chosen is None else variants.index(chosen), device=bench.trainer.device)
        torch.distributed.broadcast(index, 0)
        chosen = None if int(index) < 0 else variants[int(index)]
    if chosen is not None and not on_cpu:
        bench.profile(chosen)
    close(bench.trainer)
    return 0


# --- the program -----------------------------------------------------------------------------------------


def launch(options: argparse.Namespace, layout: str, until: float) -> None:
    """Run one layout's ranks; they end with it, or at its time limit."""
    from orhpc.process.devices import VARIABLE, visible_devices
    from orhpc.process.ports import free_ports

    world = 1 if layout == ALONE else 2
    # With two GPUs, one alone only records the routes and times its fastest kind of update.
    modes = ["none"] if layout == ALONE and options.gpus == 2 else options.modes
    port = free_ports(1, "127.0.0.1")[0]
    running: list[subprocess.Popen[bytes]] = []
    left = max(10.0, until - time.monotonic())
    for rank in range(world):
        words = [
            *("--out", str(options.out), "--device", options.device, "--layers", str(options.layers)),
            *("--steps", str(options.steps), "--turns", str(options.turns), "--modes", *modes),
            *("--tokens", *map(str, options.tokens), "--seconds", str(left - 10)),
            *("--worker", layout, "--rank", str(rank), "--port", str(port)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "4"}
        environment["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink has put shared hosts out of service
        if options.device == "cuda":
            environment[VARIABLE] = visible_devices([rank], os.environ)
        log = (options.out / f"{layout.replace(' ', '')}-{rank}.log").open("w")
        command = [sys.executable, __file__, *words]
        running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    while any(process.poll() is None for process in running):
        broken = any(process.poll() for process in running)
        if broken:
            time.sleep(2)
        if broken or time.monotonic() > until:
            for process in running:
                process.kill()
        time.sleep(0.2)


COLUMNS = ("tflops", "tokens_s", "seconds", "peak_gib", "planned_gib", "measured_over_planned")


def table(found: dict[str, Any]) -> str:
    """Markdown: the variants, then profiles and what else was found."""
    lines = [
        "| layout | recompute, tokens | TFLOP/s a GPU | tokens/s a GPU | s | peak GiB | planned | ratio |",
        "|---" * 8 + "|",
    ]
    others: list[str] = []
    for layout, rows in found.items():
        for name, row in rows.items():
            if "tflops" in row:
                lines.append(f"| {layout} | {name} | " + " | ".join(str(row[c]) for c in COLUMNS) + " |")
            elif "by_kind" in row:
                kinds = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in row["by_kind"].items())
                others.append(
                    f"{layout}, {name}: {row['seconds']:.3f} s, GPU idle {row['idle_share']:.1%}, "
                    f"{row['kernels']} kernels; s by kind: {kinds}"
                )
            else:
                others.append(f"{layout}, {name}: {row}")
        norms = [row["metrics"]["grad_norm"] for row in rows.values() if "metrics" in row]
        if norms:
            others.append(
                f"{layout}: gradient norms of all variants within {max(norms) / min(norms) - 1:.1e}"
            )
    return "\n".join([*lines, *others])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=1)
    parser.add_argument("--seconds", type=float, default=280.0, help="all of it")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed updates of a variant in a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=["full", "full-2", "selective", "none"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), help="default: all of --gpus")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    if options.worker:
        return work(options)
    began = time.monotonic()
    layouts = options.layouts or (list(LAYOUTS) if options.gpus == 2 else [ALONE])
    for index, layout in enumerate(layouts):
        end = began + options.seconds
        # The layouts share the time that is left.
        launch(options, layout, time.monotonic() + (end - time.monotonic()) / (len(layouts) - index))
    return report(options, layouts)


def report(options: argparse.Namespace, layouts: list[str]) -> int:
    """Join the ranks' files, print failures and the table; return the number of failures."""
    found: dict[str, Any] = {}
    for layout in layouts:
        path = options.out / f"{layout.replace(' ', '')}-0.json"
        found |= json.loads(path.read_text()) if path.exists() else {layout: {}}
        for log in sorted(options.out.glob(f"{layout.replace(' ', '')}-*.log")):
            text = log.read_text(errors="replace")
            if "Traceback" in text:
                print(f"--- {log.name}\n{text[text.index('Traceback') :][:2500]}")
    (options.out / "moe_update.json").write_text(json.dumps(found, indent=1))
    text = table(found)
    (options.out / "moe_update.md").write_text(text + "\n")
    print(text)
    failed = [f"{la}: {n}" for la, rows in found.items() for n, row in rows.items() if "failed" in row]
    failed += [la for la, rows in found.items() if not any("tflops" in row for row in rows.values())]
    print(f"failed: {failed or 'nothing'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
