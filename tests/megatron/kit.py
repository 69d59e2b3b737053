"""Run layouts of a Megatron trainer in separate processes and compare them with plain references."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role, TrainingBatch
from orhpc.train.batch import PackedBatch, plan_batches
from orhpc.train.fetch import load_batch
from orhpc.train.fsdp.backend import FsdpBackend
from orhpc.train.process_groups import join_default_group
from orhpc.train.stopping import NeverStop
from orhpc.types import MiniBatch, Sample
from tests.model_configs import TINY
from tests.trainer_kit import MAX_TOKENS, free_port, fsdp_backend, make_config, make_samples

Arrays = dict[str, np.ndarray]
_GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 4.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
    },
}
_GEMMA2: dict[str, Any] = {
    # Half of the scores' spread, so that capping matters.
    "attn_logit_softcapping": 1.5,
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 4.0,
}
_LLAMA4: dict[str, Any] = {
    # Sequences exceed a chunk and several steps of the position scaling; there are layers of all kinds: dense
    # and with experts, with and without rotary positions.
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "attn_scale": 0.5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
_CHANGED = {"gemma2": _GEMMA2, "gemma3": _GEMMA, "llama4": _LLAMA4}
# The epsilon of latent norms differs from the config's.
_CHANGED["glm4-moe-lite"] = _CHANGED["deepseek-v3"] = {"rms_norm_eps": 0.03}
# The family's default number of expert groups would leave one expert per group.
_CHANGED["deepseek-v3-plain-queries"] = {"n_group": 2, "topk_group": 1}
_CHANGED["gemma3-images"] = {
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
}
_CHANGED["llama4-one-chunk"] = _LLAMA4 | {"attention_chunk_size": 1 << 16}
MODELS: dict[str, dict[str, Any]] = {
    # transformers gives the row of a padding token no gradient.
    name: content | _CHANGED.get(name, {}) | {"pad_token_id": None}
    for name, content in (TINY | {"llama4-one-chunk": TINY["llama4"]}).items()
}
DEEP = "qwen3-moe-with-four-layers"
MODELS[DEEP] = MODELS["qwen3-moe"] | {"num_hidden_layers": 4, "mlp_only_layers": []}
"""With a layer for each chunk of two virtual stages."""


@dataclass(frozen=True)
class Case:
    """One layout of one model, and what the test does with it."""

    family: str
    layout: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    save: str | None = None
    """Folder to write a checkpoint to after two steps; the next two steps' metrics are returned."""
    load: str | None = None
    """Folder to restore from; two steps' metrics are returned."""
    backend: str = "megatron"

    @property
    def name(self) -> str:
        layout = ".".join(f"{k}{v}" for k, v in self.layout.items()) or "alone"
        return f"{self.family} {layout}" + (" fsdp" if self.backend == "fsdp" else "")


