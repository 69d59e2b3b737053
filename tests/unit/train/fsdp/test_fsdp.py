"""The FSDP backend: gradients against plain transformers for any packing and rank count, agreement
on non-finite steps, schedules, and memory of the head inside the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Llama4Config, Llama4ForConditionalGeneration

from orhpc.config import Config, TrainSettings
from orhpc.errors import NonFinite
from orhpc.train.backend import Role, TrainingBatch
from orhpc.train.batch import pack, plan_batches
from orhpc.train.fetch import load_batch
from orhpc.train.fsdp.backend import FsdpBackend
from orhpc.train.learning_rate import learning_rate
from orhpc.train.process_groups import join_default_group
from orhpc.train.sleep.residence import OffloadStats
from orhpc.types import MicroBatch, Sample
from tests.trainer_kit import (
    counted_reads,
    free_port,
    fsdp_backend,
    logprobs_of,
    make_config,
    make_samples,
    run_ranks,
    save_tiny_model,
    tiny_model,
)

FAMILIES = ["llama", "qwen3", "qwen3_moe", "gemma3", "gemma2", "llama4"]


@pytest.fixture(autouse=True)
def alone() -> Any:
    """A process group of one rank, required by every backend."""
    join_default_group(torch.device("cpu"), "127.0.0.1", free_port(), 0, 1, 30)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: save_tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def gradients(backend: FsdpBackend, samples: list[Sample], max_tokens: int) -> dict[str, np.ndarray]:
    """Return whole gradients of one mini-batch, just before the optimizer would use them."""
    plan = plan_batches(samples, ranks=backend.world_size, n_minibatches=1, max_tokens=max_tokens)
    (minibatch,) = plan.minibatches
    found: dict[str, np.ndarray] = {}

    def capture(loss: torch.Tensor) -> tuple[float, float]:
        for name, p in backend.policy.hf.named_parameters():
            grad: Any = p.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[name] = whole.float().numpy().copy()
        total = loss.clone()
        dist.all_reduce(total)
        found["loss"] = np.array(float(total))
        backend.optimizer.clear()
        return 0.0, 0.0

    backend.optimizer.step = capture  # type: ignore[method-assign]
    backend.update(
        [TrainingBatch(load_batch(m)) for m in minibatch.ranks[backend.rank]],
        n_samples=minibatch.n_samples,
        n_tokens=minibatch.n_tokens,
        between=lambda: None,
    )
    return found


def plain_gradients(folder: str, config: Config, samples: list[Sample]) -> dict[str, np.ndarray]:
    """Compute the same one sample at a time with the family's own model; on-policy, so the ratio is 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    total = torch.zeros(())
    n_tokens = sum(s.response_tokens for s in samples)
    for sample in samples:
        arrays = sample.location.arrays
        ids = torch.from_numpy(arrays["tokens_T"]).long()
        mask = torch.from_numpy(arrays["loss_mask_T"])[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1] / config.rollout.temperature
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(1, ids[1:, None])[:, 0]
        loss = -(chosen - chosen.detach()).exp() * sample.advantage
        loss = ((loss - config.algorithm.entropy_coef * entropy) * mask).sum()
        how = config.algorithm.normalise_loss
        total = total + (loss / mask.sum() / len(samples) if how == "sample" else loss / n_tokens)
    total.backward()
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    return found | {"loss": np.array(float(total.detach()))}


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        scale = np.abs(theirs[name]).max() + 1e-8
        assert np.abs(ours[name] - theirs[name]).max() / scale < bound, name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_tokens", [24, 60, 10_000])
def test_gradient_equals_plain_transformers_for_any_packing(
    folders: dict[str, str], family: str, max_tokens: int
) -> None:
    config = make_config(
        algorithm={"entropy_coef": 0.02, "normalise_loss": "token" if max_tokens == 60 else "sample"},
        train={"logprob_chunk_tokens": 5, "gradient_checkpointing": max_tokens == 60},
        temperature=0.7,
    )
    samples = make_samples()
    backend = fsdp_backend(config, folders[family])
    flags = {getattr(m, "gradient_checkpointing", None) for m in backend.policy.hf.model.layers}
    assert flags == {config.train.gradient_checkpointing}
    ours = gradients(backend, samples, max_tokens)
    assert_close(ours, plain_gradients(folders[family], config, samples), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 9])
