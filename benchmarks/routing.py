"""What recording and replaying expert routes costs on a CPU.

    PYTHONPATH=. python benchmarks/routing.py [--seconds 150]

Decode: 8192 tokens x 48 layers x top 8 from SGLang's encoding, beside base64 alone.  Replay: an update of a
random Qwen3-MoE (4 layers, 32 experts, top 4) with the recorded experts forced upon it (``replayed``), beside
the same update in which the routers choose and nothing is known of routes (``own choice``), and one in which
they choose and are compared with what was recorded (``compared``).

The recorded routes are those that the routers choose, so that all sides compute the same: random routes load
experts evenly and a router does not, which changes an update's time by itself.  (``random`` replays random
ones, to show by how much.)  One trainer does all of them, so that they compute in the same memory, and they
take turns update by update, in an order that is turned round each time, so that none has a better clock,
cache or neighbour.  The first updates, whose memory is cold, are left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from orhpc.routes import RouteShape, RouteShare, decode_routes, encode_routes
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role
from orhpc.train.batch import plan_batches
from orhpc.train.fetch import load_batch
from orhpc.types import MicroBatch, MiniBatch, Sample
from tests.trainer_kit import VOCABULARY, free_port, make_config, make_samples, with_routes

LAYERS, EXPERTS, TOPK = 4, 32, 4
COLD = 8
"""First updates of each side that are left out."""


@dataclass(frozen=True)
class Side:
    """What a trainer knows and does of routes; see the module's description."""

    recorded: bool
    replayed: bool
    random: bool = False


SIDES = {
    "own choice": Side(False, False),
    "compared": Side(True, False),
    "replayed": Side(True, True),
    "random": Side(True, True, random=True),
}


def decoding(repeats: int) -> tuple[float, float]:
    """Median seconds of decoding, and of its base64 alone."""
    shape = RouteShape(48, 8, 128)
    wire = encode_routes(np.random.default_rng(0).integers(0, 128, (8192, 48, 8)))
    whole, base64 = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        decode_routes(wire, shape, 8192)
        whole.append(time.perf_counter() - start)
        start = time.perf_counter()
        pybase64.b64decode_as_bytearray(wire)
        base64.append(time.perf_counter() - start)
    return statistics.median(whole), statistics.median(base64)


def model(folder: Path) -> str:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, moe_intermediate_size=256,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=EXPERTS, num_experts_per_tok=TOPK, decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def updates(folder: str, seconds_allowed: float) -> dict[str, list[float]]:
    """Seconds of each update by side; those of one index ran one after the other."""
    samples = make_samples(8, longest=256)
    shape = {"layers": LAYERS, "experts": EXPERTS, "topk": TOPK}
    (any_routes,) = plan_batches(
        with_routes(samples, **shape), ranks=1, n_minibatches=1, max_tokens=512
    ).minibatches
    train = {"lr": 0.0, "routing_replay": True}
    trainer = TrainerRank(make_config(train=train, record_routes=True), folder, 0, 1, torch.get_num_threads())
    trainer.connect("127.0.0.1", free_port(), 60)
    trainer.build()
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    try:
        switch = Switch(trainer)
        switch.to(SIDES["own choice"])
        own_routes = _own_routes(trainer, any_routes)
        ends = time.monotonic() + seconds_allowed
        for step in itertools.count():
            if time.monotonic() > ends and len(seconds["replayed"]) > 1:
                break
            for name in SIDES if step % 2 else reversed(SIDES):
                side = SIDES[name]
                switch.to(side)
                report = trainer.step([any_routes if side.random else own_routes], step=step)
                if side.recorded and (report["router_mismatch_fraction"] > 0) != side.random:
                    raise SystemExit(f"{name}: these are not the experts that were to be replayed")
                if step >= COLD:
                    seconds[name].append(report["seconds_update"])
    finally:
        trainer.close()
    return seconds


class Switch:
    """Makes a trainer that replays into one that was built otherwise.

    Its routers' hooks stay where nothing is known of routes: a dozen calls that return at once.
    """

    def __init__(self, trainer: TrainerRank) -> None:
        self._trainer = trainer
        self._policy: Any = trainer.backend.policy  # type: ignore[attr-defined]
        self._replay = self._policy.routers

    def to(self, side: Side) -> None:
        self._policy.routers = self._replay if side.recorded else None
        self._replay._replay = side.replayed
        routes = RouteShare() if side.recorded else None
        self._trainer.load_batch = partial(load_batch, routes=routes)
        self._replay.forget()


def _own_routes(trainer: TrainerRank, minibatch: MiniBatch) -> MiniBatch:
    """The mini-batch with the experts that the trainer's routers choose when they are left alone."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _router, _inputs, output: chosen.append(output[2]))
        for module in trainer.backend.policy.modules()  # type: ignore[attr-defined]
        if type(module).__name__.endswith("TopKRouter")
    ]
    routed: list[MicroBatch] = []
    for micro_batch in minibatch.ranks[0]:
        chosen.clear()
        trainer.backend.logprobs(Batches([trainer.load_batch(micro_batch)], 1), Role.POLICY)
        routes_PLK = torch.stack(chosen, 1).numpy().astype(np.uint8)
        ends = np.cumsum([sample.length for sample in micro_batch.samples])
        parts = [
            _routed(sample, routes_PLK[end - sample.length : end - 1])
            for sample, end in zip(micro_batch.samples, ends, strict=True)
        ]
        routed.append(replace(micro_batch, samples=tuple(parts)))
    for hook in hooks:
        hook.remove()
    return replace(minibatch, ranks=(tuple(routed),))


def _routed(sample: Sample, routes: np.ndarray) -> Sample:
    arrays = {**sample.location.arrays, "routes": routes}
    return replace(sample, location=replace(sample.location, arrays=arrays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="of updates; four sides take turns")
    options = parser.parse_args()
    whole, base64 = decoding(9)
    print(f"decode 8192 x 48 x 8: {whole * 1e3:.1f} ms, base64 alone {base64 * 1e3:.1f} ms (target <= 30 ms)")
    with tempfile.TemporaryDirectory() as folder:
        found = updates(model(Path(folder)), options.seconds)
    own = found["own choice"]
    print(
        f"update: own choice {statistics.median(own):.4f} s, median of {len(own)} (target: replayed <= 1.02)"
    )
    for name in list(SIDES)[1:]:
        ratio = statistics.median(found[name]) / statistics.median(own)
        pairs = statistics.quantiles([a / b for a, b in zip(found[name], own, strict=True)], n=4)
        quartiles = ", ".join(f"{value:.3f}" for value in pairs)
        print(
            f"        {name} {statistics.median(found[name]):.4f} s, ratio {ratio:.3f} "
            f"(quartiles of the pairs {quartiles})"
        )


if __name__ == "__main__":
    main()
