"""Configure and build megatron-core's model."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn
from torch.nn import functional

from orhpc.errors import ConfigError, ModelError
from orhpc.models import ModelShape
from orhpc.plan.layout import stages
from orhpc.train.megatron.communicators import open_communicators
from orhpc.train.megatron.grouped_products import multiply_together
from orhpc.train.megatron.hf_mapping import HfMapping, ModelPart, Source
from orhpc.train.megatron.layers import with_family_layers
from orhpc.train.megatron.model_config import Build, spans
from orhpc.train.megatron.names import Naming
from orhpc.train.megatron.plain import plain_block, share_latent_projections

if TYPE_CHECKING:
    from orhpc.config import Config
    from orhpc.config.megatron import MegatronSettings

VOCABULARY_MULTIPLE = 8
"""Rows of a rank's part of the embedding are a multiple of this, for efficient matrix products."""

GROUPED_GEMM = "NVTE_USE_CUTLASS_GROUPED_GEMM"
"""If 1, TransformerEngine multiplies by all experts of a layer in one kernel, on Hopper in bfloat16;
one launch per expert would dominate a step.  A value already in the environment is kept."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of the model on this rank: a pipeline stage, or one of its interleaved parts."""

    model: GPTModel
    part: ModelPart


def start_groups(config: Config) -> None:
    """Create megatron-core's process groups from the default one."""
    leave_groups()  # those of a trainer that could not be built
    m = config.megatron
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=m.tp,
        pipeline_model_parallel_size=m.pp,
        virtual_pipeline_model_parallel_size=m.vpp if m.vpp > 1 else None,
        context_parallel_size=m.cp,
        expert_model_parallel_size=m.ep,
        expert_tensor_parallel_size=m.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_timeout_minutes(),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed + 1)
    if "cuda:nccl" in dist.get_backend_config():
        open_communicators(torch.device("cuda", torch.cuda.current_device()), interleaved=m.vpp > 1)


def leave_groups() -> None:
    """Leave megatron-core's process groups, if they were created."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _timeout_minutes() -> int:
    """Return the default group's timeout, which every collective shares."""
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return max(1, math.ceil(seconds / 60))


def transformer_config(
    build: Build, shape: ModelShape, config: Config, dtype: torch.dtype
) -> TransformerConfig:
    """Return megatron-core's config of one model in one layout.

    Raises:
        ConfigError: ``megatron.extra`` names an unknown field, or one that is set elsewhere.
        ModelError: megatron-core refuses the combination.
    """
    kind = MLATransformerConfig if build.latent else TransformerConfig
    engine = config.placement.device == "cuda"
    values = {**build.values, **_layout(config.megatron, shape), **_machine(engine, build)}
    values |= {
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "deterministic_mode": config.train.deterministic,
        "mtp_num_layers": None,  # such layers are not trained, and replay does not know them
        **_precision(config),
        **_recompute(config),
        **_overlap(config, shape),
        **spans(build, config),
    }
    known = {f.name for f in dataclasses.fields(kind) if f.init}
    for name in config.megatron.extra:
        if name not in known:
            raise ConfigError(f"megatron.extra.{name}: {kind.__name__} of megatron-core has no such field")
        if name in values:
            raise ConfigError(f"megatron.extra.{name}: this is set by the model or by other settings")
    try:
        return kind(**values, **config.megatron.extra)
    except (ValueError, AssertionError, TypeError) as error:
        raise ModelError(
            f"megatron-core refuses the model or its layout: {' '.join(str(error).split())}"
        ) from error


def _layout(m: MegatronSettings, shape: ModelShape) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": m.tp,
        "sequence_parallel": m.tp > 1,
        "pipeline_model_parallel_size": m.pp,
        "virtual_pipeline_model_parallel_size": m.vpp if m.vpp > 1 else None,
        "context_parallel_size": m.cp,
        "expert_model_parallel_size": m.ep,
        "expert_tensor_parallel_size": m.etp,
        "variable_seq_lengths": m.pp > 1,
        "deallocate_pipeline_outputs": m.pp > 1,
        # Interleaved stages send forward and backward at once; with two stages, each is the other's
        # successor and predecessor, and a batch of messages would confuse the two directions.
        "overlap_p2p_comm": m.vpp > 1,
        "batch_p2p_comm": m.vpp == 1,
        # The loss is divided by the whole mini-batch's normalizer, so gradients are summed over ranks.
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }
    if m.pp > 1:
        cuts = chunk_layers(shape, m)
        rows = [["decoder"] * len(part) for part in cuts]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        values["pipeline_model_parallel_layout"] = rows
    return values


