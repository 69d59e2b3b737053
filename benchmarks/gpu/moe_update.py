"""Speed and memory of the Megatron trainer's update of a mixture of experts on one GPU or two.

    python benchmarks/gpu/moe_update.py --out DIR [--gpus 2] [--seconds 450] [--layers 4]

A random model of Qwen3-30B-A3B's layer shapes (128 experts, 8 per token) replays routes in which some
experts are more popular than others, and even ones. The cases, the most telling first: whole layers
recomputed in micro-batches of 8,192 tokens (the defaults) and of 32,768; nothing recomputed in
micro-batches of 16,384 and 32,768; with ``megatron.counts_from_routes``; with overlapped all-to-alls as
well (two GPUs); cheap modules recomputed; then the best of these with even routes. Two GPUs divide the
experts (TP 1, EP 2) and, if time is left, tensors too (TP 2, EP 2). An update of 65,536 tokens a GPU is
timed from before its batches are packed until its optimizer has ended; FLOPs are counted without
recomputation's. Each case is also profiled for one update, and its peak is compared with what ``orhpc
plan`` computes; one that cannot fit is skipped. All cases take turns in one process a GPU. A case that
fails, or takes longer than ``--case-seconds``, is noted; the others go on in new processes. ``gradients``
compares the schedules' gradients. Results are written to ``DIR/moe_update-LAYOUT.json`` as they are
measured; the table is printed last and kept as ``DIR/moe_update.md``. ``--device cpu`` (with
``PYTHONPATH=tests/megatron/site``) tests the program on a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.moe_update_report import (  # noqa: E402
    ALONE,
    EXPERTS,
    LAYOUTS,
    SPARE_S,
    TENSORS,
    Results,
    joined,
    table,
)


class Launch:
    """Runs a layout's ranks, again without the case that failed, until all are done or the time is over."""

    def __init__(self, options: argparse.Namespace, layout: str, until: float) -> None:
        self.options, self.layout, self.until = options, layout, until
        self.world = 1 if layout == ALONE else 2

    def run(self) -> None:
        for attempt in range(6):
            if self.until - time.monotonic() < 2 * SPARE_S or self._attempt(attempt):
                return

    def _attempt(self, attempt: int) -> bool:
        """Whether it is of no use to try again: all cases have ended, the time is over, or no start works."""
        results = Results(self.options.out, self.layout, 0)
        results.begin("start")
        processes = self._started(attempt)
        problem = ""
        while any(process.poll() is None for process in processes) and not problem:
            time.sleep(0.2)
            if any(process.poll() for process in processes):
                problem = "a rank ended"
                time.sleep(2)  # the other may have a reason too
            elif time.monotonic() > self.until:
                return self._killed(processes)
            else:
                problem = self._overdue(results)
        self._killed(processes)
        if not problem and not any(process.returncode for process in processes):
            return True
        current = results.current
        reasons = [Results(self.options.out, self.layout, rank).reason() for rank in range(self.world)]
        reason = next(filter(None, reasons), problem or "a rank ended")
        Results(self.options.out, self.layout, 0).fail(reason, current)
        return current in ("start", "end")

    def _killed(self, processes: list[subprocess.Popen[bytes]]) -> bool:
        for process in processes:
            process.kill()
            process.wait()
        return True

    def _overdue(self, results: Results) -> str:
        current, seconds = results.age()
        allowed = self.options.start_seconds if current == "start" else self.options.case_seconds
        return f"{current} took more than {allowed:.0f} s" if seconds > allowed else ""

    def _started(self, attempt: int) -> list[subprocess.Popen[bytes]]:
        from orhpc.process.devices import VARIABLE, visible_devices
        from orhpc.process.ports import free_ports

        options, port = self.options, free_ports(1, "127.0.0.1")[0]
        found: list[subprocess.Popen[bytes]] = []
        for rank in range(self.world):
            words = [
                *("--out", str(options.out), "--device", options.device, "--layers", str(options.layers)),
                *("--steps", str(options.steps), "--turns", str(options.turns)),
                *("--seconds", str(self.until - time.monotonic() - 5)),
                *("--worker", self.layout, "--rank", str(rank), "--port", str(port)),
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "4"}
            environment["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink has put shared hosts out of service
            if options.device == "cuda":
                environment[VARIABLE] = visible_devices([rank], os.environ)
            name = f"{self.layout.replace(' ', '')}-{rank}-{attempt}.log"
            with (options.out / name).open("w") as log:
                command = [sys.executable, __file__, *words]
                found.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=1)
    parser.add_argument("--seconds", type=float, default=450.0, help="all of it")
    parser.add_argument("--case-seconds", type=float, default=60.0, help="of one case in one turn")
    parser.add_argument("--start-seconds", type=float, default=180.0, help="of imports and loading")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed updates of a case in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), help="default: all of --gpus")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        from benchmarks.gpu.moe_update_worker import work

        return work(options)
    end = time.monotonic() + options.seconds
    layouts = options.layouts or ([EXPERTS, TENSORS] if options.gpus == 2 else [ALONE])
    for index, layout in enumerate(layouts):
        # The first layout matters most: the others share a third of the remaining time.
        share = 1.0 if index == len(layouts) - 1 else 2 / 3
        Launch(options, layout, time.monotonic() + share * (end - time.monotonic())).run()
        print(table(joined(options.out, layouts[: index + 1])), flush=True)
    return report(options.out, layouts)


def report(out: Path, layouts: list[str]) -> int:
    """Write and print the table; return the number of failures."""
    found = joined(out, layouts)
    (out / "moe_update.json").write_text(json.dumps(found, indent=1))
    text = table(found)
    (out / "moe_update.md").write_text(text + "\n")
    print(text)
    failed: list[str] = []
    for layout, rows in found.items():
        failed += [f"{layout}: {name}: {row['failed']}" for name, row in rows.items() if "failed" in row]
        if not any("tflops" in row for row in rows.values()):
            failed.append(f"{layout}: nothing was timed")
    print("\n".join(["failed:", *failed]) if failed else "failed: nothing")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
