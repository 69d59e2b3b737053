"""What recording and replaying expert routes costs on a CPU.

    python benchmarks/routing.py [--repeats 9]

Decode: 8192 tokens x 48 layers x top 8 from SGLang's encoding, beside base64 alone.  Replay: an update of a
random Qwen3-MoE (4 layers, 32 experts, top 4) with the recorded experts forced upon it, beside the same
update in which the routers choose; the two sides alternate, both compute with the same experts' load as
near as random routes allow, and medians count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pybase64
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from orhpc.routes import RouteShape, decode_routes, encode_routes
from orhpc.train.actor import TrainerRank
from orhpc.train.batch import plan_batches
from orhpc.types import MiniBatch
from tests.trainer_kit import VOCABULARY, free_port, make_config, make_samples, with_routes

LAYERS, EXPERTS, TOPK = 4, 32, 4


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


def updates(folder: str, repeats: int) -> dict[str, float]:
    """Median seconds of an update with the routers' own choice, and with replay."""
    samples = make_samples(8, longest=256)
    routed = with_routes(samples, layers=LAYERS, experts=EXPERTS, topk=TOPK)
    minibatches: tuple[MiniBatch, ...] = plan_batches(
        routed, ranks=1, n_minibatches=1, max_tokens=512
    ).minibatches
    seconds: dict[str, list[float]] = {"own choice": [], "replay": []}
    for _ in range(2):  # two processes' worth of memory layout
        for name, times in seconds.items():
            train = {"lr": 0.0, "routing_replay": name == "replay"}
            config = make_config(train=train, record_routes=name == "replay")
            rank = TrainerRank(config, folder, 0, 1, torch.get_num_threads())
            rank.connect("127.0.0.1", free_port(), 60)
            rank.build()
            try:
                for step in range(repeats + 1):
                    report = rank.step(minibatches, step=step)
                    if step:  # the first one's memory is cold
                        times.append(report["seconds_update"])
            finally:
                rank.close()
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    whole, base64 = decoding(repeats)
    print(f"decode 8192 x 48 x 8: {whole * 1e3:.1f} ms, base64 alone {base64 * 1e3:.1f} ms (target <= 30 ms)")
    with tempfile.TemporaryDirectory() as folder:
        found = updates(model(Path(folder)), repeats)
    own, replay = found["own choice"], found["replay"]
    print(f"update: own choice {own:.3f} s, replay {replay:.3f} s, ratio {replay / own:.3f} (target <= 1.02)")


if __name__ == "__main__":
    main()
