"""Models that see images: the trainer against transformers' own forward pass, one sample at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from orhpc.errors import DataError
from orhpc.models.images import ImageProcessor
from orhpc.train.backend import Batches, Role, TrainingBatch
from orhpc.train.batch import pack, plan_batches
from orhpc.train.fetch import load_batch
from orhpc.train.process_groups import join_default_group
from orhpc.types import Location, Sample
from orhpc.wire.images import collapsed, expanded
from tests.model_configs import SEEING
from tests.seeing_models import picture, seeing_models
from tests.trainer_kit import fsdp_backend, make_config, run_ranks

NAMES = sorted(SEEING)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return seeing_models(tmp_path_factory.mktemp("seeing"))


def image_samples(folder: str, counts: tuple[int, ...] = (2, 0, 1, 3)) -> list[Sample]:
    """Samples with so many images each; the last sampled token of one of them is an image's placeholder."""
    processor = ImageProcessor(folder, max_pixels=12_600)
    token = json.loads(Path(folder, "config.json").read_text())["image_token_id"]
    rng = np.random.default_rng(5)
    samples = []
    for number, count in enumerate(counts):
        ids: list[int] = rng.integers(0, 256, 5).tolist()
        seen = []
        for i in range(count):
            seen.append(processor.fitted(picture(60 + 70 * i, 130, 10 * number + i)))
            ids += [258, token, *rng.integers(0, 256, 4).tolist()]
        tokens, placed = expanded(ids, seen, token)
        tokens_T = np.array([*tokens, 7, token if count == 1 else 8], np.int32)
        mask_T = rng.random(len(tokens_T)) < 0.6
        mask_T[0], mask_T[-1] = False, True
        for one in placed:
            mask_T[one.start : one.end] = False
        arrays: dict[str, Any] = {
            "tokens_T": tokens_T,
            "loss_mask_T": mask_T,
            "logprobs_T": np.where(mask_T, -1.0, 0).astype(np.float32),
            "images": tuple(placed),
        }
        advantage = float(rng.normal())
        sampled = int(mask_T.sum())
        samples.append(Sample(f"0.{number}", len(tokens_T), sampled, advantage, Location(arrays=arrays)))
    return samples


def plain_logits(model: Any, folder: str, sample: Sample) -> torch.Tensor:
    """Logits ``[T - 1, V]`` by the model's own forward pass and its own positions."""
    processor, arrays = ImageProcessor(folder), sample.location.arrays
    ids = torch.from_numpy(arrays["tokens_T"]).long()[:-1]
    inputs: dict[str, Any] = {}
    if arrays["images"]:
        pixels, grids = processor.pixel_values([p.image for p in arrays["images"]])
        inputs = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.from_numpy(grids)}
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()[None]
    return model(input_ids=ids[None], use_cache=False, **inputs).logits[0]


def plain_gradients(model: Any, folder: str, samples: list[Sample]) -> tuple[dict[str, Any], list[Any]]:
    total, found = torch.zeros(()), []
    for sample in samples:
        targets = torch.from_numpy(sample.location.arrays["tokens_T"]).long()[1:]
        mask = torch.from_numpy(sample.location.arrays["loss_mask_T"])[1:]
        logprobs = plain_logits(model, folder, sample).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        found.append((logprobs * mask).detach())
        ratio = (logprobs - logprobs.detach()).exp()
        total = total - (ratio * sample.advantage * mask).sum() / mask.sum() / len(samples)
    total.backward()
    return {n: p.grad for n, p in model.named_parameters()}, found


