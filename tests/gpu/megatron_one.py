"""Checks of the Megatron trainer on one GPU; each yields rows of the table."""

from __future__ import annotations

import json
import math
import statistics
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu import megatron_kit as kit
from tests.gpu.megatron_fp8 import fp8
from tests.gpu.megatron_kit import Row, Rows
from tests.gpu.megatron_speed import against_bare, moe_speed

ERROR_RATIO = 1.3
"""Maximum ratio of our error against float32 to transformers' own error in bf16, both means over tokens."""


COLUMNS = 151936
"""Vocabulary of Qwen3."""


def dense() -> Rows:
    """The layers and head of Qwen3-8B."""
    folder = kit.make_folder("dense", kit.DENSE, "cuda")
    samples = kit.make_samples(kit.SHORT, kit.DENSE["vocab_size"])
    theirs = kit.reference(folder, samples, "cuda")
    config = kit.make_config(train={"gradient_checkpointing": True})
    trainer = kit.start(config, folder)
    yield _exported(trainer, folder)
    yield _compared("dense: packed, against transformers", trainer, samples, theirs, "dense")
    minibatch = kit.planned(kit.make_samples(kit.LONG, kit.DENSE["vocab_size"]), 1)
    yield _within("dense: memory, recomputed", trainer, folder, minibatch, recompute=True)
    backend: Any = trainer.backend
    for model in backend._policy.models:
        model.module.config.recompute_granularity = None
    yield _within("dense: memory", trainer, folder, minibatch, recompute=False)
    row, seconds = against_bare("dense", trainer, folder, minibatch)
    saved = kit.WORK / "dense.json"
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "seconds": seconds}))
    yield row
    kit.close(trainer)


def _compared(name: str, trainer: Any, samples: Any, theirs: Any, save: str | None = None) -> Row:
    ours = kit.trainer_logprobs(trainer, samples)
    truth = theirs["float32"]
    mean, most = kit.error(ours, truth)
    their_mean, their_most = kit.error(theirs["bf16"], truth)
    if save is not None:
        norm = trainer.step([kit.planned(samples, 1)], step=0)["grad_norm"]
        np.savez(kit.WORK / f"{save}-truth.npz", **truth)  # type: ignore[arg-type]
        (kit.WORK / f"{save}.json").write_text(json.dumps({"error": mean, "norm": norm}))
    note = f"off float32: mean {mean:.5f} largest {most:.3f}"
    note += f"; transformers in bf16 {their_mean:.5f}, {their_most:.3f}"
    return Row(name, mean <= ERROR_RATIO * their_mean, note)


def _exported(trainer: Any, folder: Path) -> Row:
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    backend = trainer.backend
    wrong: list[str] = []
    seen: set[str] = set()
    for name, tensor in backend.export(backend.parameter_shapes()):
        seen.add(name)
        if not torch.equal(tensor.cpu(), stored[name]):
            wrong.append(name)
    missing = sorted(stored.keys() - seen)
    note = f"{folder.name}: {len(seen)} tensors, {len(wrong)} differ {wrong[:3]}, missing {missing[:3]}"
    return Row("export is what was loaded", not wrong and not missing, note)


def _within(name: str, trainer: Any, folder: Path, minibatch: Any, *, recompute: bool) -> Row:
    text = kit.peak_against_plan(trainer, folder, minibatch, recompute=recompute)
    return Row(name, abs(float(text.split()[-1]) - 1) <= 0.1, text)


def head() -> Rows:
    """Log-probability and loss of one micro-batch, 8192 x 151936, in GPU time."""
    from orhpc.train.loss.head import LogitScaling

    torch.manual_seed(0)
    targets = torch.randint(COLUMNS, (kit.BUDGET,), device="cuda")
    advantages = torch.randn(kit.BUDGET, device="cuda")
    scaling = LogitScaling(temperature=0.9)
    yield from _head_time(targets, advantages, scaling)
    yield _head_memory(targets, advantages, scaling)


def _head_time(targets: torch.Tensor, advantages: torch.Tensor, scaling: Any) -> Rows:
    from orhpc.train.loss.head import _combined
    from orhpc.train.loss.logit_kernels import gradient_, row_statistics

    logits = torch.randn(len(targets), COLUMNS, device="cuda", dtype=torch.bfloat16)

    def forward() -> Any:
        lse, entropy, target = _combined(row_statistics(logits, targets, scaling), None)
        leaf = (target - lse).requires_grad_()
        return _loss_of(leaf, advantages), leaf, lse, entropy

    def both() -> None:
        loss, leaf, lse, entropy = forward()
        loss.backward()
        gradient_(logits, targets, lse, entropy, leaf.grad, None, scaling)

    _, leaf, _, entropy = forward()
    wide = logits[:256].float() / 0.9
    truth = wide.log_softmax(-1)
    off = (leaf[:256] - truth.gather(1, targets[:256, None])[:, 0]).abs().max()
    off_h = (entropy[:256] + (truth.exp() * truth).sum(1)).abs().max()
    note = f"log-probability off by {float(off):.2g}, entropy by {float(off_h):.2g}"
    yield Row("head: statistics of a row", float(off) < 1e-4 and float(off_h) < 1e-3, note)
    words = logits.view(torch.float32)
    read = min(_gpu_ms(words.sum), _gpu_ms(lambda: logits.amax(1)), _gpu_ms(logits.clone) / 2)
    first = _gpu_ms(forward)
    note = f"{first:.3f} ms, one read {read:.3f}: {first / read:.2f}"
    yield Row("head: forward", first <= 1.5 * read, note)
    second = _gpu_ms(both)
    yield Row("head: and backward", second <= 6 * read, f"{second:.3f} ms: {second / read:.2f} reads")