def chunk_layers(shape: ModelShape, m: MegatronSettings) -> list[range]:
    """Return the layers of every chunk, in execution order: chunk ``v x pp + stage``."""
    return stages(shape, m.pp * m.vpp)


def _machine(engine: bool, build: Build) -> dict[str, Any]:
    return {
        "transformer_impl": "transformer_engine" if engine else "local",
        "perform_initialization": False,
        "use_cpu_initialization": not engine,
        "bias_activation_fusion": engine and build.values["activation_func"] is functional.silu,
        # Without dropout and biases it is one addition.  Compiled, every packed length would need another
        # compilation, until torch stops after eight.
        "bias_dropout_fusion": False,
        "apply_rope_fusion": engine and not build.latent and not build.values["rotary_interleaved"],
        "moe_grouped_gemm": engine and "num_moe_experts" in build.values,
        "moe_permute_fusion": engine,
        "gradient_accumulation_fusion": False,
    }


def _precision(config: Config) -> dict[str, Any]:
    """Return FP8 settings: the engines' weight blocks, for the decoder's linear layers only.

    They are set also when FP8 is off, so that ``megatron.extra`` cannot enable it: megatron-core's plain
    layers, or a recipe with other blocks, would compute something else than the engines.
    """
    if config.precision != "fp8":
        return {"fp8": None}
    return {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}


def _recompute(config: Config) -> dict[str, Any]:
    if not config.train.gradient_checkpointing:
        return {}
    if config.megatron.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": config.megatron.recompute_modules}
    layers = config.megatron.recompute_layers
    if layers is None:
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        method = {"recompute_method": "block", "recompute_num_layers": layers}
    return {"recompute_granularity": "full", **method}


