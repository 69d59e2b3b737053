"""Models, samples and references with which ``megatron_check.py`` compares the Megatron trainer."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tests.gpu.engine_scales  # noqa: F401 - before all others
from orhpc.config import Config
from orhpc.models import read_shape
from orhpc.plan.layout import Layout
from orhpc.plan.memory import GIB, Demand, trainer_memory
from orhpc.process.ports import free_ports
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role
from orhpc.train.batch import PackedBatch, plan_batches
from orhpc.types import Location, MiniBatch, Sample

WORK = Path("/tmp/megatron_check")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    ok: bool
    note: str


Rows = Iterator[Row]
BUDGET = 8192
LONG = [1024, 3072, 2048, 2048] * 2
"""Two micro-batches of exactly the budget."""
SHORT = [700, 37, 1200, 300, 256, 2]
TIMEOUT_S = 40.0

_GQA = {"num_key_value_heads": 8, "head_dim": 128}
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4,
    "num_attention_heads": 32, "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6, **_GQA,
}  # fmt: skip
"""Layers and head of Qwen3-8B."""
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 3,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 12288,
    "tie_word_embeddings": False, "rope_theta": 1e6,
}  # fmt: skip
"""Layers of Qwen3-30B-A3B, with a sixteenth of the layers and about a sixteenth of the head."""

SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 4096,
    "pad_token_id": 0,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 256, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
_GLM_EXPERTS = {
    "use_qk_norm": True, "attention_bias": True, "moe_intermediate_size": 256, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "glm4": {"model_type": "glm4", "attention_bias": True},
    "glm4_moe": {"model_type": "glm4_moe", **_GLM_EXPERTS},
    "deepseek_v3": {"model_type": "deepseek_v3", **_LATENT},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "shared_expert_intermediate_size": 256, "norm_topk_prob": False,
        **_QWEN_EXPERTS,
    },
    "minimax_m2": {
        "model_type": "minimax_m2", "num_local_experts": 16, "num_experts_per_tok": 4,
        "intermediate_size": 256,
    },
    # Attention scores are about as large as the soft cap; the head size is Gemma's.
    "gemma2": {
        "model_type": "gemma2", "head_dim": 256, "attn_logit_softcapping": 2.0, "sliding_window": 100,
    },
    # Samples span several chunks; layers with and without rotary positions, dense and with experts.
    "llama4_text": {
        "model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1,
        "intermediate_size": 256, "intermediate_size_mlp": 1024, "moe_layers": [0, 1],
        "no_rope_layers": [1, 0, 1], "attention_chunk_size": 256, "floor_scale": 100, "attn_scale": 0.5,
    },
}  # fmt: skip


def make_folder(name: str, content: dict[str, Any], device: str) -> Path:
    """A random model in bf16, written as Hugging Face safetensors."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from orhpc.train.hf_model import HfNames

    folder = WORK / name
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(**content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names, weights = HfNames(model), {}
    torch.manual_seed(0)
    for key, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if "norm" in key:
            whole.normal_(mean=1.0, std=0.1)
        else:
            whole.normal_(std=0.02 if whole.dim() < 2 else 0.7 * parameter.shape[-1] ** -0.5)
        weights |= {n: t.cpu().contiguous() for n, t in names.split(key, whole).items()}
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    biases = [tensor for tensor in read_shape(folder).tensors() if tensor.part == "bias"]
    weights |= {tensor.name: torch.zeros(tensor.shape).normal_(std=0.02) for tensor in biases}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 4096}))
    (folder / "done").touch()
    return folder


def make_config(
    ranks: int = 1, device: str = "cuda", precision: str = "bf16", **sections: dict[str, Any]
) -> Config:
    train = {
        "backend": "megatron", "global_batch_size": 8, "lr": 1e-6, "max_tokens_per_gpu": BUDGET,
        "logprob_chunk_tokens": BUDGET, **sections.get("train", {}),
    }  # fmt: skip
    engine = {"tp": 1} | ({"backend": "cpu"} if device == "cpu" else {})
    rollout = {
        "batch_size": 2,
        "n_samples": 4,
        "max_total_tokens": 4096,
        "max_response_tokens": 2048,
        **sections.get("rollout", {}),
    }
    return Config.model_validate(
        {
            "model": {"dtype": "bfloat16" if device == "cuda" else "float32"},
            "placement": {"device": device, "devices_per_node": ranks},
            "engine": engine,
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
            "rollout": rollout,
            "train": train,
            "megatron": sections.get("megatron", {}),
            **({"precision": precision} if precision != "bf16" else {}),
        }
    )


