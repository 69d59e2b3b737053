"""What trainers cannot compute of a model, by its shape and ``config.json``: refused before a node is used.

The trainers refuse the same when they read the model; here it is known without torch, before a job waits in
the queue.
"""

from __future__ import annotations

from pathlib import Path

from orhpc.config import Config
from orhpc.errors import ConfigError
from orhpc.models import ModelShape
from orhpc.models.rotary import changing_positions, read_config, read_text_config


def check_model(config: Config, shape: ModelShape, folder: Path) -> None:
    """Raise ConfigError for a model that the config's trainer or cpu engine cannot compute."""
    if shape.vision and config.precision != "bf16":
        raise ConfigError(f"precision: {config.precision} is not for models that see images; set it to bf16")
    if config.train.backend == "megatron":
        _check_megatron(config, shape)
    _check_positions(config, folder)
    _check_weights(config, folder)
    served = config.engine.backend == "sglang" and config.train.replay_rollouts is None
    if served and (misread := shape.family.sglang_misreads(read_config(folder))):
        raise ConfigError(f"model.path: {config.model.path} has {misread}")
    for setting in ("rollout.record_routes", "train.routing_replay"):
        section, _, name = setting.partition(".")
        if not shape.experts and getattr(getattr(config, section), name):
            raise ConfigError(f"{setting}: the model is dense, it has no expert routes; set it to false")


def not_built(shape: ModelShape) -> str:
    """Why the Megatron trainer cannot build a model; empty: it can."""
    if shape.vision:
        return "cannot train a model that sees images"
    why = shape.family.megatron.not_built
    return f"cannot build {shape.family.name}: {why}" if why else ""


def undivided_attention(shape: ModelShape, longest: int) -> str:
    """Why context parallelism cannot divide the attention of rollouts up to ``longest``; empty: it can."""
    spans = {layer.chunked: layer.span for layer in shape.layers if layer.span is not None}
    chunk = spans.get(True)
    if chunk is not None and longest > chunk:
        return f"in chunks of {chunk} tokens cannot be divided over ranks, and rollouts have up to {longest}"
    if False in spans and not shape.family.megatron.softcap_key:  # soft-capped attention gathers the sequence
        return "within a sliding window cannot be divided over ranks"
    return ""


def _check_megatron(config: Config, shape: ModelShape) -> None:
    if problem := not_built(shape):
        raise ConfigError(f"train.backend: megatron {problem}; set it to fsdp")
    longest = config.rollout.max_total_tokens
    if config.megatron.cp > 1 and (problem := undivided_attention(shape, longest)):
        raise ConfigError(f"megatron.cp: attention {problem}; set it to 1, not {config.megatron.cp}")
    if config.train.gradient_checkpointing and config.megatron.recompute == "selective":
        lacking = {"moe_act": shape.experts == 0, "mla_up_proj": shape.kv_rank is None}
        if wrong := [name for name in config.megatron.recompute_modules if lacking.get(name)]:
            raise ConfigError(f"megatron.recompute_modules: the model has no {wrong[0]}; remove it")
    if config.megatron.overlap_moe_expert_parallel_comm and not shape.layers[-1].experts:
        raise ConfigError(
            "megatron.overlap_moe_expert_parallel_comm: the model's last layer has no experts; set it to "
            "false"
        )


def _check_positions(config: Config, folder: Path) -> None:
    if (bound := changing_positions(read_text_config(folder))) is None:
        return
    kind, constant = bound
    if config.train.backend == "megatron":
        raise ConfigError(
            f"train.backend: megatron cannot compute rotary positions of kind {kind}, which change with the "
            "length; set it to fsdp"
        )
    longest = config.rollout.max_total_tokens
    if longest > constant:
        raise ConfigError(
            f"rollout.max_total_tokens: beyond {constant} tokens the model's rotary positions ({kind}) "
            "change with the longest sequence of a batch, which a trainer that packs samples cannot follow; "
            f"set it to {constant} or less, not {longest}"
        )


def _check_weights(config: Config, folder: Path) -> None:
    """Raise ConfigError for quantized weights that the trainer cannot read."""
    about = read_config(folder).get("quantization_config") or read_text_config(folder).get(
        "quantization_config"
    )
    if not isinstance(about, dict):
        return
    method = about.get("quant_method")
    in_blocks = method == "fp8" and about.get("weight_block_size") is not None
    if config.train.backend == "megatron" and in_blocks:
        return
    other = ", or set train.backend to megatron, which reads these" if in_blocks else ""
    raise ConfigError(
        f"model.path: {config.model.path} holds quantized weights ({method}), which cannot be trained; name "
        f"the folder or the hub name of the unquantized model{other}"
    )
