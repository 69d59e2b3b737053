"""Independent checks of SGLang together with the trainer on Hopper GPUs, with a table at the end.

    python tests/gpu/sglang_check.py [SECTION ...] --out DIR [--gguf SmolLM2.gguf] [--after NAME:STEP]

Sections: ``protocol`` (tests/protocol against real servers), ``loop`` (configs/gpu-smollm2.yaml, stopped and
resumed in the middle), ``moe`` (the loop on a mixture of experts of Qwen3-30B-A3B's layer shapes: sync by
handle with every weight compared, sleep and wake), ``fp8`` (the same with FP8 engines), ``split`` (two GPUs:
the same by broadcast, from a Megatron trainer, and the broadcast alone), ``mixed`` (four GPUs: a Megatron
trainer with EP 2 and one engine on two of them, another engine on the other two; on two GPUs one trainer
rank), ``experts`` (two GPUs: EP 2 in trainer and engine on the same GPUs, with routing replay; on four EP 4),
``dp`` (two GPUs: DP attention and EP 2 in the engine, an FSDP trainer with two ranks) and ``speculative``
(one GPU: speculative decoding with a draft model). Each check prints its own failure; the exit code is the
number of failed ones. Sections can run concurrently in separate processes: ``--after loop:30`` begins when
the run ``loop`` has made 30 steps, ``--after loop:stopped`` when it has been stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.random_model import SIZES  # noqa: E402
from tests.gpu.sglang_engines import KERNELS, Row, engine_config, start_engine  # noqa: E402
from tests.gpu.sglang_models import WORK, moe_30b_layers, smollm2  # noqa: E402
from tests.gpu.sglang_protocol import protocol  # noqa: E402

__all__ = ["KERNELS", "engine_config", "start_engine"]
"""Names that benchmarks import from this module."""


# --- the loop ---------------------------------------------------------------------------------------


def launch(root: Path, *overrides: str, stop_at: int | None = None, deadline_s: float = 400) -> int:
    """A run through ``orhpc.launch``; ``stop_at``: send SIGTERM after this step."""
    command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/gpu-smollm2.yaml"]
    command += [f"run.root={root}", "wandb.enabled=false", *overrides]
    log = (root.parent / f"{root.name}.log").open("a")
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + deadline_s
    stopped = False
    while process.poll() is None:
        time.sleep(0.5)
        if time.monotonic() > end:
            process.kill()
            process.wait()
            print(f"   {root.name}: killed at its deadline", flush=True)
            return 124
        reached = max(steps(root), default=0)
        marker(root.name, "step").write_text(str(reached))
        if stop_at is not None and not stopped and reached >= stop_at:
            process.send_signal(signal.SIGTERM)
            stopped = True
    if stopped:
        marker(root.name, "stopped").touch()
    return process.returncode


def marker(name: str, what: str) -> Path:
    """File that reports a run's progress to sections in other processes."""
    return WORK / f"{name}.{what}"


def wait_for(when: str, deadline_s: float = 400) -> None:
    """Return when ``NAME:STEP`` or ``NAME:stopped`` is reached; ends the program at the deadline."""
    name, _, what = when.partition(":")
    end = time.monotonic() + deadline_s
    while True:
        if what == "stopped":
            come = marker(name, what).exists()
        else:
            step = marker(name, "step")
            come = step.exists() and int(step.read_text() or 0) >= int(what)
        if come:
            return
        if time.monotonic() > end:
            raise SystemExit(f"{when} has not come within {deadline_s:g} s")
        time.sleep(0.5)


def events(root: Path) -> list[dict[str, Any]]:
    found = list(root.glob("*/events.jsonl"))
    return [json.loads(line) for line in found[0].read_text().splitlines()] if found else []


def steps(root: Path) -> dict[int, dict[str, Any]]:
    return {e["step"]: e for e in events(root) if e["event"] == "step"}


