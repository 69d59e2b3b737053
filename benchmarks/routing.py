"""What recording and replaying expert routes costs on a CPU.

    PYTHONPATH=. python benchmarks/routing.py [--repeats 60] [--rounds 3]

Decode: 8192 tokens x 48 layers x top 8 from SGLang's encoding, beside base64 alone.  Replay: an update of a
random Qwen3-MoE (4 layers, 32 experts, top 4) with the recorded experts forced upon it (``replayed``), beside
the same update in which the routers choose and nothing is known of routes (``own choice``), and one in which
they choose and are compared with what was recorded (``compared``).

The recorded routes are those that the routers choose, so that all sides compute the same: random routes load
experts evenly, a router does not, and unequal loads alone differ by several per cent.  A trainer of each side
stands in one process and they take turns step by step, in an order that is turned round each time, so that
none has a better clock, cache or neighbour.  Each round builds them anew, in another order: where memory
happens to lie differs too.  The first steps, whose memory is cold, are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pybase64
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from orhpc.routes import RouteShape, decode_routes, encode_routes
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role
from orhpc.train.batch import plan_batches
from orhpc.types import MicroBatch, MiniBatch, Sample
from tests.trainer_kit import VOCABULARY, free_port, make_config, make_samples

LAYERS, EXPERTS, TOPK = 4, 32, 4
COLD = 3
"""First updates of each trainer that are left out."""
SIDES = {
    "own choice": {"record": False, "replay": False},
    "compared": {"record": True, "replay": False},
    "replayed": {"record": True, "replay": True},
}
"""What each trainer knows and does of routes; see the module's description."""


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


def updates(folder: str, *, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each update by side; those of one index ran one after the other."""
    samples = make_samples(8, longest=256)
    routed = _with_own_routes(folder, samples)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for turn in range(rounds):
        order = list(SIDES)[turn % len(SIDES) :] + list(SIDES)[: turn % len(SIDES)]
        trainers = {name: _trainer(folder, **SIDES[name]) for name in order}
        try:
            for step in range(COLD + repeats):
                for name in order if step % 2 else reversed(order):
                    report = trainers[name].step([routed], step=step)
                    if report.get("router_mismatch_fraction", 0.0):
                        raise SystemExit(f"{name}: other experts than the routers' own were replayed")
                    if step >= COLD:
                        seconds[name].append(report["seconds_update"])
        finally:
            for trainer in trainers.values():
                trainer.close()
    return seconds


def _trainer(folder: str, *, record: bool, replay: bool) -> TrainerRank:
    config = make_config(train={"lr": 0.0, "routing_replay": replay}, record_routes=record)
    trainer = TrainerRank(config, folder, 0, 1, torch.get_num_threads())
    if not dist.is_initialized():  # one group is enough for all trainers of this process
        trainer.connect("127.0.0.1", free_port(), 60)
    trainer.build()
    return trainer


def _with_own_routes(folder: str, samples: list[Sample]) -> MiniBatch:
    """A mini-batch of the samples with the experts that the model's routers choose for them."""
    (minibatch,) = plan_batches(samples, ranks=1, n_minibatches=1, max_tokens=512).minibatches
    trainer = _trainer(folder, record=False, replay=False)
    chosen: list[torch.Tensor] = []
    for module in trainer.backend.policy.modules():  # type: ignore[attr-defined]
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _router, _inputs, output: chosen.append(output[2]))
    routed: list[MicroBatch] = []
    try:
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
    finally:
        trainer.close()
    return replace(minibatch, ranks=(tuple(routed),))


def _routed(sample: Sample, routes: np.ndarray) -> Sample:
    arrays = {**sample.location.arrays, "routes": routes}
    return replace(sample, location=replace(sample.location, arrays=arrays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="updates of each side and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    whole, base64 = decoding(9)
    print(f"decode 8192 x 48 x 8: {whole * 1e3:.1f} ms, base64 alone {base64 * 1e3:.1f} ms (target <= 30 ms)")
    with tempfile.TemporaryDirectory() as folder:
        found = updates(model(Path(folder)), rounds=options.rounds, repeats=options.repeats)
    own = found["own choice"]
    print(f"update: own choice {statistics.median(own):.4f} s, median of {len(own)}")
    for name in ("compared", "replayed"):
        ratio = statistics.median(found[name]) / statistics.median(own)
        pairs = statistics.quantiles([a / b for a, b in zip(found[name], own, strict=True)], n=4)
        quartiles = ", ".join(f"{value:.3f}" for value in pairs)
        print(
            f"        {name} {statistics.median(found[name]):.4f} s, ratio {ratio:.3f} "
            f"(quartiles of the pairs {quartiles}; target <= 1.02)"
        )


if __name__ == "__main__":
    main()
