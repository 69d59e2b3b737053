"""The Megatron trainer on one and two GPUs: many independent checks, a table at the end.

    python tests/gpu/megatron_check.py [CHECK ...] [--seconds 200]

On one GPU each: ``dense`` (log-probabilities against transformers, memory against the plan, tokens/s
against bare megatron-core, on the layers of Qwen3-8B), ``head`` (log-probability and loss against one read
of the logits), ``moe`` (the same and routing replay, on the layers of Qwen3-30B-A3B), ``families`` (small
models of each family; weights back bit for bit), ``fp8``.  On two GPUs: ``two`` (TP, PP, CP, EP against one
GPU's log-probabilities and gradient norm, and scaling over data).  Where there are two GPUs, ``dense`` and
``head`` run on the first while the others run on the second.  Every check prints its own failure and has a
deadline; the exit code is the number of failed rows.
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

from tests.gpu import megatron_kit as kit  # noqa: E402
from tests.gpu.megatron_one import CHECKS, Row, leave_groups  # noqa: E402
from tests.gpu.megatron_two import LAYOUTS, two  # noqa: E402

DEADLINE_S = {"families": 70, "dense": 80}


def work(options: argparse.Namespace) -> None:
    """Body of a worker process: append rows to the results as they are found."""
    for check in options.worker.split(","):
        began = time.monotonic()
        signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(DEADLINE_S.get(check, 60))
        rows = two(options.layout, options.rank, options.port) if check == "two" else CHECKS[check]()
        try:
            for row in rows:
                if check != "two" or options.rank == 1:
                    _append(options.results, row)
        except Exception as error:
            traceback.print_exc()
            where = f"{check} {LAYOUTS[options.layout]}" if check == "two" else check
            _append(options.results, Row(where, False, f"{type(error).__name__}: {str(error)[:300]}"))
            if check != "two":
                leave_groups()
        finally:
            signal.alarm(0)
        print(f"== {check}: {time.monotonic() - began:.0f} s", flush=True)


def _too_late(*_: Any) -> None:
    raise TimeoutError("past its deadline")


def _append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps([row.name, row.ok, row.note]) + "\n")
    print(f"{'ok  ' if row.ok else 'FAIL'} {row.name}: {row.note}", flush=True)


def launch(gpu: str, worker: str, results: Path, *more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    log = (kit.WORK / f"{worker.split(',')[0]}{'-'.join(more).replace('--', '')}.log").open("w")
    command = [sys.executable, __file__, "--worker", worker, "--results", str(results), *more]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def wait(processes: list[subprocess.Popen[bytes]], until: float) -> None:
    for process in processes:
        try:
            process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_all(options: argparse.Namespace, until: float) -> list[Row]:
    checks = options.checks or [*CHECKS, "two"]
    results = kit.WORK / "results.jsonl"
    results.unlink(missing_ok=True)
    gpus = torch.cuda.device_count()
    singles = [c for c in checks if c in CHECKS]
    if gpus > 1:
        first = [c for c in singles if c in ("dense", "head")]
        parts = [first, [c for c in singles if c not in first]]
    else:
        parts = [singles]
    running = [launch(str(i), ",".join(part), results) for i, part in enumerate(parts) if part]
    wait(running, until)
    if "two" in checks and gpus > 1:
        for index in range(len(LAYOUTS)):
            if options.layouts and index not in options.layouts:
                continue
            if time.monotonic() > until - 10:
                _append(results, Row(f"two {LAYOUTS[index]}", False, "no time left"))
                continue
            port = str(kit.free_port())
            pair = [
                launch(str(r), "two", results, "--rank", str(r), "--port", port, "--layout", str(index))
                for r in (0, 1)
            ]
            wait(pair, min(until, time.monotonic() + 50))
    lines = results.read_text().splitlines() if results.exists() else []
    return [Row(*json.loads(line)) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checks", nargs="*", help=", ".join([*CHECKS, "two"]))
    parser.add_argument("--seconds", type=float, default=200.0, help="all of it")
    parser.add_argument("--layouts", type=int, nargs="*", help="numbers of those of two")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    for name in ("--rank", "--port", "--layout"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kit.WORK.mkdir(parents=True, exist_ok=True)
    if options.worker:
        work(options)
        return 0
    rows = run_all(options, time.monotonic() + options.seconds)
    for log in sorted(kit.WORK.glob("*.log")):
        text = log.read_text(errors="replace")
        if "Traceback" in text:
            print(f"--- {log.name}\n{text[-2500:]}")
    for row in rows:
        print(f"{'ok  ' if row.ok else 'FAIL'} {row.name}: {row.note}")
    return sum(not row.ok for row in rows)


if __name__ == "__main__":
    sys.exit(main())
