"""Speed of a mixture's update in FP8 and in bfloat16 on one GPU.

    python benchmarks/gpu/fp8_update.py --out DIR [--seconds 300] [--layers 4] [--turns 2]

A random model of Qwen3-30B-A3B's layer shapes (64 experts, as one of two GPUs has) replays routes in which
some experts are more popular than others; nothing is recomputed. Sides, each in a process that is started
once a turn:

- ``bf16``: all experts in one product by cuBLAS, as runs have it
  (:mod:`orhpc.train.megatron.grouped_products`); and by CUTLASS.
- ``fp8``: all experts in one product, as runs have it; and one product an expert.

Every side's gradients are compared with those of bf16, and the quantized weights with those that engines
get, bit for bit. Results are in ``DIR/fp8_update.json`` as they are measured; the table is printed last.
FP8 needs cuBLAS 13.8.1 or newer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

A_GPU = 65536
EXPERTS = 64
"""Those of one of two GPUs that share the model's 128."""
SIDES = ("bf16", "fp8")
START_S = 45.0
"""Least time for a side: imports, the model, the first updates."""


class Results:
    """Rows by name, kept in a file that all processes of the program share one after the other."""

    def __init__(self, out: Path) -> None:
        self.path = out / "fp8_update.json"
        self.rows: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, name: str, **values: Any) -> None:
        row = self.rows.setdefault(name, {})
        row["seconds"] = [*row.get("seconds", []), *values.pop("seconds", [])]
        row |= values
        self.path.write_text(json.dumps(self.rows, indent=1))

    def table(self) -> str:
        lines = [
            "| side | micro-batch | seconds | of bf16 | TFLOP/s | tokens/s | idle | peak GiB | gradients |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name, row in self.rows.items():
            if not row["seconds"]:
                lines.append(f"| {name} | {row} |")
                continue
            middle, side = statistics.median(row["seconds"]), name.split(", ")
            other = self.rows.get(f"bf16, CUTLASS, {side[-1]}", {}).get("seconds")
            ratio = f"{middle / statistics.median(other):.3f}" if other else "-"
            spread = f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f}"
            lines.append(
                f"| {', '.join(side[:-1])} | {side[-1]} | {middle:.3f} ({spread}) | {ratio} "
                f"| {row['flops'] / middle / 1e12:.1f} | {A_GPU / middle:.0f} | {row.get('idle', '-')} "
                f"| {row['peak_gib']} | {row.get('gradients', '-')} |"
            )
        return "\n".join(lines)


