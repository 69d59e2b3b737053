"""Tiny random models, samples and trainer ranks for the trainer's tests: ids only, no tokenizer."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from orhpc.config import Config
from orhpc.process.ports import free_ports
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Backend, Batches, Role
from orhpc.train.batch import PackedBatch, plan_batches
from orhpc.train.fsdp.backend import FsdpBackend
from orhpc.train.sleep.residence import OffloadManager
from orhpc.train.weights.fp8 import make_quantizer
from orhpc.types import Location, MiniBatch, Sample
from tests import preloaded

VOCABULARY = 97
CASES_TOGETHER = 6
"""Cases in the same processes of :func:`run_each`."""
MAX_TOKENS = 40
"""Token budget of :func:`plan`: several micro-batches a mini-batch."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(family: str) -> PreTrainedModel:
    """A float32 model of a few ten thousand parameters with weights large enough to matter."""
    torch.manual_seed(7)
    if family == "llama":  # tied, and 7 hidden rows do not divide by two ranks anywhere
        return LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=False))
    if family == "qwen3_moe":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE, **moe, tie_word_embeddings=False))
    if family == "gemma3":  # sliding windows, embedding scale, soft-capped logits
        shape = _SHAPE | {"num_hidden_layers": 3}
        more = {"sliding_window": 5, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 5}
        types = ["sliding_attention", "sliding_attention", "full_attention"]
        return Gemma3ForCausalLM(Gemma3TextConfig(**shape, **more, layer_types=types))
    if family == "gemma2":  # soft-capped scores, small enough to matter; every second layer a window
        more = {"sliding_window": 5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 5}
        return Gemma2ForCausalLM(Gemma2Config(**_SHAPE, **more, final_logit_softcapping=4.0))
    if family == "llama4":  # chunks and steps of the scaling by position that sequences go beyond
        shape = _SHAPE | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "moe_layers": [0, 1]}
        moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 40}
        more = {"attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.5}
        return Llama4ForCausalLM(Llama4TextConfig(**shape, **moe, **more))
    if family == "deepseek_v3":  # latent attention, and routers whose correction biases are buffers
        latent = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": 8}
        shape = _SHAPE | {"num_key_value_heads": 4}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**shape | latent | moe | groups))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                torch.nn.init.normal_(buffer, std=0.1)
        return model
    raise ValueError(family)


def save_tiny_model(folder: Path, family: str = "llama") -> str:
    """Write the model as a Hugging Face folder, with a stand-in tokenizer file; return its path."""
    tiny_model(family).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    return str(folder)


def quantized_copy(model_dir: Path, folder: Path) -> Path:
    """The model in block-wise FP8, with what its ``config.json`` then says."""
    shutil.copytree(model_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    stored = dict(make_quantizer(power_of_two=False)(tensors.items()))
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values())
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def make_config(
    *,
    train: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    dtype: str = "float32",
    ranks: int = 1,
    minibatches: int = 1,
    temperature: float = 1.0,
    record_routes: bool = False,
) -> Config:
    """A CPU config for 8 samples a mini-batch."""
    trained = {
        "global_batch_size": 8,
        "steps_per_rollout": minibatches,
        "gradient_checkpointing": False,
        "lr": 1e-2,
        "max_grad_norm": 1e9,
    }
    return Config.model_validate(
        {
            "model": {"dtype": dtype},
            "placement": {"device": "cpu", "devices_per_node": ranks},
            "engine": {"backend": "cpu", "tp": 1} | (engine or {}),
            "checkpoint": checkpoint or {},
            "environments": {"local": {"serve": "package.module:Class"}},
            "rollout": {
                "batch_size": 2 * minibatches,
                "n_samples": 4,
                "temperature": temperature,
                "record_routes": record_routes,
            },
            "train": trained | (train or {}),
            "algorithm": algorithm or {},
        }
    )