def make_samples(
    lengths: Sequence[int], vocabulary: int, routes: dict[str, Any] | None = None
) -> list[Sample]:
    """All tokens but each sample's first are sampled.  ``routes``: by sample, ``[T - 1, layers, topk]``."""
    rng = np.random.default_rng(5)
    found: list[Sample] = []
    for i, length in enumerate(lengths):
        mask_T = np.arange(length) > 0
        arrays: dict[str, Any] = {
            "tokens_T": rng.integers(0, vocabulary, length).astype(np.int32),
            "loss_mask_T": mask_T,
            "logprobs_T": np.where(mask_T, -rng.gamma(2.0, 1.5, length), 0).astype(np.float32),
        }
        advantage, name = float(rng.normal()), f"0.{i}"
        if routes is not None:
            arrays["routes"] = routes[name]
        found.append(Sample(name, length, length - 1, advantage, Location(arrays=arrays)))
    return found


def planned(samples: Sequence[Sample], ranks: int) -> MiniBatch:
    return plan_batches(samples, ranks=ranks, n_minibatches=1, max_tokens=BUDGET).minibatches[0]


def start(config: Config, folder: Path, rank: int = 0, world: int = 1, port: int = 0) -> TrainerRank:
    trainer = TrainerRank(config, str(folder), rank, world, 4)
    trainer.connect("127.0.0.1", port or free_ports(1, "127.0.0.1")[0], TIMEOUT_S)
    trainer.build()
    return trainer


def close(trainer: TrainerRank) -> None:
    trainer.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def by_sample(batches: Iterable[PackedBatch], found: Iterable[torch.Tensor | None]) -> dict[str, np.ndarray]:
    """Log-probabilities of the sampled tokens of each sample."""
    result: dict[str, np.ndarray] = {}
    for batch, logprobs_P in zip(batches, found, strict=True):
        if logprobs_P is None:
            continue
        values_P = logprobs_P.float().cpu().numpy()
        for s, name in enumerate(batch.sample_ids):
            at = batch.loss_mask_P & (batch.segments_P == s)
            result[name] = values_P[at]
    return result


def trainer_logprobs(trainer: TrainerRank, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    backend = trainer.backend
    minibatch = planned(samples, trainer.config.data_ranks)
    batches = [trainer.load_batch(m) for m in minibatch.ranks[backend.data_rank]]
    return by_sample(batches, backend.logprobs(Batches(batches, len(batches)), Role.POLICY))


def reference(folder: Path, samples: Sequence[Sample], device: str) -> dict[str, dict[str, np.ndarray]]:
    """transformers' log-probabilities: in bf16 like the weights, and with the same weights in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None)
    # Some versions of transformers choose by default an attention without the soft cap.
    own = "eager" if capped else None
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=own)
    model = model.to(device).eval()
    found: dict[str, dict[str, np.ndarray]] = {}
    for kind in ("bf16", "float32"):
        if kind == "float32":
            model = model.float()
        found[kind] = {}
        for sample in samples:
            tokens = torch.from_numpy(sample.location.arrays["tokens_T"].astype(np.int64)).to(device)
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            found[kind][sample.rollout_id] = chosen.cpu().numpy()
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def error(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> tuple[float, float]:
    """Mean and largest absolute difference over all tokens."""
    assert found.keys() == truth.keys(), f"{sorted(found)} instead of {sorted(truth)}"
    differences = np.concatenate([np.abs(found[n] - truth[n]) for n in truth])
    return float(differences.mean()), float(differences.max())


def timed_steps(
    trainer: TrainerRank, minibatch: MiniBatch, count: int
) -> tuple[dict[str, float], list[float]]:
    """Metrics of the last step, and seconds of each."""
    seconds: list[float] = []
    metrics: dict[str, float] = {}
    for index in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        metrics = trainer.step([minibatch], step=index)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return metrics, seconds


def peak_against_plan(trainer: TrainerRank, folder: Path, minibatch: MiniBatch, *, recompute: bool) -> str:
    """Peak memory of a step, the planned one, and their ratio, as text."""
    timed_steps(trainer, minibatch, 1)
    torch.cuda.reset_peak_memory_stats()
    timed_steps(trainer, minibatch, 1)
    peak = torch.cuda.max_memory_allocated()
    demand = Demand(BUDGET, 2, "full" if recompute else "none", BUDGET, False, micro_batches=2)
    plan = trainer_memory(read_shape(folder), Layout(1), demand)
    parts = ", ".join(f"{n} {b / GIB:.2f}" for n, b in plan.parts().items() if b)
    return f"{peak / GIB:.2f} GiB, planned {plan.total / GIB:.2f} ({parts}): ratio {peak / plan.total:.3f}"