def _overlap(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Raise ModelError where megatron-core 0.19.2's overlapped schedule would leave out the final norm: it
    is part of the last layer's exchange."""
    wanted = config.megatron.overlap_moe_expert_parallel_comm
    if wanted and not shape.layers[-1].experts:
        raise ModelError(
            "megatron.overlap_moe_expert_parallel_comm: the model's last layer has no experts; remove the "
            "setting"
        )
    return {"overlap_moe_expert_parallel_comm": wanted}


def naming_of(config: Config) -> Naming:
    engine = config.placement.device == "cuda"
    return Naming(fused_norms=engine, grouped_experts=engine)


def padded_vocabulary(shape: ModelShape, m: MegatronSettings) -> int:
    multiple = m.tp * VOCABULARY_MULTIPLE
    return -(-shape.vocabulary // multiple) * multiple


def own_parts(shape: ModelShape, m: MegatronSettings) -> list[ModelPart]:
    """Return this rank's part of the model for each of its chunks."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    index = parallel_state.get_expert_model_parallel_rank()
    cuts = chunk_layers(shape, m)
    share = shape.experts // m.ep
    experts = range(index * share, (index + 1) * share) if shape.experts else None
    numbers = [v * m.pp + stage for v in range(m.vpp)]
    return [ModelPart(cuts[n], n == 0, n == len(cuts) - 1, experts) for n in numbers]


def build_chunks(
    build: Build,
    mcore: TransformerConfig,
    shape: ModelShape,
    m: MegatronSettings,
    device: torch.device,
    *,
    critic: bool = False,
) -> list[Chunk]:
    """Build this rank's part of the model, with uninitialized weights.

    ``critic``: with a value instead of logits at the end.
    """
    os.environ.setdefault(GROUPED_GEMM, "1")
    chunks: list[Chunk] = []
    for index, part in enumerate(own_parts(shape, m)):
        vp_stage = index if m.vpp > 1 else None
        block = get_gpt_decoder_block_spec(
            mcore, use_transformer_engine=device.type == "cuda", vp_stage=vp_stage
        )
        if device.type != "cuda":
            block = plain_block(block)
        block = with_family_layers(
            block,
            post_norm=build.sandwich,
            near_frequencies=build.near_frequencies,
            heads=(shape.heads, shape.kv_heads) if shape.qk_norm == "all" else None,
            softcap=build.softcap,
            traits=build.traits,
        )
        model = GPTModel(
            config=mcore,
            transformer_layer_spec=block,  # type: ignore[arg-type]
            vocab_size=padded_vocabulary(shape, m),
            max_sequence_length=1 << 20,
            pre_process=part.first,
            post_process=part.last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied and not critic,
            position_embedding_type="rope",
            rotary_percent=build.rotary_share,
            vp_stage=vp_stage,
        )
        if critic and part.last:
            model.output_layer = ValueLayer(mcore)  # type: ignore[assignment]
        if device.type != "cuda":
            share_latent_projections(model, mcore)
        _set_frequencies(model, build.inverse_frequencies, device)
        if build.latent_eps is not None:
            _set_latent_eps(model, build.latent_eps)
        if mcore.fp8:
            _check_quantized(model.decoder)
        if device.type == "cuda":
            multiply_together(model.decoder, fp8=bool(mcore.fp8))
        if part.first and build.embedding_scale != 1.0:
            model.embedding.register_forward_hook(partial(_scaled, build.embedding_scale))
        chunks.append(Chunk(model.to(device), part))
    return chunks


class ValueLayer(nn.Module):
    """The weight of the critic's head, ``[1, H]``, which every tensor-parallel rank holds whole.

    :class:`orhpc.train.megatron.schedule.ValueHead` computes with it.  All these ranks have the same hidden
    states there and therefore the same gradient, so that nothing is summed over them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        size = (1, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))


def _check_quantized(decoder: nn.Module) -> None:
    """Refuse layers that would compute in higher precision although FP8 was requested.

    Only TransformerEngine's linear layers use the recipe; routers and gates are never quantized.
    """
    from transformer_engine.pytorch.module.base import (  # pyright: ignore[reportMissingImports]
        TransformerEngineBaseModule,
    )

    for name, parameter in decoder.named_parameters():
        kept = ".router." in name or name.endswith("gate_weight")
        owner = decoder.get_submodule(name.rpartition(".")[0])
        if parameter.dim() > 1 and not kept and not isinstance(owner, TransformerEngineBaseModule):
            raise ModelError(f"precision: fp8 would leave {name} ({type(owner).__name__}) unquantized")


def _scaled(scale: float, _module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Scale in the embedding's type, to round as transformers does."""
    return output * torch.tensor(scale, dtype=output.dtype, device=output.device)


def _set_latent_eps(model: GPTModel, eps: float) -> None:
    """Set the epsilon of latent norms, which may be fused with the next layer; megatron-core has only one."""
    for module in model.modules():
        if hasattr(module, "kv_layernorm"):
            names = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
            norms: list[Any] = [norm for name in names if hasattr(norm := getattr(module, name, None), "eps")]
            if not norms:
                raise ModelError("megatron-core built latent attention without norms")
            for norm in norms:
                norm.eps = eps


def _set_frequencies(model: GPTModel, frequencies: torch.Tensor, device: torch.device) -> None:
    found = 0
    for module in model.modules():
        held = getattr(module, "inv_freq", None)
        if isinstance(held, torch.Tensor):
            if held.shape != frequencies.shape:
                raise ModelError(
                    f"megatron-core rotates {2 * len(held)} of a head, the model {2 * len(frequencies)}"
                )
            module.inv_freq = frequencies.to(device, copy=True)
            found += 1
    if not found and len(list(model.decoder.layers)):
        raise ModelError("megatron-core built a model without rotary positions")


@torch.no_grad()
def load_chunks(chunks: Sequence[Chunk], mapping: HfMapping, source: Source) -> None:
    """Read this rank's weights, one parameter at a time, so that no rank ever holds more than its share.

    Raises:
        ModelError: a tensor is missing or has another shape, or no rule loads a parameter.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    etp_rank: Any = parallel_state.get_expert_tensor_parallel_rank()
    for chunk in chunks:
        held = held_tensors(chunk.model)
        for name, target, index in mapping.own(chunk.part, tp_rank=tp_rank, etp_rank=etp_rank):
            tensor = held.pop(name, None)
            if tensor is None:
                raise ModelError(
                    f"megatron-core's model has no {name}: a rule in megatron/names.py, or the family's row "
                    "in models/families, is wrong"
                )
            if tensor.shape != target.local_shape():
                raise ModelError(
                    f"megatron-core's {name} is {list(tensor.shape)}, the checkpoint's "
                    f"{list(target.local_shape())}"
                )
            target.fill(tensor, source, index)
        if held:
            raise ModelError(f"megatron-core's model has {', '.join(sorted(held)[:3])}, which no rule loads")


def held_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, and the routers' correction biases, by name."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found |= {name: b for name, b in model.named_buffers() if name.endswith("router.expert_bias")}
    return found
