"""Measure how long Megatron ranks take to gather all weights into buckets for engines, by commits in turn.

    python benchmarks/gpu/gather_weights.py --out DIR [--trees BEFORE AFTER] [--layers 6] [--gpus 2]

Qwen3-30B-A3B's shapes with fewer layers and random weights, experts divided over the ranks; no engines.
Each case gathers every bucket: ``bf16`` or ``fp8``, ``whole`` (all experts on every rank) or ``own`` (each
rank the experts that its engine rank holds: those it holds itself, so ranks send each other none).
``--trees``: folders with commits to compare; their trainers start together and measure in turn, twice.  The
last one also fills each bucket tensor by tensor, which must give the same bytes.

Prints a table of medians in seconds and writes DIR/gather_weights.json.  ``--device cpu`` (with
``PYTHONPATH=tests/megatron/site``) uses as many experts, but tiny ones, so that most of the time is the
host's, and counts processor time.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS, REPEATS, UNTIMED = 2, 4, 1
"""Turns of each commit, and in each the timed and untimed gathers of a case: one more in the first."""
CASES = ("bf16 whole", "fp8 whole", "bf16 own", "fp8 own")
BUCKET_BYTES = 512 << 20


# --- a rank's process -------------------------------------------------------------------------------------


def rank_process(options: argparse.Namespace) -> None:
    """Build a trainer; then, for each line on the standard input, measure all cases."""
    from orhpc.train.weights.expert_blocks import ExpertBlocks
    from tests.gpu import megatron_kit, update_kit

    layout = {"tp": 1, "ep": options.gpus}
    config = update_kit.make_config(options.gpus, options.device, layout, 4096)
    trainer: Any = megatron_kit.start(config, options.folder, options.rank, options.gpus, options.port)
    print("ready", flush=True)
    own = ExpertBlocks(options.gpus, tuple(range(options.gpus)))
    limit = BUCKET_BYTES if options.device == "cuda" else 1 << 20
    stages = {case: Gathering(trainer, case, own, limit) for case in CASES}
    for line in sys.stdin:
        turn, check = json.loads(line)
        found: dict[str, Any] = {}
        for case, gathering in stages.items():
            untimed = UNTIMED + (turn == 0)
            found[case] = [gathering.seconds() for _ in range(untimed + REPEATS)][untimed:]
            if check:
                found[f"{case} equal"] = gathering.equals_one_by_one()
            gathering.stage.clear(keep_cached=True)
        print(json.dumps(found), flush=True)
    trainer.close()


class Gathering:
    """All buckets of a case."""

    def __init__(self, trainer: Any, case: str, own: Any, limit: int) -> None:
        from orhpc.train.weights.buckets import buckets_of, for_wire
        from orhpc.train.weights.fp8 import make_quantizer, unchanged
        from orhpc.train.weights.sender import BucketStage

        self.device, self.source = trainer.device, trainer.backend
        precision, which = case.split()
        self.quantize = make_quantizer(power_of_two=False) if precision == "fp8" else unchanged
        self.blocks = own if which == "own" else None
        planned = buckets_of(self.source, limit, self.blocks, trainer.rank, for_engines=True)
        self.specs = [for_wire(spec, self.quantize) for spec in planned]
        self.stage = BucketStage(self.device, self.specs, self.quantize)

    def exported(self, spec: Any, *, flat: bool) -> Any:
        """A bucket's tensors, as this commit's weight sync gets them or each alone."""
        export = getattr(self.source, "export_flat", self.source.export) if flat else self.source.export
        arguments = (spec.parameters, self.blocks, self.quantize)
        return export(*arguments[: len(inspect.signature(export).parameters)])

    def seconds(self) -> float:
        import torch

        torch.distributed.barrier()
        clock = time.process_time
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            clock = time.perf_counter
        began = clock()
        for turn, spec in enumerate(self.specs):
            self.stage.fill(turn, spec, self.exported(spec, flat=True))
        return clock() - began

    def equals_one_by_one(self) -> bool:
        import torch

        return all(
            torch.equal(
                self.stage.fill(0, spec, self.exported(spec, flat=True)).clone(),
                self.stage.fill(0, spec, self.exported(spec, flat=False)),
            )
            for spec in self.specs
        )


# --- the command ------------------------------------------------------------------------------------------


class Tree:
    """The ranks of one commit."""

    def __init__(self, path: Path, options: argparse.Namespace, folder: Path, port: int) -> None:
        paths = f"{path}:{os.environ.get('PYTHONPATH', '')}"
        self.name, self.ranks = path.name, []
        for rank in range(options.gpus):
            command = [sys.executable, __file__, "--out", str(options.out), "--folder", str(folder)]
            command += [f"--rank={rank}", f"--port={port}", f"--gpus={options.gpus}"]
            command += [f"--device={options.device}"]
            environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": str(rank)}
            log = (options.out / f"gather-{path.name}-{rank}.log").open("w")
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self.ranks.append(subprocess.Popen(command, cwd=path, env=environment, text=True, **pipes))

    def answers(self) -> list[str]:
        """The next line of every rank that is not a library's."""
        found = []
        for rank in self.ranks:
            assert rank.stdout is not None
            for line in rank.stdout:
                if line.startswith(("ready", "{")):
                    found.append(line)
                    break
            else:
                raise RuntimeError(f"{self.name}: a rank has ended; see its log")
        return found

    def measure(self, turn: int, *, check: bool) -> list[dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin is not None
            print(json.dumps([turn, check]), file=rank.stdin, flush=True)
        return [json.loads(line) for line in self.answers()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path(__file__).parents[2]])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--folder", type=Path, help="of the model; used by the ranks' processes")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.rank is not None:
        rank_process(options)
        return 0
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from orhpc.process.ports import free_ports
    from tests.gpu.random_model import write_model

    size = "30b" if options.device == "cuda" else "tiny-experts"
    folder = write_model(options.out / f"model-{size}-{options.layers}", options.layers, size)
    ports = free_ports(len(options.trees), "127.0.0.1")
    trees = [
        Tree(path.resolve(), options, folder, port) for path, port in zip(options.trees, ports, strict=True)
    ]
    for tree in trees:
        tree.answers()
    results: dict[str, list[list[dict[str, Any]]]] = {tree.name: [] for tree in trees}
    for turn in range(ROUNDS):
        for tree in trees:
            last = turn == ROUNDS - 1 and tree is trees[-1]
            results[tree.name].append(tree.measure(turn, check=last))
            (options.out / "gather_weights.json").write_text(json.dumps(results, indent=1))
    for tree in trees:
        for rank in tree.ranks:
            rank.communicate()
    return report(results)


def report(results: dict[str, list[list[dict[str, Any]]]]) -> int:
    """Print seconds of the slower rank; returns 1 if a check has failed."""
    print(f"{'seconds, median of the slower rank':40}" + "".join(f"{case:>12}" for case in CASES))
    for name, turns in results.items():
        medians = [
            statistics.median(
                [max(each) for turn in turns for each in zip(*(r[case] for r in turn), strict=True)]
            )
            for case in CASES
        ]
        print(f"{name:40}" + "".join(f"{value:12.3f}" for value in medians))
    checks = {k: v for turns in results.values() for r in turns[-1] for k, v in r.items() if "equal" in k}
    print(f"same bytes one by one: {checks}")
    return int(not checks or not all(checks.values()))


if __name__ == "__main__":
    sys.exit(main())
