"""Measure complete training runs with Qwen3-30B-A3B's shapes at full size on one node.

    python benchmarks/gpu/one_node.py --out DIR [--cases bf16 fp8 split restart plain] [--seconds 560]

Weights are random, rollouts come from a bundled environment, and every run is ``python -m orhpc.launch
--local configs/qwen3-30b-a3b-node*.yaml`` with overrides: ``bf16`` and ``fp8`` (co-located on all GPUs),
``split`` (half of the GPUs train with an offloaded optimizer, half serve), ``restart`` (fewer layers, so that
commits fit the disk: SIGTERM in the middle, then the same command again) and ``plain`` (``bf16`` without
routing replay, for its KL). Cases that ``DIR/one_node.json`` lists as measured are skipped, so the same
command continues after a time limit. Events are copied to DIR during the run; the report, with published
figures for comparison, is printed last and by ``--report DIR``.

``--gpus``, ``--layers``, ``--tp``, ``--ep`` and ``--engine-tp`` adapt it to fewer GPUs; ``--device cpu --size
tiny`` (with ``PYTHONPATH=tests/megatron/site``) tries it without any. The GPU memory, host memory and disk
space of each case are compared with the machine first; a case that does not fit is not started.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import one_node_report as figures  # noqa: E402
from orhpc.config import Config  # noqa: E402
from orhpc.config.files import load_config  # noqa: E402
from orhpc.errors import OrhpcError  # noqa: E402
from orhpc.launch.checks.fit import check_fit  # noqa: E402
from orhpc.plan.memory import GIB  # noqa: E402
from orhpc.plan.run_plan import asleep_bytes, commit_bytes, make_plan, offloaded_bytes  # noqa: E402
from orhpc.rundir.events import read_events, steps_of  # noqa: E402
from tests.gpu.random_model import model_config, write_model  # noqa: E402
from tests.gpu.sglang_check import KERNELS  # noqa: E402

COLOCATED, SPLIT = "configs/qwen3-30b-a3b-node.yaml", "configs/qwen3-30b-a3b-node-split.yaml"
COLOCATED_ON_FOUR = "configs/qwen3-30b-a3b-node-of-four.yaml"
PROMPT_TOKENS = 256
"""Tokens reserved for the prompt; the environment's prompts have about 100 bytes."""
GRAPHS = [1, 8, 32, 64, 128, 256, 512]
PROCESS_BYTES = 5 * GIB
"""Host memory of one trainer rank or engine rank without its weights: libraries, CUDA, NCCL."""
HOST_GIB = 70
"""Host memory per GPU of a node.  On machines whose memory grows with use, the total that the system reports
is too small."""
OFFLOAD_ROUNDING = 1.5
"""torch allocates pinned memory in powers of two: this model's experts take 4/3 of their size."""
LEAVE_S = 30.0
_WEIGHT_BYTES = 2
CPU = (
    "placement.device=cpu", "engine.backend=cpu", "engine.max_running=32", "engine.threads=1",
    "engine.extra={load_format: dummy}", "model.dtype=float32", "rollout.workers_per_node=1",
    "environments.orhpc/arithmetic.replicas=1", "train.threads=1", "train.max_tokens_per_gpu=1024",
    "train.logprob_chunk_tokens=1024",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run, or two if it is stopped in the middle."""

    name: str
    config: str
    layers: int
    overrides: tuple[str, ...]
    stop_at: int | None = None
    """Send SIGTERM after this many steps, then repeat the same command."""


@dataclass
class Outcome:
    """Results of a case so far; written after each change."""

    name: str
    overrides: list[str]
    machine: str
    gpus: int
    trainer_gpus: int
    engine_gpus: int
    layers: int
    exits: list[int] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    stopped: float | None = None
    """When SIGTERM was sent; like the other times, in seconds since the epoch."""
    planned_gb: float = 0.0
    """Peak trainer memory according to ``orhpc plan``."""
    parameters: int = 0
    flops: dict[str, float] = field(default_factory=dict)
    """FLOPs to train on one token without recomputation, at the mean length ``length``."""
    problem: str = ""


def cases(options: argparse.Namespace) -> dict[str, Case]:
    """Every case, for the devices given by the options."""
    steps, half = options.steps, max(1, options.gpus // 2)
    cut = min(options.cut_layers, options.layers)
    colocated = layout(options, options.gpus, options.gpus)
    config = COLOCATED_ON_FOUR if options.gpus == 4 and options.device == "cuda" else COLOCATED
    colocated += (f"engine.ep={min(options.engine_tp, 4)}",) if config == COLOCATED_ON_FOUR else ()
    split = (
        *layout(options, half, options.gpus - half), f"placement.trainer_devices={half}",
        f"megatron.offload_optimizer={options.offload if options.device == 'cuda' else 0}",
    )  # fmt: skip
    every = max(1, steps // 2)
    saving = (f"checkpoint.save_interval={every}", "checkpoint.keep=1")
    found = [
        Case("bf16", config, options.layers, (*colocated, f"train.steps={steps}")),
        Case("fp8", config, options.layers, (*colocated, f"train.steps={steps}", "precision=fp8")),
        Case("split", SPLIT, options.layers, (*split, f"train.steps={steps}")),
        Case("restart", config, cut, (*colocated, f"train.steps={steps}", *saving), stop_at=every + 1),
        Case(
            "plain",
            config,
            options.layers,
            (*colocated, f"train.steps={min(steps, 3)}", "train.routing_replay=false"),
        ),
    ]
    return {case.name: case for case in found}


def layout(options: argparse.Namespace, trainers: int, engines: int) -> tuple[str, ...]:
    """The parallel layout for this number of GPUs on each side."""
    wanted = {
        "megatron.tp": min(options.tp, trainers),
        "megatron.ep": min(options.ep, trainers),
        "engine.tp": 1 if options.device == "cpu" else min(options.engine_tp, engines),
    }
    return tuple(f"{name}={value}" for name, value in wanted.items())


def overrides_of(case: Case, options: argparse.Namespace, folder: Path) -> list[str]:
    """All overrides of a case: for the machine, the model and the case, then the user's."""
    rollouts = options.groups * options.samples
    args = [
        f"run.root={options.work / 'runs'}", f"run.name={case.name}", "wandb.enabled=false",
        f"model.path={folder}", f"placement.devices_per_node={options.gpus}",
        f"rollout.batch_size={options.groups}", f"rollout.n_samples={options.samples}",
        f"rollout.max_response_tokens={options.response}",
        f"rollout.max_total_tokens={options.response + PROMPT_TOKENS}",
        "rollout.custom_reward=tests.gpu.random_model:even_tokens",
        f"train.global_batch_size={rollouts}", "checkpoint.save_interval=null",
        f"placement.host_memory_gib={options.host_gib}",
    ]  # fmt: skip
    if options.device == "cpu":
        args += CPU
    elif not options.own_kernels:
        kernels = KERNELS | {"cuda_graph_bs_decode": GRAPHS}
        if "precision=fp8" in case.overrides:
            kernels |= {"fp8_gemm_backend": "triton"}  # DeepGEMM compiles for two minutes on a new machine
        args += [f"engine.extra.{name}={json.dumps(value)}" for name, value in kernels.items()]
    return [*args, *case.overrides, *options.set]


def model_folder(case: Case, options: argparse.Namespace) -> Path:
    return options.work / f"{options.size}-{case.layers}{'-even' if options.even else ''}"


def config_of(case: Case, options: argparse.Namespace) -> Config:
    """The run's config, with a model folder that contains only the model's shape."""
    folder = options.work / f"{options.size}-{case.layers}-shape"
    if not (folder / "config.json").exists():
        model_config(case.layers, options.size).save_pretrained(folder)
    return load_config(ROOT / case.config, overrides_of(case, options, folder))


# --- memory and disk checks
# ------------------------------------------------------------------------------------------


def machine() -> tuple[str, float]:
    """Name of the first GPU and its memory in GiB; creates no CUDA context."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "cpu", 0.0
    name, mib = output.rsplit(",", 1)
    return name.strip(), float(mib) / 1024


def check(case: Case, options: argparse.Namespace, outcome: Outcome) -> str:
    """The resources that a case needs, as text.

    Raises:
        OrhpcError: the layout is impossible, or a GPU has too little memory.
        MemoryError, OSError: host memory, or the disk, is too small.
    """
    config = config_of(case, options)
    gib = options.gpu_gib or 1.0
    plan = make_plan(config, gib)
    check_fit(plan)
    length = options.response + PROMPT_TOKENS // 2
    outcome.planned_gb, outcome.parameters = plan.trainer.total / 1e9, plan.shape.parameters
    outcome.flops = {"length": float(length), "token": plan.shape.training_flops(length)}
    ranks = config.placement.trainer_ranks + config.placement.rollout_devices
    host = asleep_bytes(plan) + OFFLOAD_ROUNDING * offloaded_bytes(plan) + ranks * PROCESS_BYTES
    disk = 0 if model_folder(case, options).exists() else plan.shape.parameters * _WEIGHT_BYTES
    commits = 0
    if config.checkpoint.save_interval is not None:
        commits = (config.checkpoint.keep + 1) * commit_bytes(plan)
        host += 0 if config.checkpoint.spare_host_memory else commit_bytes(plan)
    if options.device == "cuda" and host > options.host_gib * GIB:
        raise MemoryError(f"host memory: about {host / GIB:.0f} GiB wanted, {options.host_gib:.0f} there")
    free = shutil.disk_usage(options.work).free
    if disk + commits > free:
        raise OSError(
            f"disk: model {disk / 1e9:.0f} GB, commits {commits / 1e9:.0f} GB, free {free / 1e9:.0f} GB"
        )
    return (
        f"{case.name}: trainer {plan.trainer.total / GIB:.1f} GiB a GPU of {gib:.0f}, engine weights "
        f"{plan.engine_weights / GIB:.1f}; host about {host / GIB:.0f} GiB; commits {commits / 1e9:.0f} GB"
    )


# --- running --------------------------------------------------------------------------------------------


def run_case(case: Case, options: argparse.Namespace, outcome: Outcome, until: float) -> None:
    """Create the model, then run until the steps are done or the deadline is reached."""
    began = time.monotonic()
    folder = write_model(model_folder(case, options), case.layers, options.size, even=options.even)
    print(f"   {folder.name}: there after {time.monotonic() - began:.1f} s", flush=True)
    runs = options.work / "runs" / case.name
    shutil.rmtree(runs, ignore_errors=True)
    stop_at = case.stop_at
    while True:
        code = launch(case, options, outcome, runs, stop_at, until)
        outcome.exits.append(code)
        save(options, outcome)
        if code != 75 or stop_at is None:
            break
        stop_at = None
    if code != 0:
        keep_failure(case, options, runs)
    for found in runs.glob("profiles/step_*/rank_*.txt"):  # traces are large; --set train.profile_steps=[3]
        shutil.copy(found, options.out / f"{case.name}-{found.parent.name}-{found.name}")
    shutil.rmtree(runs, ignore_errors=True)


def launch(
    case: Case, options: argparse.Namespace, outcome: Outcome, run: Path, stop_at: int | None, until: float
) -> int:
    """Start the run once with ``orhpc.launch``; returns 124 if the deadline ended it."""
    command = [sys.executable, "-m", "orhpc.launch", "--local", case.config]
    # Ray kills processes at 95 % of the system's memory, page cache included, although that memory may grow.
    env = {**os.environ, "RAY_memory_monitor_refresh_ms": "0"}
    outcome.began.append(time.time())
    with (options.work / f"{case.name}.log").open("a") as log:
        process = subprocess.Popen(
            [*command, *overrides_of(case, options, model_folder(case, options))], cwd=ROOT, env=env,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    late = False
    try:
        while process.poll() is None:
            time.sleep(1.0)
            done = max(steps_of(copy_events(case, options, run)), default=0)
            late = time.monotonic() > until
            if late:
                break
            if stop_at is not None and done >= stop_at:
                stop_at, outcome.stopped = None, time.time()
                process.send_signal(signal.SIGTERM)
                save(options, outcome)
    finally:
        leave(process)
        outcome.ended.append(time.time())
        copy_events(case, options, run)
    return 124 if late else process.returncode


def leave(process: subprocess.Popen[bytes], wait_s: float = LEAVE_S) -> None:
    """End a run that is still active: after a second signal it exits without a commit."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(1.0)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()  # its child processes end with it
        process.wait()


def copy_events(case: Case, options: argparse.Namespace, run: Path) -> list[dict[str, Any]]:
    source = run / "events.jsonl"
    if not source.exists():
        return []
    shutil.copy(source, options.out / f"{case.name}-events.jsonl")
    return read_events(source)


def keep_failure(case: Case, options: argparse.Namespace, run: Path) -> None:
    """Append the last lines of a failed case's logs to one file for all cases."""
    with (options.out / "failures.txt").open("a") as file:
        for log in [options.work / f"{case.name}.log", *sorted(run.glob("attempts/*/*.log"))]:
            lines = log.read_text(errors="replace").splitlines()[-60:]
            file.write(f"--- {case.name}: {log.name}\n" + "\n".join(lines)[-12000:] + "\n")


def save(options: argparse.Namespace, outcome: Outcome) -> None:
    path = options.out / figures.OUTCOMES
    known = json.loads(path.read_text()) if path.exists() else {}
    known[outcome.name] = asdict(outcome)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(known, indent=1))
    part.replace(path)