def save_model(folder: Path, family: str) -> None:
    """Save a random model in which every weight affects the results."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[family]), dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            torch.nn.init.normal_(tensor, mean=1.0, std=0.1)
        elif "correction_bias" in name:
            torch.nn.init.normal_(tensor, std=0.1)
        elif isinstance(tensor, torch.nn.Parameter):
            torch.nn.init.normal_(tensor, std=0.12)
    model.save_pretrained(folder)


def case_config(case: Case, ranks: int, backend: str = "megatron") -> Any:
    train = {"backend": backend, "max_grad_norm": 1.0, **case.train}
    config = make_config(
        train=train, algorithm=case.algorithm, dtype=case.dtype, ranks=ranks, temperature=0.7
    )
    if backend == "megatron":
        raw = config.model_dump(mode="json")
        raw["megatron"] |= case.layout
        config = type(config).model_validate(raw)
    return config


def planned(samples: list[Sample], ranks: int) -> MiniBatch:
    plan = plan_batches(samples, ranks=ranks, n_minibatches=1, max_tokens=MAX_TOKENS)
    return plan.minibatches[0]


def batches_of(minibatch: MiniBatch, rank: int) -> list[PackedBatch]:
    return [load_batch(m) for m in minibatch.ranks[rank]]


# --- in each rank's process -------------------------------------------------------------------------


def run_cases(
    rank: int, world: int, port: int, folder: str, cases: list[Case], ports: list[int]
) -> list[Any]:
    """Body of one rank; see :func:`tests.trainer_kit.run_ranks`."""
    from tests.megatron import shim

    shim.install()
    return [_run(case, rank, world, at, folder) for case, at in zip(cases, ports, strict=True)]


def _run(case: Case, rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    config = case_config(case, world, case.backend)
    trainer = TrainerRank(config, f"{folder}/{case.family}", rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    backend: Any = trainer.backend
    ranks = config.data_ranks
    result: dict[str, Any] = {"data_rank": backend.data_rank, "reports": backend.reports}
    try:
        if case.load:
            trainer.restore(case.load)
            result["next"], result["after"] = _two_steps(trainer, ranks)
        elif case.save:
            steps = [trainer.step([planned(make_samples(8, seed=i), ranks)], step=i) for i in range(2)]
            result["kl"] = [metrics.get("kl", 0.0) for metrics in steps]
            trained = trained_tensors(backend)  # collective
            if rank == 0:
                torch.save(trained, trained_file(case.save))
            trainer.save_begin(case.save)
            result["next"], result["after"] = _two_steps(trainer, ranks)
            while (files := trainer.save_poll()) is None:
                pass
            result["files"] = files
        else:
            minibatch = planned(make_samples(8), ranks)
            batches = batches_of(minibatch, backend.data_rank)
            found = backend.logprobs(Batches(batches, len(batches)), Role.POLICY)
            result["logprobs"] = {
                b.sample_ids: lp.numpy() for b, lp in zip(batches, found, strict=True) if lp is not None
            }
            exported = backend.export(backend.parameter_shapes())
            result["export"] = {n: t.float().numpy() for n, t in exported} if rank == world - 1 else {
                n: t.shape for n, t in exported
            }  # fmt: skip
            result["gradients"] = _gradients(backend, batches, minibatch)
            trainer.step([minibatch], step=0)  # with the optimizer's step replaced by _gradients
            result["trained"] = trainer.take_trained()
    finally:
        trainer.close()
    return result


def _two_steps(trainer: TrainerRank, ranks: int) -> list[dict[str, float]]:
    """Return losses of two steps; the second depends on weights and moments after the first."""
    return [trainer.step([planned(make_samples(8, seed=i), ranks)], step=i + 1) for i in (2, 3)]


def trained_file(commit: str) -> Path:
    """Return the file with the :func:`trained_tensors` of a commit's run."""
    return Path(f"{commit}.trained.pt")


def trained_tensors(backend: Any) -> dict[str, torch.Tensor]:
    """Return this backend's tensors after training, in the model's type.

    FSDP: every module tensor and persistent buffer, from the model itself.  Megatron: every tensor of
    the checkpoint, from the ranks' live parameters.
    """
    if isinstance(backend, FsdpBackend):
        hf = backend.policy.hf
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in hf.named_parameters()}
        state = hf.state_dict()
        buffers = {n: b for n, b in hf.named_buffers() if n in state}
        return {n: t.detach().to(backend.dtype).clone() for n, t in whole.items()} | buffers
    return {n: t.clone() for n, t in backend.export(backend.parameter_shapes())}