def _head_memory(targets: torch.Tensor, advantages: torch.Tensor, scaling: Any) -> Row:
    from orhpc.train.loss.head import token_logprobs

    rows, hidden = len(targets), 4096
    state = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(COLUMNS, hidden, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    beside = 0
    for _ in range(2):
        state.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        values, _ = token_logprobs(state, weight, None, targets, scaling=scaling, chunk=rows)
        _loss_of(values, advantages).backward()
        torch.cuda.synchronize()
        beside = torch.cuda.max_memory_allocated() - before - state.nbytes - weight.nbytes
    size = 2 * rows * COLUMNS
    note = (
        f"{beside / 2**30:.2f} GiB beside the two gradients, logits {size / 2**30:.2f}: {beside / size:.2f}"
    )
    return Row("head: peak memory", beside <= 1.2 * size, note)


def _loss_of(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    from orhpc.train.loss.grpo import grpo_loss

    loss, _ = grpo_loss(logprobs - logprobs.detach(), advantages, eps_low=0.2, eps_high=0.2)
    return loss.sum() / len(advantages)


def _gpu_ms(call: Callable[[], Any], repeats: int = 8) -> float:
    """Median GPU time, with enough work queued before it that the GPU never waits for the host."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    call()
    found: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(6):
            torch.mm(a, a)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def moe() -> Rows:
    """The layers of Qwen3-30B-A3B, with routing replay."""
    from tests.gpu.megatron_replay import NoReplay, own_routes, wrong_choices

    folder = kit.make_folder("moe", kit.MOE, "cuda")
    vocabulary, layers = kit.MOE["vocab_size"], kit.MOE["num_hidden_layers"]
    plain = kit.make_samples(kit.SHORT, vocabulary)
    theirs = kit.reference(folder, plain, "cuda")
    train = {"routing_replay": True, "gradient_checkpointing": True}
    trainer = kit.start(kit.make_config(train=train, rollout={"record_routes": True}), folder)
    yield _exported(trainer, folder)
    with NoReplay(trainer):
        yield _compared("moe: packed, against transformers", trainer, plain, theirs, "moe")
        chosen, before = own_routes(trainer, plain)
    routed = kit.make_samples(kit.SHORT, vocabulary, chosen)
    _, most = kit.error(kit.trainer_logprobs(trainer, routed), before)
    yield Row("moe: its own choices replayed", most <= 1e-5, f"largest difference {most:.2g}")
    rng = np.random.default_rng(0)

    def some_routes(lengths: Any) -> dict[str, Any]:
        return {
            f"0.{i}": np.argsort(rng.random((n - 1, layers, 128)), -1)[..., :8].astype(np.uint8)
            for i, n in enumerate(lengths)
        }

    minibatch = kit.planned(kit.make_samples(kit.LONG, vocabulary, some_routes(kit.LONG)), 1)
    wrong, checked = wrong_choices(trainer, minibatch)
    yield Row("moe: recorded experts used", wrong == 0 and checked > 0, f"{wrong} wrong in {checked} passes")
    yield _within("moe: memory, recomputed", trainer, folder, minibatch, recompute=True)
    yield _replay_timed(trainer, vocabulary)
    kit.close(trainer)


def _replay_timed(trainer: Any, vocabulary: int) -> Row:
    """Alternate steps with the routers' own choices replayed and steps without replay.

    With their own choices, both sides give every expert the same work: random routes are balanced, a random
    model's are not.  Every step changes the weights slightly; the row reports how many choices differ at the
    end.
    """
    from tests.gpu.megatron_replay import NoReplay, own_routes

    plain = kit.make_samples(kit.LONG, vocabulary)
    with NoReplay(trainer):
        chosen, _ = own_routes(trainer, plain)
    alone, routed = kit.planned(plain, 1), kit.planned(kit.make_samples(kit.LONG, vocabulary, chosen), 1)
    on: list[float] = []
    off: list[float] = []
    metrics: dict[str, float] = {}

    def replayed() -> None:
        nonlocal metrics
        metrics, seconds = kit.timed_steps(trainer, routed, 4)
        on.extend(seconds[1:])

    def left_alone() -> None:
        with NoReplay(trainer):
            off.extend(kit.timed_steps(trainer, alone, 4)[1][1:])

    for turn in range(4):
        for side in (replayed, left_alone) if turn % 2 else (left_alone, replayed):
            side()
    ratio = statistics.median(on) / statistics.median(off)
    note = f"{statistics.median(on):.4f} and {statistics.median(off):.4f} s a step: {ratio:.3f}"
    note += f"; at the end {metrics['router_mismatch_fraction']:.4f} of the choices were others"
    return Row("moe: a step with replay", ratio <= 1.02, note)


def families(half: int) -> Rows:
    """Small models of every other family: log-probabilities, a step, and weights exported bit for bit."""
    for name, content in list(kit.FAMILIES.items())[half::2]:
        try:
            folder = kit.make_folder(f"family-{name}", {**kit.SMALL, **content}, "cuda")
            samples = kit.make_samples(kit.SHORT, kit.SMALL["vocab_size"])
            theirs = kit.reference(folder, samples, "cuda")
            trainer = kit.start(kit.make_config(train={"gradient_checkpointing": False}), folder)
            row = _compared(f"{name}: against transformers", trainer, samples, theirs)
            back = _exported(trainer, folder)
            norm = trainer.step([kit.planned(samples, 1)], step=0)["grad_norm"]
            kit.close(trainer)
            note = f"{row.note}; gradient norm {norm:.3f}; export {'equal' if back.ok else back.note}"
            yield Row(row.name, row.ok and back.ok and 0 < norm < float("inf"), note)
        except Exception as error:
            traceback.print_exc()
            leave_groups()
            yield Row(f"{name}: against transformers", False, f"{type(error).__name__}: {str(error)[:250]}")


def leave_groups() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "all on the device": ({}, 0.0),
    "moments in bfloat16": ({"moments_dtype": "bfloat16"}, 4.0),
    "half in host memory": ({"offload_optimizer": 0.5}, 6.0),
    "all in host memory": ({"offload_optimizer": 1.0}, 12.0),
}
"""Optimizer state: settings, and the bytes per parameter saved on the device."""


def optimizer() -> Rows:
    """Offloaded or smaller optimizer state: equal steps, saved memory, and resuming."""
    content = {**kit.SMALL, "hidden_size": 2048, "model_type": "llama"}
    folder = kit.make_folder("optimiser", content, "cuda")
    minibatch = kit.planned(kit.make_samples(kit.SHORT, content["vocab_size"]), 1)
    plain: list[float] = []
    most = 0
    for name, (settings, spared) in VARIANTS.items():
        config = kit.make_config(megatron=settings, train={"lr": 1e-3, "adam_beta2": 0.95})
        trainer = kit.start(config, folder)
        norms = [trainer.step([minibatch], step=i)["grad_norm"] for i in range(2)]
        held = torch.cuda.memory_allocated()
        weights = sum(math.prod(shape) for shape in trainer.backend.parameter_shapes().values())
        left = _left_behind(trainer)
        trainer.sleep()
        trainer.wake()
        norms += [trainer.step([minibatch], step=i)["grad_norm"] for i in (2, 3)]
        kit.close(trainer)
        plain, most = plain or norms, most or held
        trainer = kit.start(config, folder)
        wrong = _taken_up(trainer, left)[:2]
        again = [trainer.step([minibatch], step=i)["grad_norm"] for i in (2, 3)]
        if any(abs(b / a - 1) > 1e-3 for a, b in zip(norms[2:], again, strict=True)):
            wrong.append(f"gradient norms {again} instead of {norms[2:]}")
        kit.close(trainer)
        off = max(abs(b / a - 1) for a, b in zip(plain, norms, strict=True))
        moved, bytes_spared = abs(plain[3] / plain[0] - 1), (most - held) / weights
        right = off < 0.02 < moved and abs(bytes_spared - spared) < 0.1 * 12
        yield Row(
            f"optimiser: {name}", right,
            f"gradient norms off by {off:.4f} over 4 steps that move them by {moved:.2f}; "
            f"{bytes_spared:.2f} bytes a parameter spared, {spared:g} expected",
        )  # fmt: skip
        yield Row(f"optimiser: {name}, taken up", not wrong, f"differences: {wrong or 'none'}")


def _left_behind(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Copies of the weights and of the state in a checkpoint, by name."""
    backend = trainer.backend
    weights = {n: t.cpu().clone() for n, t in backend.export(backend.parameter_shapes())}
    state = {s.key: s.tensor.cpu().clone() for s in backend.shards()}
    return weights, state, backend.progress()


def _taken_up(trainer: Any, left: Any) -> list[str]:
    """Load the state into a new trainer like a checkpoint; return the names of weights that differ."""
    weights, state, progress = left
    backend = trainer.backend
    for shard in backend.shards():
        shard.tensor.copy_(state[shard.key])
    backend.set_progress(progress)
    found = backend.export(backend.parameter_shapes())
    return [name for name, tensor in found if not torch.equal(tensor.cpu(), weights[name])]


CHECKS: dict[str, Callable[[], Rows]] = {
    "dense": dense,
    "head": head,
    "moe": moe,
    "moe_speed": moe_speed,
    "fp8": fp8,
    "optimiser": optimizer,
    "families0": partial(families, 0),
    "families1": partial(families, 1),
}