# --- the command ----------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    numbers = {
        "gpus": 8, "layers": 48, "tp": 2, "ep": 8, "engine-tp": 2, "steps": 10, "groups": 32, "samples": 16,
        "response": 256, "cut-layers": 8,
    }  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--cases", nargs="*", default=["bf16", "split", "restart", "fp8", "plain"])
    parser.add_argument("--seconds", type=float, default=560.0, help="of all, the report included (560)")
    parser.add_argument("--case-seconds", type=float, default=540.0, help="of one case at most (540)")
    parser.add_argument(
        "--offload", type=float, default=0.5, help="share of the optimizer on the host in split (0.5)"
    )
    parser.add_argument("--out", type=Path, help="small files: events, figures, ends of logs")
    parser.add_argument("--work", type=Path, default=Path("/tmp/one_node"), help="models and runs: large")
    parser.add_argument("--size", choices=["30b", "small", "tiny"], default="30b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--even", action="store_true", help="random weights that use all experts alike")
    parser.add_argument("--own-kernels", action="store_true", help="SGLang's defaults, not the kit's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--check", action="store_true", help="only say what each case would take")
    parser.add_argument("--gpu-gib", type=float, help="of one GPU; else nvidia-smi's word")
    parser.add_argument("--host-gib", type=float, help=f"of the node's memory ({HOST_GIB} a GPU)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="print the report of DIR and end")
    options = parser.parse_args()
    if options.gpus == 4:
        parser.set_defaults(tp=1, ep=4, engine_tp=4)  # as its recipe
        options = parser.parse_args()
    if options.report is None and options.out is None:
        parser.error("--out DIR")
    return options


def outcome_of(case: Case, options: argparse.Namespace, name: str) -> Outcome:
    p = config_of(case, options).placement
    args = [*options.set, *case.overrides]
    return Outcome(case.name, args, name, p.devices, p.trainer_ranks, p.rollout_devices, layers=case.layers)


def main() -> int:
    options = parse()
    if options.report is not None:
        print(figures.report(options.report))
        return 0
    until = time.monotonic() + options.seconds
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    name, gib = machine()
    options.gpu_gib = options.gpu_gib or gib
    options.host_gib = options.host_gib or HOST_GIB * options.gpus
    failed = 0
    for case in (cases(options)[n] for n in options.cases):
        if case.name in figures.measured(options.out) and not options.check:
            print(f"{case.name}: measured before", flush=True)
            continue
        outcome = outcome_of(case, options, name)
        try:
            print(check(case, options, outcome), flush=True)
            if options.check:
                continue
            run_case(case, options, outcome, min(until, time.monotonic() + options.case_seconds))
        except (OrhpcError, OSError, MemoryError) as error:
            outcome.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            print(f"{case.name}: {outcome.problem}", flush=True)
        failed += not (outcome.exits and outcome.exits[-1] == 0)
        save(options, outcome)
    if options.check:
        return 0
    text = figures.report(options.out)
    (options.out / "report.md").write_text(text)
    print(text)
    return failed


if __name__ == "__main__":
    sys.exit(main())