def _gradients(backend: Any, batches: list[PackedBatch], minibatch: MiniBatch) -> list[tuple[Any, ...]]:
    """Return this rank's blocks of the whole gradient, just before the optimizer would use them."""
    from orhpc.train.megatron.optim import HeldState
    from orhpc.train.megatron.state import state_shards

    found: list[tuple[Any, ...]] = []

    def capture(loss: torch.Tensor) -> tuple[float, float]:
        optimizer = backend.optimizer
        optimizer._chained.prepare_grads()
        held = []
        for state in optimizer.held():
            (part,) = [p for p in optimizer._parts if state.parameter in p.model_param_group_index_map]
            main = part._get_main_param_and_optimizer_states(state.parameter)["param"]
            held.append(HeldState(state.parameter, state.start, state.stop, {"model": main.grad}))
        found.extend(
            (s.name.removeprefix("model/"), s.shape, s.start, s.column, s.tensor.numpy().copy())
            for s in state_shards(held, backend._targets, backend._mapping.shape)
        )
        optimizer.clear()
        return 0.0, 0.0

    backend.optimizer.step = capture
    training = Batches(map(TrainingBatch, batches), len(batches))
    backend.update(training, n_samples=minibatch.n_samples, n_tokens=minibatch.n_tokens, between=NeverStop())
    return found


# --- in the test's process --------------------------------------------------------------------------


def joined(results: list[dict[str, Any]]) -> Arrays:
    """Assemble the whole gradient from all ranks' blocks; blocks held by several ranks are equal."""
    whole: Arrays = {}
    for result in results:
        for name, shape, start, column, values in result["gradients"]:
            at = whole.setdefault(name, np.full(shape, np.nan, np.float32))
            rows = slice(start, start + len(values))
            into = (rows,) if values.ndim == 1 else (rows, slice(column, column + values.shape[1]))
            known = ~np.isnan(at[into])
            np.testing.assert_allclose(at[into][known], values[known], rtol=1e-4, atol=1e-6)
            at[into] = values
    for name, values in whole.items():
        assert not np.isnan(values).any(), f"nobody holds all of {name}"
    return _fused(whole)


def _fused(whole: Arrays) -> Arrays:
    """Stack matrices of single experts, ``NAME[e]``, into one checkpoint tensor, each transposed."""
    found: Arrays = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in whole.items():
        base, bracket, index = name.rstrip("]").partition("[")
        if bracket:
            experts.setdefault(base, {})[int(index)] = values.T
        else:
            found[name] = values
    return found | {n: np.stack([each[e] for e in range(len(each))]) for n, each in experts.items()}


def fsdp_gradients(folder: Path, case: Case) -> Arrays:
    """Compute the gradient of the same mini-batch with FSDP on one rank, under Hugging Face names."""
    join_default_group(torch.device("cpu"), "127.0.0.1", free_port(), 0, 1, 60)
    try:
        backend = fsdp_backend(case_config(case, 1, "fsdp"), str(folder / case.family))
        minibatch = planned(make_samples(8), 1)
        found: Arrays = {}

        def capture(loss: torch.Tensor) -> tuple[float, float]:
            for name, p in backend.policy.hf.named_parameters():
                assert p.grad is not None
                for hf_name, part in backend.hf_names().split(name, p.grad).items():
                    found[hf_name] = part.numpy().copy()
            return 0.0, 0.0

        backend.optimizer.step = capture  # type: ignore[method-assign]
        batches = batches_of(minibatch, 0)
        backend.update(
            Batches(map(TrainingBatch, batches), len(batches)), n_samples=minibatch.n_samples,
            n_tokens=minibatch.n_tokens, between=NeverStop(),
        )  # fmt: skip
        return found
    finally:
        dist.destroy_process_group()


def reference_logprobs(folder: Path, family: str, temperature: float) -> dict[str, np.ndarray]:
    """Compute log-probabilities with transformers, sample by sample, at the sampled slots."""
    # Some versions of transformers select by default an attention that ignores the soft cap.
    own = "eager" if MODELS[family].get("attn_logit_softcapping") else None
    model = AutoModelForCausalLM.from_pretrained(
        folder / family, dtype=torch.float32, attn_implementation=own
    )
    found: dict[str, np.ndarray] = {}
    for sample in make_samples(8):
        tokens = torch.from_numpy(sample.location.arrays["tokens_T"].astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / temperature
        chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
        found[sample.rollout_id] = chosen[sample.location.arrays["loss_mask_T"][1:]]
    return found
