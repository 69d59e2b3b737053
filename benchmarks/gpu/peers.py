"""One RL step of orhpc and one of verl on Hopper GPUs: same model, batch, lengths and SGLang, in turns.

    python benchmarks/gpu/peers.py pack DIR      # where there is a network: DIR/peers.tar.xz, for PYTHONPATH
    python benchmarks/gpu/peers.py run --out DIR [--seconds 540] [--sides orhpc verl] [--gpus 1]
    python benchmarks/gpu/peers.py report DIR

Both train a random model of Qwen3-0.6B's shapes with GRPO: 32 prompts x 8 samples of 256 tokens (a random
model hardly ever stops), bfloat16 with float32 masters, AdamW, learning rate 1e-6, no KL penalty, one
optimizer step on each batch, FSDP with gradient checkpointing, packed micro-batches of 16,384 tokens, and
SGLang on the same GPUs, an engine on each, with the same kernels and memory fraction. Otherwise each has the
settings that it recommends: orhpc ``configs/qwen3-0.6b.yaml``, verl those of ``peers_verl.py``.
``verl-bypass`` is verl without its forward pass for the log-probabilities at the start of the step
(``algorithm.rollout_correction.bypass_mode``): it takes SGLang's. orhpc leaves this pass out because with one
optimizer step on each batch the update computes the same numbers.

A turn is a run of ``--steps`` steps, whose first two are left out: kernels compile in them. The sides take
turns until the time is over; the first turns share it evenly, so one that hangs leaves the other its part.
Seconds are each side's own, from verl's ``file`` logger and orhpc's ``events.jsonl``; ``from step to step``
is the time between their records, and includes what a step's own clock leaves out. DIR gets ``peers.json``
with every step, rewritten during the run, and the ends of the logs. ``peers_standins.py`` replaces what verl
takes from flash-attn; the table names it.

Left out: starts, evaluation, checkpoints, several nodes, long and uneven answers (``heavy_tails.py``), tools,
and learning: verl's rewards are random numbers, orhpc's the share of even tokens; neither takes time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import peers_verl  # noqa: E402
from benchmarks.gpu.one_node import leave, machine  # noqa: E402
from benchmarks.gpu.peers_pack import FALLBACK_FOLDER, pack  # noqa: E402
from benchmarks.gpu.peers_report import SIDES, measured, report  # noqa: E402

RESULTS = "peers.json"
KERNELS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 8, 32, 64, 128, 256],
}
"""SGLang's options of both sides, without FlashAttention-3 and FlashInfer's kernels."""
PROMPT_BYTES = 47
"""Length of the text of a prompt; ChatML adds the same to both sides' texts."""
PROMPT_TOKENS = 256
"""Tokens reserved for a prompt; it takes about a third of them."""
RUNNING = 256
"""Requests that an SGLang runs at once."""
TURNS = ("trainer_sleep", "engines_resume", "engines_release", "trainer_wake")
"""Parts of orhpc's rollout phase in which trainer and engine exchange the GPU; here they count as sync."""
PACKAGES = ("torch", "transformers", "sglang", "ray", "verl", "tensordict", "TransferQueue", "triton")
END_S = 25.0
"""Seconds before the end in which the last turn is ended and the table printed."""
LEAVE_S = 12.0
_POLL_S = 0.2
_SET_CHILD_SUBREAPER = 36


@dataclass
class Turn:
    """One run of one side; times in seconds since the epoch."""

    side: str
    number: int
    began: float
    ended: float | None = None
    exit: int | None = None
    """The command's exit code; 124 if its time was over."""
    steps: list[dict[str, float]] = field(default_factory=list)