def keep(root: Path, out: Path) -> None:
    """Copy the events and the curve to the output folder."""
    from tests.gpu.sglang_curve import write

    for found in root.glob("*/events.jsonl"):
        shutil.copy(found, out / f"{root.name}-events.jsonl")
        write(found, out / f"{root.name}-curve")


def show_failure(root: Path) -> None:
    outer = root.parent / f"{root.name}.log"
    logs = [outer, *root.glob("*/attempts/*/*.log")]
    for log in logs:
        print(f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:])[-2500:])


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def loop(options: argparse.Namespace) -> list[Row]:
    smollm2(options.gguf)
    root = WORK / "loop"
    overrides = [f"train.steps={options.steps}", *options.set]
    first = launch(root, *overrides, stop_at=options.steps // 2, deadline_s=options.deadline)
    print(f"   loop: first part ended with {first}", flush=True)
    keep(root, options.out)
    second = launch(root, *overrides, deadline_s=options.deadline) if first == 75 else -1
    keep(root, options.out)
    done = steps(root)
    if second != 0 or len(done) < options.steps:
        show_failure(root)
    rewards = [e["reward_mean"] for _, e in sorted(done.items())]
    timing = ", ".join(
        f"{k} {mean([e['phases'][k] for e in done.values() if k in e['phases']]):.2f}"
        for k in ("rollout", "update", "sync")
    )
    note = (
        f"exit {first} then {second}, {len(done)} steps, reward {mean(rewards[:5]):.3f} -> "
        f"{mean(rewards[-5:]):.3f}, seconds: {timing}"
    )
    rising = mean(rewards[-5:]) > mean(rewards[:5])
    return [
        ("loop, co-located, stopped and resumed", second == 0 and len(done) >= options.steps and rising, note)
    ]


def moe(options: argparse.Namespace, name: str = "moe", *more: str, layers: int = 4) -> list[Row]:
    folder = moe_30b_layers(layers, options.size)
    root = WORK / name
    # Concurrent runs count each other's memory as used; a token limit bounds each engine's memory.
    room = ["engine.memory_fraction=0.8", "engine.extra.max_total_tokens=262144"]
    overrides = [
        f"model.path={folder}", "train.steps=3", *room, "rollout.record_routes=true",
        "engine.check_weights=true", "rollout.batch_size=8", "rollout.n_samples=8",
        "train.global_batch_size=64", "train.lr=0.001",
        # Four layers of the 30B model's shapes then fit a GPU of 80 GB.
        "train.max_tokens_per_gpu=8192", "train.gradient_checkpointing=true",
        # A random model never answers correctly: without this reward, weights would hardly change.
        "rollout.custom_reward=tests.gpu.random_model:even_tokens",
        "engine.extra.moe_runner_backend=triton", "engine.extra.cuda_graph_bs_decode=[16,64]",
        "engine.extra.enforce_disable_flashinfer_allreduce_fusion=true",
        "checkpoint.save_interval=null", *more, *options.set,
    ]  # fmt: skip
    row = (
        f"{name}, loop" if "engine.check_weights=false" in more else f"{name}, weights equal after every sync"
    )
    code = launch(root, *overrides, deadline_s=options.deadline)
    keep(root, options.out)
    done = [e for _, e in sorted(steps(root).items())]
    if code != 0 or not done:
        show_failure(root)
        return [(row, False, f"exit {code}, {len(done)} steps")]
    last = done[-1]
    learnt = all(step.get("grad_norm", 0) > 0 for step in done)
    gb = last["sync_bytes"] / 1e9
    plain = last["sync_seconds_total"] - last.get("sync_seconds_check", 0.0)
    phases: dict[str, Any] = {k: round(v, 3) for k, v in last.items() if k.startswith("sync_seconds")}
    phases["each"] = [
        round(e["sync_seconds_total"] - e.get("sync_seconds_check", 0.0), 3)
        for e in done
        if "sync_seconds_total" in e
    ]
    rows = [
        (row, learnt, f"{len(done)} steps, log-prob difference "
         f"{last['logprob_diff_mean']:.2e} mean, {last['logprob_diff_max']:.2e} max, tokens that take other "
         f"experts {last['token_mismatch_fraction']:.3f}, "
         f"gradient norm {last.get('grad_norm', 0):.3g}"),
        (f"{name}, sync", True, f"{gb:.2f} GB in {plain:.2f} s, {gb / plain:.1f} GB/s; {phases}"),
    ]  # fmt: skip
    if "memory_trainer_moved_gb" in last:
        moved = last["memory_trainer_moved_gb"]
        down, up = moved / last["seconds_trainer_sleep"], moved / last["seconds_trainer_wake"]
        memory = {k: round(v, 2) for k, v in last.items() if k.startswith("memory_")}
        speeds = f"{moved:.1f} GB: {down:.1f} GB/s down, {up:.1f} GB/s up; {memory}"
        rows.append((f"{name}, sleep and wake", True, speeds))
    return rows


def fp8(options: argparse.Namespace) -> list[Row]:
    return moe(options, "fp8", "precision=fp8-rollout")


def split(options: argparse.Namespace) -> list[Row]:
    """Two GPUs: trainer and engine on separate GPUs, weights by broadcast."""
    from tests.gpu.sglang_broadcast import broadcast_alone

    rows = broadcast_alone() if options.size == "30b" else []
    return rows + moe(options, "split", *_SPLIT)


def deltas(options: argparse.Namespace) -> list[Row]:
    """Two GPUs: the engine is sent what has changed, from the third sync on; compared bit for bit."""
    size, options.size = options.size, "small"
    rows = moe(options, "deltas", *_SPLIT, "engine.delta_sync=true", "train.steps=6", "train.lr=1e-6")
    options.size = size
    done = steps(WORK / "deltas")
    sent = [done[step]["sync_bytes"] for step in sorted(done)]
    note = f"MB sent in each sync: {', '.join(f'{size / 1e6:.1f}' for size in sent)}"
    return [*rows, ("deltas, smaller than all weights", len(sent) > 3 and sent[-1] < sent[0] / 2, note)]


_SPLIT = (
    "placement.mode=split", "placement.devices_per_node=2", "placement.trainer_devices=1",
    "train.backend=megatron",
)  # fmt: skip


def mixed(options: argparse.Namespace) -> list[Row]:
    """Four GPUs: both trainer ranks share theirs with an engine on two GPUs; the other engine has its own.

    On two GPUs: one trainer rank, which shares its GPU with one of two engines.
    """
    import torch

    several = torch.cuda.device_count() >= 4
    return moe(
        options,
        "mixed",
        "placement.mode=mixed",
        f"placement.devices_per_node={4 if several else 2}",
        f"placement.trainer_devices={2 if several else 1}",
        f"placement.engine_devices={4 if several else 2}",
        "train.backend=megatron",
        f"megatron.ep={2 if several else 1}",
        f"engine.tp={2 if several else 1}",
        layers=2,
    )


def loading(options: argparse.Namespace) -> list[Row]:
    """Weights copied directly, on one GPU or all: few, because every sync is compared with an export."""
    size, options.size = options.size, "small"
    # The third sync is the first direct one.
    rows = _loading(options, "direct", "train.steps=5", "engine.direct_loading=true")
    options.size = size
    return rows


def loading_speed(options: argparse.Namespace) -> list[Row]:
    """Seconds of syncs by SGLang's own loading and by direct copies."""
    rows = _loading(options, "direct-speed", "train.steps=6", "engine.direct_loading=true", _UNCHECKED)
    return rows + _loading(options, "by-sglang", "train.steps=6", _UNCHECKED)


def own_experts(options: argparse.Namespace) -> list[Row]:
    """Several GPUs: each engine rank is sent its own experts only; the result is compared bit for bit."""
    size, options.size = options.size, "small"
    rows = experts(options, "own-experts", "train.steps=5", _OWN, "engine.direct_loading=true")
    options.size = size
    return rows


def own_experts_speed(options: argparse.Namespace) -> list[Row]:
    """Several GPUs: seconds of syncs of all experts and of each rank's own, and of these by direct copies."""
    ways = {"all-experts": [], "own-by-sglang": [_OWN], "own-direct": [_OWN, "engine.direct_loading=true"]}
    rows: list[Row] = []
    for name, settings in ways.items():
        rows += experts(options, name, "train.steps=6", _UNCHECKED, *settings)
    return rows


def _loading(options: argparse.Namespace, name: str, *more: str) -> list[Row]:
    import torch

    run = moe if torch.cuda.device_count() == 1 else experts
    return run(options, name, *more)


_UNCHECKED = "engine.check_weights=false"
_OWN = "engine.sync_own_experts=true"


def experts(options: argparse.Namespace, name: str = "", *more: str) -> list[Row]:
    """All GPUs, with expert parallelism in the Megatron trainer and in the engine on the same GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    return moe(
        options,
        name or f"experts{gpus}",
        f"placement.devices_per_node={gpus}",
        "train.backend=megatron",
        "train.routing_replay=true",
        f"megatron.ep={gpus}",
        f"engine.tp={gpus}",
        f"engine.ep={gpus}",
        *more,
        layers=3,
    )


def speculative(options: argparse.Namespace) -> list[Row]:
    """One GPU: a dense draft model for the small mixture; routes must belong to the accepted tokens.

    Random models' drafts are accepted by chance: here, tokens of about average probability are accepted.
    """
    options.size = "small"
    drafter = moe_30b_layers(1, "drafter")
    arguments = f"{{algorithm: STANDALONE, draft_model: {drafter}, num_steps: 3, num_draft_tokens: 4}}"
    average = 1 / SIZES["small"]["vocab_size"]
    return moe(
        options,
        "speculative",
        f"engine.speculative={arguments}",
        f"engine.extra.speculative_accept_threshold_single={average:.6f}",
        # The engine's checksum includes the draft model's weights, so weights are not compared.
        "engine.check_weights=false",
        layers=2,
    )


def dp(options: argparse.Namespace) -> list[Row]:
    """Two GPUs: an engine with DP attention, and a trainer with two ranks on the same GPUs."""
    return moe(
        options,
        "dp",
        "placement.devices_per_node=2",
        "engine.tp=2",
        "engine.dp=2",
        "engine.trusted_network=true",
        "engine.ep=2",
        layers=3,
    )


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "protocol": protocol,
    "loop": loop,
    "moe": moe,
    "fp8": fp8,
    "split": split,
    "deltas": deltas,
    "mixed": mixed,
    "experts": experts,
    "loading": loading,
    "loading-speed": loading_speed,
    "own-experts": own_experts,
    "own-experts-speed": own_experts_speed,
    "dp": dp,
    "speculative": speculative,
}
NOT_UNASKED = (
    "split", "deltas", "mixed", "experts", "loading", "loading-speed", "own-experts", "own-experts-speed",
    "dp", "speculative",
)  # fmt: skip
"""Sections that need several GPUs or test rarely used features."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--only", default="", help="part of the names of the protocol's models")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", choices=SIZES, default="30b", help="of the experts' layers")
    parser.add_argument("--after", help="NAME:STEP or NAME:stopped of a run in another process")
    parser.add_argument(
        "--deadline", type=float, default=400, help="seconds of a section's run, or of a suite"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the runs' config")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.after:
        wait_for(options.after)
    rows: list[Row] = []
    for name in options.sections or [n for n in SECTIONS if n not in NOT_UNASKED]:
        started = time.monotonic()
        try:
            rows += SECTIONS[name](options)
        except Exception as error:
            traceback.print_exc()
            rows.append((name, False, f"{type(error).__name__}: {str(error)[:300]}"))
        print(f"== {name}: {time.monotonic() - started:.0f} s", flush=True)
    for name, ok, note in rows:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {note}")
    return sum(not ok for _, ok, _ in rows)


if __name__ == "__main__":
    sys.exit(main())
