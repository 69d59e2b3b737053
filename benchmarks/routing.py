"""The cost of recording and replaying expert routes on a CPU.

    PYTHONPATH=. python benchmarks/routing.py [--seconds 150]

Decode: 8192 tokens x 48 layers x top 8 from SGLang's encoding, against base64 decoding alone.

Replay: an update of a random Qwen3-MoE (4 layers, 32 experts, top 4) that uses the recorded experts and
compares them with the routers' own choice (``replayed``), against the same update without routes (``own
choice``). The recorded routes are those that the routers choose, so that both compute the same; random routes
would load the experts differently. One trainer does both, so that both use the same memory. The two alternate
update by update, in an order that is reversed each time, so that clock, cache and other load affect both
equally. The first updates, whose memory is cold, are left out. On a shared machine, use OMP_NUM_THREADS=1 and
read the processor time: with several threads, a thread that other load delays also delays the threads that
wait for it.

One router: forward and backward pass of a single router, with its own choice and replayed. Replay adds only a
few small operations in the router, so this measures its cost even if updates vary by more than that.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role
from orhpc.train.batch import plan_batches
from orhpc.train.fetch import load_batch
from orhpc.train.fsdp.routing_replay import RoutedRows, RouterReplay
from orhpc.types import MicroBatch, MiniBatch, Sample
from orhpc.wire.routes import RouteShape, RouteShare, decode_routes, pack_rows
from tests.trainer_kit import VOCABULARY, free_port, make_config, make_samples

LAYERS, EXPERTS, TOPK = 4, 32, 4
OWN, REPLAYED = SIDES = ("own choice", "replayed")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ENDS = ("collecting", "base64", "decoding")
COLD = 8
"""Number of first updates of each side that are left out."""


def encodings(repeats: int) -> dict[str, list[float]]:
    """Median processor seconds of each end's work on an answer, by encoding.

    The first ends with what SGLang's scheduler sends on, the second is its detokenizer's encoding, the third
    what a client decodes.
    """
    shape, rows = RouteShape(48, 8, 128), 8192
    routes = np.random.default_rng(0).integers(0, 128, (rows, 48, 8)).astype(np.int32)
    found: dict[str, list[float]] = {}
    for name, packing in (("int32", lambda: routes), ("packed", lambda: pack_rows(routes))):
        times: list[tuple[float, ...]] = []
        for _ in range(repeats):
            at = [time.thread_time()]
            packed = packing()
            data = packed.tobytes()
            at.append(time.thread_time())
            wire = pybase64.b64encode(data).decode()
            at.append(time.thread_time())
            decode_routes(wire, shape, rows)
            at.append(time.thread_time())
            times.append(tuple(b - a for a, b in itertools.pairwise(at)))
        found[name] = [statistics.median(part) for part in zip(*times, strict=True)]
    return found


def model(folder: Path) -> str:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, moe_intermediate_size=256,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        num_experts=EXPERTS, num_experts_per_tok=TOPK, decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def keep_memory() -> None:
    """Let this process keep the memory that an update frees (glibc's mallopt(3)).

    Otherwise the allocator sometimes returns it to the kernel; faulting the pages in again costs up to a
    fifth of an update.
    """
    libc = ctypes.CDLL(None)
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        if libc.mallopt(parameter, 2**30) != 1:
            raise SystemExit("mallopt refused: this benchmark needs glibc")


def updates(folder: str, seconds_allowed: float) -> dict[str, list[tuple[float, float]]]:
    """(Wall-clock seconds, CPU seconds of all threads) of each update, by side.

    Updates with the same index ran one directly after the other.
    """
    (minibatch,) = plan_batches(
        make_samples(8, longest=256), ranks=1, n_minibatches=1, max_tokens=512
    ).minibatches
    train = {"lr": 0.0, "routing_replay": True}
    trainer = TrainerRank(make_config(train=train, record_routes=True), folder, 0, 1, torch.get_num_threads())
    trainer.connect("127.0.0.1", free_port(), 60)
    trainer.build()
    seconds: dict[str, list[tuple[float, float]]] = {OWN: [], REPLAYED: []}
    try:
        switch = Switch(trainer)
        switch.to(OWN)
        routed = _with_own_routes(trainer, minibatch)
        ends = time.monotonic() + seconds_allowed
        for step in itertools.count():
            if time.monotonic() > ends and len(seconds[REPLAYED]) > 1:
                break
            for side in seconds if step % 2 else reversed(seconds):
                switch.to(side)
                began = time.process_time()
                report = trainer.step([routed], step=step)
                if report.get("router_mismatch_fraction", 0.0):
                    raise SystemExit("other experts than the routers' own were replayed")
                if step >= COLD:
                    seconds[side].append((report["seconds_update"], time.process_time() - began))
    finally:
        trainer.close()
    return seconds


class Switch:
    """Switches a trainer between routing replay and the routers' own choice.

    Without routes the routers' hooks stay installed: a dozen calls that return at once.
    """

    def __init__(self, trainer: TrainerRank) -> None:
        self._trainer = trainer
        self._policy: Any = trainer.backend.policy  # type: ignore[attr-defined]
        self._replay = self._policy.routers

    def to(self, side: str) -> None:
        self._policy.routers = self._replay if side == REPLAYED else None
        routes = RouteShare() if side == REPLAYED else None
        self._trainer.load_batch = partial(load_batch, routes=routes)
        self._replay.forget()


def _with_own_routes(trainer: TrainerRank, minibatch: MiniBatch) -> MiniBatch:
    """The mini-batch with the experts that the trainer's routers choose without replay."""
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


def router_of(model: Qwen3MoeForCausalLM) -> Qwen3MoeTopKRouter:
    """Return the router of the model's first layer."""
    found = model.model.get_submodule("layers.0.mlp.gate")
    assert isinstance(found, Qwen3MoeTopKRouter)
    return found


def router(tokens: int, hidden: int, experts: int, topk: int, repeats: int) -> dict[str, float]:
    """Median seconds of a router's forward and backward pass, with its own choice and replayed."""
    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=hidden, moe_intermediate_size=16, num_hidden_layers=1,
        num_experts=experts, num_experts_per_tok=topk, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    models = {side: Qwen3MoeForCausalLM(config) for side in SIDES}
    models[REPLAYED].load_state_dict(models[OWN].state_dict())
    routers = {side: router_of(model) for side, model in models.items()}
    inputs_NH = torch.randn(tokens, hidden, requires_grad=True)
    gradient_NK = torch.randn(tokens, topk)
    chosen_NK = routers[OWN](inputs_NH)[2]
    rows = RoutedRows(chosen_NK[:, None].to(torch.uint8), torch.ones(tokens, dtype=torch.bool), tokens)
    replay = RouterReplay(models[REPLAYED], replay=True)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side, found in seconds.items():
            start = time.perf_counter()
            replay.start(rows if side == REPLAYED else None)
            routers[side].zero_grad()
            inputs_NH.grad = None
            _, weights, _ = routers[side](inputs_NH)
            weights.backward(gradient_NK)
            replay.start(None)
            found.append(time.perf_counter() - start)
        replay.forget()
    return {side: statistics.median(found) for side, found in seconds.items()}


def _routed(sample: Sample, routes: np.ndarray) -> Sample:
    arrays = {**sample.location.arrays, "routes": routes}
    return replace(sample, location=replace(sample.location, arrays=arrays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="of updates")
    options = parser.parse_args()
    keep_memory()
    for name, seconds in encodings(21).items():
        parts = ", ".join(f"{what} {s * 1e3:.1f}" for what, s in zip(ENDS, seconds, strict=True))
        print(f"an answer of 8192 tokens, 48 layers, top 8, {name}, ms: {parts} (decoding: target <= 30)")
    with tempfile.TemporaryDirectory() as folder:
        found = updates(model(Path(folder)), options.seconds)
    for index, what in enumerate(("update", "its processor time")):
        own, replayed = ([both[index] for both in found[side]] for side in SIDES)
        ratio = statistics.median(replayed) / statistics.median(own)
        pairs = statistics.quantiles([a / b for a, b in zip(replayed, own, strict=True)], n=4)
        print(
            f"{what}: {OWN} {statistics.median(own):.4f} s, {REPLAYED} {statistics.median(replayed):.4f} s, "
            f"medians of {len(own)}: ratio {ratio:.3f} (target <= 1.02); of pairs, quartiles "
            + ", ".join(f"{value:.3f}" for value in pairs)
        )
    for shape in ((430, 256, EXPERTS, TOPK), (8192, 2048, 128, 8)):
        alone = router(*shape, repeats=max(15, 200_000 // shape[0]))
        print(
            f"one router, {shape[0]} tokens, hidden {shape[1]}, {shape[2]} experts, top {shape[3]}: "
            + ", ".join(f"{side} {seconds * 1e3:.3f} ms" for side, seconds in alone.items())
        )


if __name__ == "__main__":
    main()