def main() -> int:
    options = parse()
    if options.command == "pack":
        pack(options.folder)
        return 0
    if options.command == "report":
        print(report(json.loads((options.folder / RESULTS).read_text())))
        return 0
    return run(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pack", "report"):
        commands.add_parser(name).add_argument("folder", type=Path)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--seconds", type=float, default=540.0, help="of everything (540)")
    runs.add_argument("--sides", nargs="+", choices=SIDES, default=["orhpc", "verl"])
    runs.add_argument("--work", type=Path, default=Path("/tmp/peers"), help="model and runs (/tmp/peers)")
    numbers = {
        "prompts": 32, "samples": 8, "response": 256, "tokens": 16384, "steps": 7, "layers": 28, "gpus": 1,
    }  # fmt: skip
    for name, default in numbers.items():
        runs.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    runs.add_argument("--memory", type=float, default=0.5, help="SGLang's fraction of the GPU (0.5)")
    runs.add_argument("--size", default="0.6b", help="shapes, of tests/gpu/random_model.py (0.6b)")
    runs.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more for orhpc")
    runs.add_argument("--set-verl", action="append", default=[], metavar="KEY=VALUE", help="more for verl")
    return parser.parse_args()


@dataclass
class Record:
    """``peers.json``: what the machine is, and the turns so far."""

    path: Path
    head: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)

    def contents(self) -> dict[str, Any]:
        return self.head | {"turns": [asdict(turn) for turn in self.turns]}

    def save(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.contents(), indent=1))
        part.replace(self.path)

    def unmeasured(self, sides: list[str]) -> list[str]:
        """The sides without a step after the first ones."""
        return [side for side in sides if not measured(self.contents()["turns"], side)]


def run(options: argparse.Namespace) -> int:
    """Let the sides take turns until the time is over; returns 1 if a side has no measured step."""
    end = time.monotonic() + options.seconds - END_S
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)  # processes that a run leaves become this one's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from tests.gpu.random_model import write_model

    began = time.monotonic()
    model = write_model(options.work / f"model-{options.size}-{options.layers}", options.layers, options.size)
    print(f"model: there after {time.monotonic() - began:.1f} s", flush=True)
    record = Record(options.out / RESULTS, head_of(options))
    try:
        while (until := next_deadline(record, options, end)) is not None:
            number = len(record.turns)
            turn = Turn(options.sides[number % len(options.sides)], number + 1, time.time())
            record.turns.append(turn)
            take_turn(turn, record, model, options, until)
            took = (turn.ended or time.time()) - turn.began
            print(f"turn {turn.number}, {turn.side}: {len(turn.steps)} steps, {took:.0f} s", flush=True)
    finally:
        end_children()
        record.save()
        text = report(record.contents())
        (options.out / "report.txt").write_text(text + "\n")
        print(text, flush=True)
    return int(bool(record.unmeasured(options.sides)))


def next_deadline(record: Record, options: argparse.Namespace, end: float) -> float | None:
    """Until when the next turn may run; None if there is no time for one, or a side has failed."""
    now = time.monotonic()
    ahead = len(options.sides) - len(record.turns)
    if ahead > 0:
        return now + (end - now) / ahead if end > now else None
    longest = max((turn.ended or turn.began) - turn.began for turn in record.turns)
    if record.unmeasured(options.sides) or end - now < longest + LEAVE_S:
        return None
    return end


def take_turn(turn: Turn, record: Record, model: Path, options: argparse.Namespace, until: float) -> None:
    """Run one side until its steps are done, it ends, or its time is over; then end all its processes."""
    name = f"{turn.side}-{turn.number}"
    work = options.work / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command, env = (orhpc if turn.side == "orhpc" else verl)(turn, model, work, options)
    log = work / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
            if read_steps(turn, work):
                record.save()
                if len(turn.steps) >= options.steps:
                    until = min(until, time.monotonic() + LEAVE_S)  # until it has ended
        done = len(turn.steps) >= options.steps
        turn.exit = process.poll() if process.poll() is not None else 0 if done else 124
    finally:
        leave(process, LEAVE_S)
        read_steps(turn, work)
        end_children()
        turn.ended = time.time()
        keep_logs(name, log, work, options.out)
        record.save()
    wait_for_memory()


def keep_logs(name: str, log: Path, work: Path, out: Path) -> None:
    (out / f"{name}.log").write_bytes(log.read_bytes()[-400_000:])
    for each in work.glob("*/attempts/*/*.log"):
        (out / f"{name}-{each.name}.txt").write_bytes(each.read_bytes()[-100_000:])


