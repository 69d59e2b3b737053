"""Independent checks of the Megatron trainer on one to four GPUs, with a table at the end.

    python tests/gpu/megatron_check.py [CHECK ...] [--seconds 240]

On one GPU each: ``dense`` (log-probabilities against transformers, memory against the plan, tokens/s against
bare megatron-core, on the layers of Qwen3-8B), ``head`` (log-probability and loss against one read of the
logits), ``moe`` (the same and routing replay, on the layers of Qwen3-30B-A3B), ``moe_speed`` (their tokens/s
against bare megatron-core, and a profile of a step), ``fp8``, ``optimiser`` (in host memory, and with moments
in bfloat16), and ``families0`` and ``families1`` (small models of each family, including Gemma 2 through
compiled flex attention and Llama 4 in chunks; weights are exported bit for bit). On two and four GPUs:
``several`` (TP, PP, CP, EP against one GPU's log-probabilities and gradient norm, and data-parallel scaling),
which needs the results of ``dense`` and ``moe``. With ``--share``, cases that need more GPUs than there are
run several ranks on each GPU; NCCL then uses sockets, and speeds are meaningless. Single-GPU checks are
distributed over the GPUs. Every check prints its own failure and has a deadline; the exit code is the number
of failed rows.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.process.devices import VARIABLE, visible_devices  # noqa: E402
from orhpc.process.ports import free_ports  # noqa: E402
from tests.gpu import megatron_kit as kit  # noqa: E402
from tests.gpu.megatron_kit import Row  # noqa: E402
from tests.gpu.megatron_one import CHECKS, leave_groups  # noqa: E402
from tests.gpu.megatron_several import CASES, compare, known  # noqa: E402

DEADLINE_S = {"dense": 80, "moe": 80, "moe_speed": 120, "optimiser": 120, "families0": 120, "families1": 120}
PARTS = {
    1: [["dense", "head", "moe", "moe_speed", "fp8", "optimiser", "families0", "families1"]],
    2: [["dense", "head", "families0"], ["moe", "moe_speed", "fp8", "optimiser", "families1"]],
    4: [["dense", "head"], ["moe", "moe_speed", "fp8"], ["families0", "optimiser"], ["families1"]],
}
"""Checks of each GPU, by the number of GPUs."""


def work(options: argparse.Namespace) -> int:
    """Body of a worker process: append rows to the results one by one."""
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


def work_together(options: argparse.Namespace) -> int:
    """One of several ranks: run the cases in turn; a failure ends all, and the parent restarts them."""
    for index in options.cases:
        began, case = time.monotonic(), CASES[index]
        if options.rank == 0:
            _reached(case.kind, case.world).write_text(str(index))
        try:
            for row in compare(case, options.rank, options.port + index):
                if options.rank == case.world - 1:
                    _append(row)
        except Exception as error:
            traceback.print_exc()
            _append(Row(f"{case.name}, rank {options.rank}", False, f"{error!r}"[:300]))
            os._exit(1)
        print(f"== {case.name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _reached(kind: str, world: int) -> Path:
    """File with the current case of a group of ranks."""
    return kit.WORK / f"reached-{kind}-{world}"


def _too_late(*_: Any) -> None:
    raise TimeoutError("past its deadline")


def _append(row: Row) -> None:
    with (kit.WORK / "results.jsonl").open("a") as file:
        file.write(json.dumps([row.name, row.ok, row.note]) + "\n")
    print(f"{'ok  ' if row.ok else 'FAIL'} {row.name}: {row.note}", flush=True)


def launch(
    gpus: Sequence[int], name: str, *arguments: str, settings: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    visible = visible_devices(gpus, os.environ)
    environment = {**os.environ, VARIABLE: visible, "OMP_NUM_THREADS": "4", **(settings or {})}
    with (kit.WORK / f"{name}.log").open("w") as log:
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def wait(processes: list[subprocess.Popen[bytes]], until: float, *, together: bool = False) -> None:
    """Wait until all have ended; ``together``: the failure of one ends all."""
    while any(process.poll() is None for process in processes):
        broken = together and any(process.poll() for process in processes)
        if time.monotonic() > until or broken:
            for process in processes:
                process.kill()
        time.sleep(0.2)


def run_alone(checks: list[str], gpus: int, until: float) -> None:
    parts = [[c for c in part if c in checks] for part in PARTS[max(n for n in PARTS if n <= gpus)]]
    running = [launch([gpu], "-".join(part), "--worker", *part) for gpu, part in enumerate(parts) if part]
    wait(running, until)


def run_together(kind: str, gpus: Sequence[int], cases: list[int], until: float) -> None:
    """Run the cases of one model on these GPUs; the cases after a failed one are restarted."""
    while cases and time.monotonic() < until:
        port = free_ports(len(CASES), "127.0.0.1", consecutive=True)[0]
        more = ("--port", str(port), "--cases", *map(str, cases))
        ranks = range(len(gpus))
        names = [f"{kind}{len(gpus)}-{cases[0]}-{rank}" for rank in ranks]
        running = [
            launch([gpus[r]], names[r], "--worker", "--rank", str(r), *more, settings=_apart(gpus, r))
            for r in ranks
        ]
        wait(running, until, together=True)
        if all(process.returncode == 0 for process in running):
            return
        mark = _reached(kind, len(gpus))
        reached = int(mark.read_text()) if mark.exists() else cases[0]
        _append(Row(CASES[reached].name, False, "did not finish"))
        cases = [index for index in cases if index > reached]


def _apart(gpus: Sequence[int], rank: int) -> dict[str, str]:
    """NCCL's settings for ranks that share a GPU, which NCCL accepts only from apparently different hosts."""
    if len(set(gpus)) == len(gpus):
        return {}
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def run_several(wanted: list[int], gpus: int, until: float, *, share: bool) -> None:
    """Run on pairs of GPUs, both kinds of model concurrently if there are two pairs; then on all four."""
    for index in wanted:
        if (share or CASES[index].world <= gpus) and not known(CASES[index]):
            _append(Row(CASES[index].name, False, "one GPU left nothing to compare with"))
    able = [i for i in wanted if (share or CASES[i].world <= gpus) and known(CASES[i])]
    for world in (2, 4):
        with ThreadPoolExecutor() as pool:
            # Each kind has its own GPUs if there are enough; otherwise one kind runs at a time.
            apart = gpus >= 2 * world
            for at, kind in enumerate(("dense", "moe")):
                mine = [i for i in able if CASES[i].kind == kind and CASES[i].world == world]
                first = at * world if apart else 0
                own = [rank % gpus for rank in range(first, first + world)]
                done = pool.submit(run_together, kind, own, mine, until)
                if not apart:
                    done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checks", nargs="*", help=", ".join([*CHECKS, "several"]))
    parser.add_argument("--seconds", type=float, default=240.0, help="all of it")
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="of several")
    parser.add_argument("--share", action="store_true", help="several ranks on a GPU where there are too few")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kit.WORK.mkdir(parents=True, exist_ok=True)
    if options.worker:
        return work_together(options) if options.port else work(options)
    for old in (*kit.WORK.glob("*.log"), *kit.WORK.glob("reached-*"), kit.WORK / "results.jsonl"):
        old.unlink(missing_ok=True)
    checks = options.checks or [*CHECKS, "several"]
    until, gpus = time.monotonic() + options.seconds, torch.cuda.device_count()
    run_alone(checks, gpus, until)
    if "several" in checks:
        run_several(options.cases, gpus, until, share=options.share)
    return report()


def report() -> int:
    """Print the failures with their places, and the table; return the number of failed rows."""
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