def test_only_the_first_layers_are_recomputed(folders: dict[str, str], first: int) -> None:
    options: list[dict[str, Any]] = [{}, {"gradient_checkpointing": True, "recompute_layers": first}]
    found, passes = [], []
    for train in options:
        backend = fsdp_backend(make_config(train=train), folders["qwen3"])
        counts = Counter[int]()
        for i, layer in enumerate(backend.policy.hf.model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, i=i, counts=counts: counts.update([i]))
        found.append(gradients(backend, make_samples(), 60))
        passes.append(counts)
    assert_close(found[1], found[0], 1e-12)
    once, again = passes
    assert again == {i: count * 2 if i < first else count for i, count in once.items()}


def _rank_gradients(rank: int, world: int, port: int, folder: str, options: dict[str, Any]) -> Any:
    join_default_group(torch.device("cpu"), "127.0.0.1", port, rank, world, 60)
    config = make_config(ranks=world, **options)
    backend = fsdp_backend(config, folder, rank, world)
    # 7 samples over micro-batches of 30 tokens: some ranks get empty micro-batches.
    found = gradients(backend, make_samples(7), 30)
    reference = logprobs_of(backend, load_batch(MicroBatch(tuple(make_samples(3)))), Role.POLICY)
    dist.destroy_process_group()
    return found, reference.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world", "checkpointing"),
    [
        ("llama", 2, True),
        ("qwen3", 3, False),
        ("qwen3_moe", 2, False),
        ("gemma3", 2, True),
        ("llama4", 2, True),
    ],
)
def test_gradient_does_not_depend_on_the_number_of_ranks(
    folders: dict[str, str], family: str, world: int, checkpointing: bool
) -> None:
    options = {"train": {"gradient_checkpointing": checkpointing, "logprob_chunk_tokens": 16}}
    results = run_ranks(_rank_gradients, world, folders[family], options)
    for found, _ in results[1:]:  # every rank sees the same whole gradient
        assert_close(found, results[0][0], 1e-12)
    backend = fsdp_backend(make_config(**options), folders[family])
    one = gradients(backend, make_samples(7), 10_000)
    assert_close(results[0][0], one, 1e-4)
    logprobs = logprobs_of(backend, load_batch(MicroBatch(tuple(make_samples(3)))), Role.POLICY)
    np.testing.assert_allclose(results[0][1], logprobs.numpy(), atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_recomputed_and_nothing_else_is_in_training_mode(
    folders: dict[str, str], checkpointing: bool
) -> None:
    backend = fsdp_backend(make_config(train={"gradient_checkpointing": checkpointing}), folders["llama"])
    layers: list[torch.nn.Module] = list(backend.policy.hf.model.layers)
    calls: list[torch.nn.Module] = []
    layers[0].self_attn.register_forward_hook(lambda module, *_: calls.append(module))  # type: ignore[union-attr]
    gradients(backend, make_samples(2), 60)
    assert len(calls) == (2 if checkpointing else 1)
    inside = [m for layer in layers for m in layer.modules() if m is not layer]
    assert inside and not any(module.training for module in inside)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_keeps_float32_master_weights(folders: dict[str, str], family: str) -> None:
    backend = fsdp_backend(make_config(dtype="bfloat16"), folders[family])
    stored = load_file(Path(folders[family]) / "model.safetensors")
    for shard in backend.shards():
        kind, name = shard.name.split("/", 1)
        assert shard.tensor.dtype == torch.float32
        if kind == "model":
            assert torch.equal(shard.tensor, stored[name])
    exported = dict(backend.export(backend.parameter_shapes()))
    assert exported.keys() == stored.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, stored[name].to(torch.bfloat16))
    found = gradients(backend, make_samples(), 64)
    reference = plain_gradients(folders[family], make_config(), make_samples())
    cosine = sum(float((found[n] * reference[n]).sum()) for n in reference)
    lengths = [math.sqrt(sum(float((g[n] ** 2).sum()) for n in reference)) for g in (found, reference)]
    assert cosine / (lengths[0] * lengths[1]) > 0.98


