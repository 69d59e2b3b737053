"""Compare a trainer's update and its gathering of weights while its state moves, and while nothing moves.

    python tests/gpu/background_check.py [--layers 10] [--turns 4]

A mixture of Qwen3-30B-A3B's layer shapes on one GPU.  The state of ten layers takes 63 GB of it and of the
host's memory; a machine of 128 GiB ended it with twelve.  In each turn the weights are gathered and an update
is made twice: once while nothing is copied, and once, as in a run, just after the copies of the state to or
from the host have begun.  Prints medians of the turns after the first.  The exit code is 1 if either takes
longer by more than a third of these copies.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.train.actor import TrainerRank  # noqa: E402
from orhpc.train.weights.expert_blocks import ExpertBlocks  # noqa: E402
from orhpc.train.weights.update_requests import SyncPlan  # noqa: E402
from orhpc.types import MiniBatch  # noqa: E402
from tests.gpu import megatron_kit, update_kit  # noqa: E402

UPDATE_TOKENS, MICRO_BATCH_TOKENS = 65536, 16384
BFLOAT16 = {"moments_dtype": "bfloat16", "gradients_dtype": "bfloat16"}
PLAN = SyncPlan((), "", 60.0, None, blocks=ExpertBlocks(1, (0,)))
"""No engine receives what is gathered."""

Seconds = dict[str, list[float]]


def trainer_of(layers: int) -> tuple[TrainerRank, MiniBatch]:
    content = megatron_kit.MOE | {"num_hidden_layers": layers}
    folder = megatron_kit.make_folder(f"background-{layers}", content, "cuda")
    config = update_kit.make_config(1, "cuda", {"recompute": "full"}, MICRO_BATCH_TOKENS)
    megatron = config.megatron.model_copy(update=BFLOAT16)
    train = config.train.model_copy(update={"adam_beta2": 0.95})
    config = config.model_copy(update={"train": train, "megatron": megatron})
    trainer = megatron_kit.start(config, folder)
    count = UPDATE_TOKENS // sum(update_kit.LENGTHS)
    routes = update_kit.made_routes(folder, "natural", count)
    samples = update_kit.samples_of(count, content["vocab_size"], routes)
    return trainer, update_kit.planned(samples, 1, MICRO_BATCH_TOKENS)


def gather(trainer: TrainerRank) -> float:
    return trainer.send_weights(PLAN).seconds.gather


def update(trainer: TrainerRank, minibatch: MiniBatch) -> float:
    began = time.perf_counter()
    trainer.step([minibatch], step=0)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def slowest(duration: float) -> float:
    """Launch kernels for ``duration`` seconds, with a wait after each 100; returns the slowest 300's time."""
    numbers, began, found = torch.ones(1024, device="cuda"), time.perf_counter(), 0.0
    while time.perf_counter() - began < duration:
        window = time.perf_counter()
        for _ in range(3):
            for _ in range(100):
                numbers.add_(1)
            torch.cuda.current_stream().synchronize()
        found = max(found, time.perf_counter() - window)
    return found


def turn(trainer: TrainerRank, minibatch: MiniBatch, seconds: Seconds) -> None:
    """One turn; the trainer is awake before it and after it."""
    offload = trainer.backend._offload
    offload.settle()
    torch.cuda.synchronize()
    seconds["update, nothing moves"].append(update(trainer, minibatch))
    seconds["gathering, nothing moves"].append(gather(trainer))
    seconds["freeing gradients"].append(trainer.release_gradients())
    began = time.perf_counter()
    seconds["gathering while state moves to the host"].append(gather(trainer))
    offload.settle()
    torch.cuda.synchronize()
    seconds["moving to the host"].append(time.perf_counter() - began)
    seconds["sleep after it"].append(trainer.sleep()["seconds"])
    seconds["wake before it"].append(trainer.wake()["seconds"])
    began = time.perf_counter()
    offload.settle()
    torch.cuda.synchronize()
    seconds["moving back"].append(time.perf_counter() - began)
    trainer.sleep()
    trainer.wake()
    seconds["slowest 300 launches while state moves back"].append(slowest(0.8 * seconds["moving back"][-1]))
    trainer.sleep()
    trainer.wake()
    seconds["update while state moves back"].append(update(trainer, minibatch))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    trainer, minibatch = trainer_of(options.layers)
    seconds: Seconds = defaultdict(list)
    for _ in range(options.turns):
        turn(trainer, minibatch, seconds)
    return report(seconds)


def report(seconds: Seconds) -> int:
    middle = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    for name, found in seconds.items():
        print(f"{name}: {middle[name]:.4f} s ({', '.join(f'{s:.4f}' for s in found)})")
    slower = {
        "gathering": middle["gathering while state moves to the host"] - middle["gathering, nothing moves"],
        "update": middle["update while state moves back"] - middle["update, nothing moves"],
    }
    allowed = {"gathering": middle["moving to the host"] / 3, "update": middle["moving back"] / 3}
    for name, delay in slower.items():
        print(f"{name}: delayed by {delay:.4f} s; allowed {allowed[name]:.4f}")
    return int(any(delay > allowed[name] for name, delay in slower.items()))


if __name__ == "__main__":
    sys.exit(main())