def orhpc(
    turn: Turn, model: Path, work: Path, options: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """orhpc's command and environment."""
    settings = {
        "run.root": work, "run.name": "run", "wandb.enabled": "false",
        "model.path": model, "model.check": "false", "placement.devices_per_node": options.gpus,
        "rollout.batch_size": options.prompts, "rollout.n_samples": options.samples,
        "rollout.max_response_tokens": options.response,
        "rollout.max_total_tokens": options.response + PROMPT_TOKENS,
        "rollout.custom_reward": "tests.gpu.random_model:even_tokens",
        "train.steps": options.steps, "train.global_batch_size": options.prompts * options.samples,
        "train.lr": 1e-6, "train.max_tokens_per_gpu": options.tokens,
        "engine.memory_fraction": options.memory, "engine.max_running": RUNNING,
        "checkpoint.save_interval": "null",
    }  # fmt: skip
    settings |= {f"engine.extra.{name}": json.dumps(value) for name, value in KERNELS.items()}
    command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/qwen3-0.6b.yaml"]
    return [*command, *(f"{name}={value}" for name, value in settings.items()), *options.set], environment()


def verl(
    turn: Turn, model: Path, work: Path, options: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    """verl's command and environment."""
    peers_verl.write_prompts(work / "prompts.jsonl", options.prompts * (options.steps + 1), PROMPT_BYTES)
    shape = {
        "prompts": options.prompts, "samples": options.samples, "response": options.response,
        "prompt_tokens": PROMPT_TOKENS, "tokens": options.tokens, "steps": options.steps, "lr": 1e-6,
        "memory": options.memory, "running": RUNNING, "gpus": options.gpus,
    }  # fmt: skip
    engine = KERNELS | {"context_length": options.response + PROMPT_TOKENS}
    settings = peers_verl.overrides(shape, model, work, engine)
    if turn.side == "verl-bypass":
        settings.append("algorithm.rollout_correction.bypass_mode=True")
    missing = [folder for folder in fallbacks() if find_spec(folder.name) is None]
    env = environment(*map(str, missing)) | {
        "VERL_FILE_LOGGER_PATH": str(work / "steps.jsonl"),
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return peers_verl.command([*settings, *options.set_verl]), env


def fallbacks() -> list[Path]:
    """Folders of packages that the archive has in case the machine does not."""
    roots = [Path(entry, FALLBACK_FOLDER) for entry in sys.path if entry]
    return [each for root in roots if root.is_dir() for each in sorted(root.iterdir())]


def environment(*folders: str) -> dict[str, str]:
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    # Ray kills processes at 95 % of the system's memory, page cache included, although that memory may grow.
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *known, *folders]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_memory_monitor_refresh_ms": "0",
    }


def read_steps(turn: Turn, work: Path) -> bool:
    """Read the steps that are done; returns whether there are new ones."""
    had = len(turn.steps)
    if turn.side == "orhpc":
        turn.steps = orhpc_steps(work / "run")
    else:
        found = peers_verl.steps_of(work / "steps.jsonl")[had:]
        turn.steps += [step | {"at": time.time()} for step in found]
    return len(turn.steps) > had


def orhpc_steps(folder: Path) -> list[dict[str, float]]:
    """Seconds by phase, and tokens, of each step of a run."""
    from orhpc.rundir.events import read_events, steps_of

    rows: list[dict[str, float]] = []
    for step, event in sorted(steps_of(read_events(folder / "events.jsonl")).items()):
        phases, turns = event["phases"], sum(event.get(f"seconds_{name}", 0.0) for name in TURNS)
        copying = event.get("seconds_trainer_copy", 0.0)
        known = {
            "rollout": phases["rollout"] - turns - copying,
            "logprobs": 0.0,
            "update": phases["update"],
            "sync": phases["sync"] + turns,
        }
        rows.append(
            {
                "step": step,
                "seconds": event["seconds"],
                **known,
                "rest": event["seconds"] - sum(known.values()),
            }
            | {"total_tokens": event["total_tokens"], "response_length": event["response_length_mean"]}
            | {"at": event["time"]}
        )
    return rows


# --- ending processes ---------------------------------------------------------------------------------------


def end_children() -> None:
    """End every process that the turns have started and left."""
    import psutil

    for _ in range(3):
        left = psutil.Process().children(recursive=True)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5.0)
        if not left:
            return


def wait_for_memory(seconds: float = 20.0) -> None:
    """Wait until the last turn's memory is free on all GPUs."""
    until = time.monotonic() + seconds
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while time.monotonic() < until:
        try:
            used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):
            return
        if all(float(mebibytes) < 2000 for mebibytes in used):
            return
        time.sleep(0.5)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def head_of(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        "prompts",
        "samples",
        "response",
        "tokens",
        "steps",
        "memory",
        "size",
        "layers",
        "gpus",
        "set",
        "set_verl",
    )
    return {
        "machine": machine()[0],
        "versions": {package: installed(package) for package in PACKAGES},
        "shape": {name: getattr(options, name) for name in names},
        "engine": KERNELS,
        "notes": list(peers_verl.NOTES),
    }


if __name__ == "__main__":
    sys.exit(main())