def update(
    backend: Any, folder: str, samples: list[Sample], max_tokens: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Log-probabilities by sample and gradients by name, of one mini-batch."""
    plan = plan_batches(samples, ranks=backend.world_size, n_minibatches=1, max_tokens=max_tokens)
    own = plan.minibatches[0].ranks[backend.rank]
    processor = ImageProcessor(folder)
    batches = [load_batch(micro, images=processor) for micro in own]
    logprobs: dict[str, np.ndarray] = {}
    for batch, values_P in zip(
        batches, backend.logprobs(Batches(batches, len(batches)), Role.POLICY), strict=True
    ):
        parts = np.split(values_P.numpy(), batch.cu_seqlens[1:-1])
        logprobs |= dict(zip(batch.sample_ids, parts, strict=False))
    gradients: dict[str, np.ndarray] = {}

    def capture(_loss: torch.Tensor) -> tuple[float, float]:
        for name, p in backend.policy.hf.named_parameters():
            whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            gradients[name] = np.zeros(0) if whole is None else whole.float().numpy().copy()
        backend.optimizer.clear()
        return 0.0, 0.0

    backend.optimizer.step = capture
    minibatch = plan.minibatches[0]
    backend.update(
        Batches((TrainingBatch(b) for b in batches), len(batches)),
        n_samples=minibatch.n_samples,
        n_tokens=minibatch.n_tokens,
        between=lambda: None,
    )
    return logprobs, gradients


def assert_equal(
    folder: str, samples: list[Sample], logprobs: dict[str, np.ndarray], gradients: dict[str, np.ndarray]
) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    expected, rows = plain_gradients(model, folder, samples)
    assert logprobs.keys() <= {s.rollout_id for s in samples}
    for sample, row in zip(samples, rows, strict=True):
        if sample.rollout_id in logprobs:
            assert np.abs(logprobs[sample.rollout_id][:-1] - row.numpy()).max() < 1e-5
    assert gradients.keys() == expected.keys()
    for name, ours in gradients.items():
        theirs = expected[name].numpy()
        assert np.abs(theirs).max() > 1e-6 or name.endswith(("bias", "pos_embed.weight")), name
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_tokens", [60, 10_000])
def test_packed_samples_with_images_equal_transformers(
    folders: dict[str, str], name: str, max_tokens: int
) -> None:
    folder = folders[name]
    samples = image_samples(folder)
    config = make_config(train={"gradient_checkpointing": max_tokens == 60})
    logprobs, gradients = update(fsdp_backend(config, folder), folder, samples, max_tokens)
    assert len(logprobs) == len(samples)
    assert_equal(folder, samples, logprobs, gradients)


def _on_two_ranks(rank: int, world: int, port: int, folder: str) -> Any:
    join_default_group(torch.device("cpu"), "127.0.0.1", port, rank, world, 60)
    backend = fsdp_backend(make_config(ranks=world), folder, rank, world)
    found = update(backend, folder, image_samples(folder, (2, 0)), 10_000)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_images_takes_part(folders: dict[str, str], name: str) -> None:
    """One of two sharded ranks has only text: the tower's collectives must still match."""
    folder = folders[name]
    samples = image_samples(folder, (2, 0))
    for logprobs, gradients in run_ranks(_on_two_ranks, 2, folder):
        assert len(logprobs) == 1
        assert_equal(folder, samples, logprobs, gradients)


def test_a_frozen_tower_has_no_gradients(folders: dict[str, str]) -> None:
    folder = folders["qwen3-vl"]
    backend = fsdp_backend(make_config(train={"freeze_vision": True}), folder)
    _, gradients = update(backend, folder, image_samples(folder), 10_000)
    assert {n for n, g in gradients.items() if not g.size} == {n for n in gradients if ".visual." in n}


def test_images_and_a_model_that_does_not_see_them_are_refused(folders: dict[str, str]) -> None:
    samples = image_samples(folders["qwen3-vl"])
    with pytest.raises(DataError, match=r"rollout 0\.0 has images"):
        pack(samples, [s.location.arrays for s in samples])


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_exported_under_the_checkpoints_names(folders: dict[str, str], name: str) -> None:
    from safetensors.torch import load_file

    backend = fsdp_backend(make_config(), folders[name])
    backend.hf_names().check()
    exported = dict(backend.export(list(backend.parameter_shapes())))
    stored = load_file(Path(folders[name]) / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[n], stored[n]) for n in stored)
    assert collapsed(np.arange(3, dtype=np.int32), []).tolist() == [0, 1, 2]