def make_samples(n: int = 8, *, seed: int = 0, longest: int = 24) -> list[Sample]:
    """Samples of several turns, their arrays in memory."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        length = int(rng.integers(4, longest + 1))
        mask_T = rng.random(length) < 0.6
        mask_T[0], mask_T[-1] = False, True
        arrays = {
            "tokens_T": rng.integers(0, VOCABULARY, length).astype(np.int32),
            "loss_mask_T": mask_T,
            "logprobs_T": np.where(mask_T, -rng.gamma(2.0, 1.5, length), 0).astype(np.float32),
        }
        advantage = float(rng.normal())
        samples.append(Sample(f"0.{i}", length, int(mask_T.sum()), advantage, Location(arrays=arrays)))
    return samples


def with_routes(
    samples: list[Sample], *, layers: int, experts: int, topk: int, seed: int = 0
) -> list[Sample]:
    """The same samples with recorded expert routes: random, of distinct experts."""
    rng = np.random.default_rng(seed)
    routed = []
    for sample in samples:
        order = np.argsort(rng.random((sample.length - 1, layers, experts)), axis=-1)
        arrays = sample.location.arrays | {"routes": order[..., :topk].astype(np.uint8)}
        routed.append(replace(sample, location=replace(sample.location, arrays=arrays)))
    return routed


def plan(step: int, *, ranks: int = 1, n_minibatches: int = 1) -> tuple[MiniBatch, ...]:
    samples = make_samples(8 * n_minibatches, seed=step)
    return plan_batches(samples, ranks=ranks, n_minibatches=n_minibatches, max_tokens=MAX_TOKENS).minibatches


@contextlib.contextmanager
def ranks_of(folder: str) -> Iterator[Callable[..., TrainerRank]]:
    """Yield a maker of connected, built ranks of a one-rank trainer: one at a time, closed at the end."""
    made: list[TrainerRank] = []

    def start(**options: Any) -> TrainerRank:
        for old in made:
            old.close()
        rank = TrainerRank(make_config(**options), folder, 0, 1, 1)
        made[:] = [rank]
        rank.connect("127.0.0.1", free_port(), 30)
        rank.build()
        rank.restore(None)
        return rank

    try:
        yield start
    finally:
        for rank in made:
            rank.close()


def fsdp_backend(config: Config, folder: str, rank: int = 0, world: int = 1) -> FsdpBackend:
    return FsdpBackend(config, folder, rank, world, OffloadManager(torch.device("cpu")))


@contextlib.contextmanager
def counted_reads(module: str) -> Iterator[Counter[str]]:
    """Count the elements of each tensor that are read from files that a module opens with safetensors."""
    reads: Counter[str] = Counter()

    class Slice:
        def __init__(self, name: str, found: Any) -> None:
            self._name, self._found = name, found

        def __getitem__(self, key: Any) -> torch.Tensor:
            part = self._found[key]
            reads[self._name] += part.numel()
            return part

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._found, attribute)

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __enter__(self) -> File:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self._file.get_slice(name))

        def get_tensor(self, name: str) -> torch.Tensor:
            whole = self._file.get_tensor(name)
            reads[name] += whole.numel()
            return whole

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._file, attribute)

    with mock.patch(f"{module}.safe_open", File):
        yield reads


def free_port() -> int:
    """Below the ephemeral range: no outgoing connection of another test can take it meanwhile."""
    (port,) = free_ports(1, "127.0.0.1")
    return port


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 400) -> list[Any]:
    """Run ``body(rank, world_size, port, *args)`` in one new process a rank; return their results.

    ``body`` is a module-level function.  A rank's failure fails the caller with its traceback.
    """
    module = preloaded.MEGATRON if body.__module__.startswith("tests.megatron.") else preloaded.TRAINER
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = preloaded.start(_run_rank, (sender, body, rank, world_size, port, *args), module)
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        results = [_result(pipe, rank, timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return results


def run_each(
    body: Callable[..., Any], world_size: int, folder: str, cases: Sequence[Any], *args: Any
) -> list[list[Any]]:
    """Run ``body(rank, world_size, port, folder, cases, ports, *args)`` in new processes for every few cases.

    ``body`` returns a result for each case.  Returns the results by case and rank.  In one process,
    megatron-core keeps the models of all cases, and their process groups with 58 threads each: after 30 cases
    a rank took nine times its processor time.
    """
    found: list[list[Any]] = []
    for first in range(0, len(cases), CASES_TOGETHER):
        few = list(cases[first : first + CASES_TOGETHER])
        ports = free_ports(len(few), "127.0.0.1")
        ranks = run_ranks(body, world_size, folder, few, ports, *args, timeout_s=600)
        found += map(list, zip(*ranks, strict=True))
    return found


def _result(pipe: Any, rank: int, timeout_s: float) -> Any:
    assert pipe.poll(timeout_s), f"rank {rank} gave no result within {timeout_s} s"
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a result") from None
    assert ok, f"rank {rank} failed:\n{value}"
    return value


def _run_rank(sender: Any, body: Callable[..., Any], rank: int, world: int, port: int, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((True, body(rank, world, port, *args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise


def logprobs_of(backend: Backend, batch: PackedBatch, role: Role) -> torch.Tensor:
    """``[P]`` float32 of one micro-batch."""
    (logprobs_P,) = backend.logprobs(Batches([batch], 1), role)
    assert logprobs_P is not None
    return logprobs_P