@pytest.mark.slow
def test_the_language_part_of_a_larger_checkpoint_is_exported_under_its_names(tmp_path: Path) -> None:
    text = tiny_model("llama4").config.to_dict()
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = Llama4Config(text_config=text, vision_config=vision)
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    backend = fsdp_backend(make_config(), str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    exported = dict(backend.export(backend.parameter_shapes()))
    assert exported.keys() == {name for name in stored if name.startswith("language_model.")}
    for name, tensor in exported.items():
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_checkpoint_is_read_once_for_each_role(
    folders: dict[str, str], family: str, dtype: str, kl: bool
) -> None:
    with counted_reads("transformers.modeling_utils") as reads:
        backend = fsdp_backend(make_config(dtype=dtype, algorithm={"use_kl_loss": kl}), folders[family])
    assert (backend.reference is not None) == kl
    stored = load_file(f"{folders[family]}/model.safetensors")
    assert reads == {name: tensor.numel() * (2 if kl else 1) for name, tensor in stored.items()}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_family_s_own_at_the_temperature(
    folders: dict[str, str], temperature: float
) -> None:
    for family in FAMILIES:
        backend = fsdp_backend(make_config(temperature=temperature), folders[family])
        model = AutoModelForCausalLM.from_pretrained(
            folders[family],
            attn_implementation="eager" if family == "gemma2" else "sdpa",
            dtype=torch.float32,
        )
        samples = make_samples(5)
        batch = pack(samples, [s.location.arrays for s in samples])
        ours = logprobs_of(backend, batch, Role.POLICY)
        with torch.no_grad():
            for i, sample in enumerate(samples):
                ids = torch.from_numpy(sample.location.arrays["tokens_T"]).long()
                logprobs = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
                theirs = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
                mask = torch.from_numpy(sample.location.arrays["loss_mask_T"])[1:]
                mine = ours[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1] - 1]
                torch.testing.assert_close(mine[mask], theirs[mask], rtol=0, atol=2e-5)
                assert not mine[~mask].any()


def test_the_reference_is_the_starting_model_and_never_moves(folders: dict[str, str]) -> None:
    backend = fsdp_backend(make_config(algorithm={"use_kl_loss": True}), folders["llama"])
    batch = load_batch(MicroBatch(tuple(make_samples(4))))
    start = logprobs_of(backend, batch, Role.POLICY)
    assert torch.equal(logprobs_of(backend, batch, Role.REFERENCE), start)
    training = TrainingBatch(batch, None, logprobs_of(backend, batch, Role.REFERENCE))
    backend.update([training], n_samples=4, n_tokens=40, between=lambda: None)
    assert torch.equal(logprobs_of(backend, batch, Role.REFERENCE), start)
    assert not torch.equal(logprobs_of(backend, batch, Role.POLICY), start)


def test_without_kl_there_is_no_reference(folders: dict[str, str]) -> None:
    backend = fsdp_backend(make_config(), folders["llama"])
    with pytest.raises(ValueError, match="use_kl_loss"):
        logprobs_of(backend, load_batch(MicroBatch(())), Role.REFERENCE)


