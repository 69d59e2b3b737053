"""The Megatron trainer on one and two GPUs: many independent checks, a table at the end.

    python tests/gpu/megatron_check.py [CHECK ...] [--seconds 240]

On one GPU each: ``dense`` (log-probabilities against transformers, memory against the plan, tokens/s
against bare megatron-core, on the layers of Qwen3-8B), ``head`` (log-probability and loss against one read
of the logits), ``moe`` (the same and routing replay, on the layers of Qwen3-30B-A3B), ``fp8``, and
``families0`` and ``families1`` (small models of each family; weights back bit for bit).  On two GPUs:
``two`` (TP, PP, CP, EP against one GPU's log-probabilities and gradient norm, and scaling over data), which
needs what ``dense`` and ``moe`` found.  Where there are two GPUs, they share the checks of one.  Every check
prints its own failure and has a deadline; the exit code is the number of failed rows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.ports import free_ports  # noqa: E402
from tests.gpu import megatron_kit as kit  # noqa: E402
from tests.gpu.megatron_one import CHECKS, Row, leave_groups  # noqa: E402
from tests.gpu.megatron_two import LAYOUTS, two  # noqa: E402

DEADLINE_S = {"dense": 80}
STEPS = (({"dense", "head"}, {"moe", "fp8"}), ({"families0"}, {"families1"}))
"""What runs first, and then, on the first GPU and on the second; ``two`` between them."""


def work(options: argparse.Namespace) -> int:
    """Body of a worker process: append rows to the results as they are found."""
    failed = 0
    for check in options.checks:
        began = time.monotonic()
        signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(DEADLINE_S.get(check, 60))
        try:
            for row in CHECKS[check]():
                _append(row)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            _append(Row(check, False, f"{type(error).__name__}: {str(error)[:300]}"))
            leave_groups()
        finally:
            signal.alarm(0)
        print(f"== {check}: {time.monotonic() - began:.0f} s", flush=True)
    return failed


def work_two(options: argparse.Namespace) -> int:
    """One of two ranks: the layouts in turn; a failure ends both, and the parent starts them again."""
    for index in options.layouts:
        began = time.monotonic()
        if options.rank == 0:
            (kit.WORK / "layout").write_text(str(index))
        try:
            for row in two(index, options.rank, options.port + index):
                if options.rank == 1:
                    _append(row)
        except Exception as error:
            traceback.print_exc()
            _append(Row(f"two, rank {options.rank} {LAYOUTS[index]}", False, f"{error!r}"[:300]))
            os._exit(1)
        print(f"== {LAYOUTS[index]}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _too_late(*_: Any) -> None:
    raise TimeoutError("past its deadline")


def _append(row: Row) -> None:
    with (kit.WORK / "results.jsonl").open("a") as file:
        file.write(json.dumps([row.name, row.ok, row.note]) + "\n")
    print(f"{'ok  ' if row.ok else 'FAIL'} {row.name}: {row.note}", flush=True)


def launch(gpu: int, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "4"}
    with (kit.WORK / f"{name}.log").open("w") as log:
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def wait(processes: list[subprocess.Popen[bytes]], until: float, *, together: bool = False) -> None:
    """Until all have ended; ``together``: the failure of one is the end of all."""
    while any(process.poll() is None for process in processes):
        broken = together and any(process.poll() for process in processes)
        if time.monotonic() > until or broken:
            for process in processes:
                process.kill()
        time.sleep(0.2)


def run_single(step: tuple[set[str], set[str]], checks: list[str], gpus: int, until: float) -> None:
    halves = [[c for c in checks if c in half] for half in step]
    parts = halves if gpus > 1 else [halves[0] + halves[1]]
    running = [launch(gpu, "-".join(part), "--worker", *part) for gpu, part in enumerate(parts) if part]
    wait(running, until)


def run_two(layouts: list[int], until: float) -> None:
    while layouts and time.monotonic() < until:
        port = free_ports(len(LAYOUTS), "127.0.0.1", consecutive=True)[0]
        more = ("--port", str(port), "--layouts", *map(str, layouts))
        names = [f"two{layouts[0]}-{rank}" for rank in (0, 1)]
        pair = [launch(r, names[r], "--worker", "--rank", str(r), *more) for r in (0, 1)]
        wait(pair, until, together=True)
        if all(process.returncode == 0 for process in pair):
            return
        reached = int((kit.WORK / "layout").read_text()) if (kit.WORK / "layout").exists() else layouts[0]
        _append(Row(f"two {LAYOUTS[reached]}", False, "did not finish"))
        layouts = [index for index in layouts if index > reached]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checks", nargs="*", help=", ".join([*CHECKS, "two"]))
    parser.add_argument("--seconds", type=float, default=240.0, help="all of it")
    parser.add_argument("--layouts", type=int, nargs="*", default=list(range(len(LAYOUTS))), help="of two")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kit.WORK.mkdir(parents=True, exist_ok=True)
    if options.worker:
        return work_two(options) if options.port else work(options)
    for old in (*kit.WORK.glob("*.log"), kit.WORK / "results.jsonl", kit.WORK / "layout"):
        old.unlink(missing_ok=True)
    checks = options.checks or [*CHECKS, "two"]
    until, gpus = time.monotonic() + options.seconds, torch.cuda.device_count()
    run_single(STEPS[0], checks, gpus, until)
    if "two" in checks and gpus > 1:
        known = [i for i in options.layouts if (kit.WORK / f"{LAYOUTS[i][0]}.json").exists()]
        for index in set(options.layouts) - set(known):
            _append(Row(f"two {LAYOUTS[index]}", False, "one GPU left nothing to compare with"))
        run_two(known, until)
    run_single(STEPS[1], checks, gpus, until)
    return report()


def report() -> int:
    """Print what failed, where, and the table; return the number of failed rows."""
    for log in sorted(kit.WORK.glob("*.log")):
        text = log.read_text(errors="replace")
        took = [line for line in text.splitlines() if line.startswith("== ")]
        print(f"--- {log.name}: {'; '.join(took)}")
        if "Traceback" in text:
            at = text.index("Traceback")
            print(text[at : at + 1800])
    results = kit.WORK / "results.jsonl"
    rows = [Row(*json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
    for row in rows:
        print(f"{'ok  ' if row.ok else 'FAIL'} {row.name}: {row.note}")
    return sum(not row.ok for row in rows)


if __name__ == "__main__":
    sys.exit(main())
