"""The process of one rank of ``benchmarks/gpu/moe_update.py``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.moe_update_report import ALONE, EXPERTS, LAYOUTS, SPARE_S, TENSORS, Results
from tests.gpu import update_kit as kit
from tests.gpu.megatron_kit import MOE, WORK, close, make_folder, start
from tests.gpu.update_kit import Variant

A_GPU = 65536
"""Tokens of an update for each GPU."""
GRADIENTS = "gradients"


def variants(layout: str) -> list[Variant]:
    """The cases of a layout, the most telling first."""
    small, middle, large = 8192, 16384, 32768
    if layout == TENSORS:
        some = [Variant("full", small), Variant("none", large), Variant("none", large, counted=True)]
        return [*some, Variant("full", large)]
    found = [
        Variant("full", small),
        Variant("full", large),
        Variant("none", middle),
        Variant("none", large),
        Variant("none", middle, counted=True),
        Variant("none", large, counted=True),
    ]
    overlapped = layout == EXPERTS
    if overlapped:
        found += [Variant("none", tokens, overlap=True, counted=True) for tokens in (middle, large)]
    found.append(Variant("selective", large, overlap=overlapped, counted=True))
    even = [Variant("full", small), Variant("none", large, overlap=overlapped, counted=True)]
    found += [replace(variant, routes="even") for variant in even]
    return [*found, Variant("none", small), Variant("none", small, counted=True)]


class Bench:
    """One rank of a layout, and what it updates on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.name = options, options.worker
        self.until = time.monotonic() + options.seconds
        self.world = 1 if self.name == ALONE else 2
        self.scale = 32 if options.device == "cpu" else 1
        self.results = Results(options.out, self.name, options.rank)
        self.results.begin("start")
        content = MOE | {"num_hidden_layers": options.layers}
        content |= kit.TINY if options.device == "cpu" else {}
        self.folder = make_folder(
            f"update-{options.device}-{options.layers}-{options.rank}", content, options.device
        )
        largest = max(v.tokens for v in variants(self.name)) // self.scale
        self.config = kit.make_config(self.world, options.device, LAYOUTS[self.name], largest)
        self.trainer = start(self.config, self.folder, options.rank, self.world, options.port)
        count = self.world * A_GPU // sum(kit.LENGTHS)
        self.samples: dict[str, list[Any]] = {}
        for kind in ("natural", "even"):
            routes = kit.made_routes(self.folder, kind, count, self.scale)
            self.samples[kind] = kit.samples_of(count, content["vocab_size"], routes, self.scale)
            self.results.put(f"busiest over mean, {kind} routes", kit.skew(routes, content["num_experts"], 2))
        self.flops = kit.flops(self.folder, self.samples["even"]) / self.world

    def largest_of_ranks(self, value: float) -> float:
        if self.world == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=self.trainer.device)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        return float(found)

    def time_cases(self) -> None:
        """Time the cases in turns, until the time is over on any rank."""
        for turn in range(self.options.turns):
            for variant in variants(self.name):
                if not self.results.waits(variant.name, turn):
                    continue
                if self._late():
                    return
                self.results.begin(variant.name)
                self._measure(variant)
            if turn == 0 and self.results.waits(GRADIENTS, 0) and not self._late():
                self.results.begin(GRADIENTS)
                self._compare_gradients()

    def _late(self) -> bool:
        late = self.largest_of_ranks(float(self.until - time.monotonic() < SPARE_S)) > 0
        if late:
            print("no time left", flush=True)
        return late

    def _measure(self, variant: Variant) -> None:
        tokens = variant.tokens // self.scale
        scaled = replace(variant, tokens=tokens)
        minibatch = kit.planned(self.samples[variant.routes], self.config.data_ranks, tokens)
        micro_batches = len(minibatch.ranks[0])
        plan = kit.plan_of(self.config, self.folder, scaled, micro_batches)
        if not kit.fits(plan):
            self.results.put(variant.name, {"skipped": f"planned {kit.gib(plan.total)} GiB do not fit"})
            return
        kit.set_mode(self.trainer, scaled)
        kit.empty()
        kit.run_steps(self.trainer, minibatch, 1)
        timed = kit.run_steps(self.trainer, minibatch, self.options.steps)
        row: dict[str, Any] = self.results.row(variant.name)
        seconds = [*row.get("all_seconds", []), *(round(s, 4) for s in timed.seconds)]
        middle = float(np.median(seconds))
        peak = max(self.largest_of_ranks(timed.peak), row.get("peak_bytes", 0))
        tokens_each = sum(s.length for s in self.samples[variant.routes]) / self.world
        self.results.put(
            variant.name,
            row
            | {
                "seconds": round(middle, 4),
                "all_seconds": seconds,
                "tflops": round(self.flops / middle / 1e12, 1),
                "tokens_s": round(tokens_each / middle),
                "micro_batches": micro_batches,
                "peak_bytes": peak,
                "peak_gib": kit.gib(peak),
                "planned_gib": kit.gib(plan.total),
                "planned_parts": {n: kit.gib(b) for n, b in plan.parts().items() if b},
                "grad_norm": timed.metrics["grad_norm"],
                "expert_rank_max_vio": timed.metrics.get("expert_rank_max_vio", 0.0),
            },
        )
        if "profiled_s" not in row and self.options.device == "cuda":
            found = kit.profiled(self.trainer, minibatch)
            self.results.put(variant.name, self.results.row(variant.name) | found)

    def _compare_gradients(self) -> None:
        """Relative differences from the plain schedule's, whose own differ by the order of sums."""
        tokens = 8192 // self.scale
        minibatch = kit.planned(self.samples["natural"], self.config.data_ranks, tokens)
        plain = Variant("none", tokens)
        ways = {"plain again": plain, "counted": Variant("none", tokens, counted=True)}
        if self.name == EXPERTS:
            ways["overlapped"] = Variant("none", tokens, overlap=True)
            ways["overlapped and counted"] = Variant("none", tokens, overlap=True, counted=True)
        kit.set_mode(self.trainer, plain)
        truth = kit.gradients(self.trainer, minibatch)
        found: dict[str, float] = {}
        for name, variant in ways.items():
            kit.set_mode(self.trainer, variant)
            found[name] = kit.distance(kit.gradients(self.trainer, minibatch), truth)
        self.results.put(GRADIENTS, found)


def work(options: argparse.Namespace) -> int:
    """Body of one rank's process; 3: a case failed, and the other rank may wait for this one."""
    WORK.mkdir(parents=True, exist_ok=True)
    results = Results(options.out, options.worker, options.rank)
    try:
        bench = Bench(options)
        results = bench.results
        bench.time_cases()
        results.begin("end")
        close(bench.trainer)
    except Exception as error:
        traceback.print_exc()
        results.explain(f"{type(error).__name__}: {str(error)[:300]}")
        sys.stdout.flush()
        os._exit(3)
    return 0