def test_an_update_equals_torch_adamw_with_clipping(folders: dict[str, str]) -> None:
    settings = {"lr": 3e-2, "weight_decay": 0.1, "max_grad_norm": 0.05, "adam_beta2": 0.9}
    backend = fsdp_backend(make_config(train=settings), folders["llama"])
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-2, betas=(0.9, 0.9), fused=False, foreach=False)
    for seed in range(3):
        batch = load_batch(MicroBatch(tuple(make_samples(4, seed=seed))))
        grads: dict[str, torch.Tensor] = {}
        real = backend.optimizer.step

        def spy(loss: torch.Tensor, step: Callable[..., Any] = real) -> Any:
            grads.update({n: p.grad.clone() for n, p in backend.policy.hf.named_parameters()})  # noqa: B023
            return step(loss)

        backend.optimizer.step = spy  # type: ignore[method-assign]
        update = backend.update([TrainingBatch(batch)], n_samples=4, n_tokens=9, between=lambda: None)
        backend.optimizer.step = real  # type: ignore[method-assign]
        for name, p in model.named_parameters():
            p.grad = grads[name]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert update.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert update.lr == 3e-2
        adamw.step()
        for name, p in model.named_parameters():
            ours = backend.policy.hf.get_parameter(name)
            torch.testing.assert_close(ours, p, rtol=1e-4, atol=1e-5)
    assert backend.progress() == {"optimiser_steps": 3}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    settings = TrainSettings.model_validate(
        {"steps": 3, "steps_per_rollout": 2, "lr": 1.0, "lr_min": 0.1, "lr_warmup_steps": 2}
        | {"lr_schedule": schedule}
    )
    assert [learning_rate(settings, n) for n in range(6)] == pytest.approx(expected)
    assert learning_rate(settings, 99) == pytest.approx(expected[-1])


def _rank_non_finite(rank: int, world: int, port: int, folder: str) -> Any:
    join_default_group(torch.device("cpu"), "127.0.0.1", port, rank, world, 60)
    backend = fsdp_backend(make_config(ranks=world), folder, rank, world)
    before = [shard.tensor.clone() for shard in backend.shards()]
    batch = load_batch(MicroBatch(tuple(make_samples(3, seed=rank))))
    if rank == 1:  # one rank's advantages are broken
        batch.advantages_P[:] = np.nan
    message = ""
    try:
        backend.update([TrainingBatch(batch)], n_samples=6, n_tokens=30, between=lambda: None)
    except NonFinite as error:
        message = str(error)
    unchanged = all(torch.equal(a, s.tensor) for a, s in zip(before, backend.shards(), strict=True))
    batch.advantages_P[:] = 1.0
    backend.update([TrainingBatch(batch)], n_samples=6, n_tokens=30, between=lambda: None)
    moved = not any(torch.equal(a, s.tensor) for a, s in zip(before[:3], backend.shards(), strict=False))
    dist.destroy_process_group()
    return message, unchanged, moved, backend.progress()


@pytest.mark.slow
def test_no_rank_steps_when_one_has_nan(folders: dict[str, str]) -> None:
    for message, unchanged, moved, progress in run_ranks(_rank_non_finite, 2, folders["llama"]):
        assert "no rank has stepped" in message
        assert unchanged
        assert moved  # and training can continue
        assert progress == {"optimiser_steps": 1}


def test_a_failing_micro_batch_leaves_no_gradient_behind(folders: dict[str, str]) -> None:
    backend = fsdp_backend(make_config(), folders["llama"])
    batch = load_batch(MicroBatch(tuple(make_samples(2))))
    calls = iter([None, RuntimeError("broken")])

    def between() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(RuntimeError, match="broken"):
        backend.update([TrainingBatch(batch)] * 2, n_samples=2, n_tokens=20, between=between)
    assert all(p.grad is None for p in backend.policy.parameters())


@pytest.mark.slow
def test_two_runs_are_bit_equal(folders: dict[str, str]) -> None:
    results = []
    for _ in range(2):
        backend = fsdp_backend(make_config(train={"deterministic": True}), folders["qwen3_moe"])
        try:
            for seed in range(2):
                batches = [load_batch(MicroBatch(tuple(make_samples(5, seed=10 * seed + i)))) for i in (0, 1)]
                backend.update(
                    [TrainingBatch(b) for b in batches], n_samples=10, n_tokens=70, between=lambda: None
                )
        finally:
            torch.use_deterministic_algorithms(False)
        results.append([s.tensor.clone() for s in backend.shards()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_sleep_on_a_cpu_frees_nothing_and_says_so(folders: dict[str, str]) -> None:
    backend = fsdp_backend(make_config(), folders["llama"])
    before = [s.tensor.data_ptr() for s in backend.shards()]
    assert backend.sleep() == OffloadStats()
    backend.wake()
    assert [s.tensor.data_ptr() for s in backend.shards()] == before