def work(options: argparse.Namespace) -> int:
    """One side's process."""
    import torch

    from tests.gpu import megatron_kit, update_kit
    from tests.gpu.update_kit import Variant

    until = time.monotonic() + options.seconds
    results = Results(options.out)
    content = megatron_kit.MOE | {"num_hidden_layers": options.layers, "num_experts": EXPERTS}
    folder = megatron_kit.make_folder(f"fp8-{options.layers}-{EXPERTS}", content, "cuda")
    config = update_kit.make_config(1, "cuda", {}, max(options.tokens))
    if options.side == "fp8":
        config = config.model_copy(update={"precision": "fp8"})
    trainer = megatron_kit.start(config, folder)
    routes = update_kit.made_routes(folder, "natural", A_GPU // sum(update_kit.LENGTHS))
    samples = update_kit.samples_of(len(routes) // len(update_kit.LENGTHS), content["vocab_size"], routes)
    flops = update_kit.flops(folder, samples)
    ways = {"bf16": ["CUTLASS", "cuBLAS"], "fp8": ["one product", "one an expert"]}[options.side]
    for way in ways:
        set_way(trainer, way)
        for tokens in options.tokens:
            name = f"{options.side}, {way}, {tokens}"
            if until - time.monotonic() < 15 or (way == "one an expert" and options.turn > 0):
                continue
            minibatch = update_kit.planned(samples, 1, tokens)
            update_kit.set_mode(trainer, Variant("none", tokens, counted=True))
            update_kit.empty()
            try:
                update_kit.run_steps(trainer, minibatch, 1)
                torch.cuda.reset_peak_memory_stats()
                timed = update_kit.run_steps(trainer, minibatch, options.steps)
            except Exception as error:
                results.add(name, failed=f"{type(error).__name__}: {str(error)[:300]}")
                raise
            results.add(
                name,
                seconds=[round(s, 4) for s in timed.seconds],
                flops=flops,
                peak_gib=update_kit.gib(timed.peak),
            )
            if options.turn == 0:
                found = update_kit.profiled(trainer, minibatch)
                results.add(name, idle=found["idle_share"], profile=found)
        if options.turn == 0:
            compare(options, trainer, results, way, update_kit.planned(samples[:8], 1, options.tokens[0]))
        if way == "one product":
            results.add("weights equal to the engines', values and scales", equal=weights_equal(trainer))
    megatron_kit.close(trainer)
    return 0


def compare(options: argparse.Namespace, trainer: Any, results: Results, way: str, minibatch: Any) -> None:
    """Distance of the gradients from those of bf16, relative to their norm."""
    import torch

    from tests.gpu import update_kit
    from tests.gpu.update_kit import Variant

    truth = options.out / "gradients.pt"
    update_kit.set_mode(trainer, Variant("none", options.tokens[0], counted=True))
    found = update_kit.gradients(trainer, minibatch)
    if way == "CUTLASS":
        torch.save(found, truth)
    elif truth.exists():
        off = update_kit.distance(found, torch.load(truth))
        for tokens in options.tokens:
            results.add(f"{options.side}, {way}, {tokens}", gradients=f"{off:.2e}")


def experts_of(trainer: Any) -> list[Any]:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    return [
        m for model in trainer.backend._policy.models for m in model.modules() if isinstance(m, TEGroupedMLP)
    ]


def set_way(trainer: Any, way: str) -> None:
    """Multiply as a run of this kind would."""
    from orhpc.train.megatron import grouped_products

    together = way in ("cuBLAS", "one product")
    for experts in experts_of(trainer):
        if way == "one an expert":
            experts.quantization_padding.align_size = experts.quantization_unpadding.align_size = 16
        for linear in (experts.linear_fc1, experts.linear_fc2):
            linear.use_grouped_tensor = together
            linear._forward_pre_hooks.clear()
            if together:
                linear.register_forward_pre_hook(grouped_products._with_counts_on_device)


def weights_equal(trainer: Any) -> str:
    """Share of the bytes of all experts' quantized weights of the first layer that engines get as well."""
    import torch

    from orhpc.train.weights.fp8 import quantize_blocks

    experts = experts_of(trainer)[0]
    same = scales = count = 0
    for linear in (experts.linear_fc1, experts.linear_fc2):
        for index in range(linear.num_gemms):
            weight, found = getattr(linear, f"weight{index}"), linear._fp8_workspaces.get(f"weight{index}")
            if found is None:
                return "no quantized weights were kept"
            values, own = quantize_blocks(weight.detach(), power_of_two=False)
            same += int((found._rowwise_data == values.view(torch.uint8)).sum())
            theirs = found._rowwise_scale_inv[: own.shape[0], : own.shape[1]]
            scales += int((theirs != own).sum())
            count += values.numel()
    return f"{same / count:.6f}, {scales} scales differ"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="timed updates of a way in a turn")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 16384])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.side:
        return work(options)
    end, failed = time.monotonic() + options.seconds, 0
    for turn in range(options.turns):
        for side in options.sides:
            left = end - time.monotonic()
            if left < START_S:
                break
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--turn", str(turn)]
            command += ["--seconds", str(left - 10)]
            with (options.out / f"{side}-{turn}.log").open("w") as log:
                child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                try:
                    failed += bool(child.wait(left))
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                    failed += 1
    print(Results(options.out).table())
    return failed


if __name__ == "__main__":
    sys.exit(main())
