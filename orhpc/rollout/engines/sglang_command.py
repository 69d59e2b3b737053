"""Builds an SGLang server's options from a run's config.

Option names are those of SGLang 0.5.16's ``ServerArgs``; :data:`RENAMED` lists names in other releases.
:mod:`orhpc.rollout.engines.sglang_server` checks on the engine's node that the installed release supports
all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orhpc.config import Config
from orhpc.config.engine import EngineSettings
from orhpc.models.images import folder_sees
from orhpc.rollout.engines.dummy_weights import starts_with_random_weights

FP8_BLOCK = 128
"""Rows and columns per scale (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3)."""

LOADER = "orhpc.rollout.engines.sglang_loading.install"
"""Function with which SGLang's processes prepare their models for weight syncs."""
SLEEPER = "orhpc.rollout.engines.sglang_sleep.install"
"""Function with which SGLang's processes prepare to release memory."""

RENAMED: dict[str, tuple[str, ...]] = {
    "tp_size": ("tensor_parallel_size",),
    "dp_size": ("data_parallel_size",),
    "ep_size": ("expert_parallel_size",),
}
"""Option name in 0.5.16 to its names in other releases."""


@dataclass(frozen=True, slots=True)
class EnginePart:
    """The part of an engine that runs on one node."""

    devices: tuple[int, ...] = ()
    """Indices of its GPUs on the node; empty for a cpu engine."""
    node_rank: int = 0
    nnodes: int = 1
    rendezvous: str | None = None
    """``host:port`` on the first node for the rendezvous of the engine's processes.  If None, SGLang chooses
    a port, which an outgoing connection can occupy before SGLang binds it."""
    shares: bool = False
    """Whether it shares its GPUs with trainers, so that each releases its memory while the other works."""


def sglang_options(
    config: Config, model_dir: str, host: str, port: int, index: int, part: EnginePart
) -> dict[str, Any]:
    """All options except the key, by SGLang's names with underscores; ``engine.extra`` overrides others."""
    engine = config.engine
    options: dict[str, Any] = {
        "model_path": model_dir,
        "host": host,
        "port": port,
        "dtype": engine.dtype or config.model.dtype,
        "tp_size": engine.tp,
        "mem_fraction_static": engine.memory_fraction,
        **_most_requests(engine),
        "context_length": engine.context_length or config.rollout.max_total_tokens,
        # The engine receives and returns token ids; only the workers tokenize.  For images SGLang's processor
        # needs its tokenizer, but keeps the ids that it was sent (SGLANG_MM_AVOID_RETOKENIZE, its default).
        "skip_tokenizer_init": not folder_sees(model_dir),
        # The access log would have one line per turn of every rollout.
        "log_level_http": "warning",
        "random_seed": (config.run.seed + index) % (1 << 31),
        "trust_remote_code": config.model.trust_remote_code,
        "enable_return_routed_experts": config.rollout.record_routes,
        "enable_deterministic_inference": engine.deterministic,
        "enable_memory_saver": part.shares,
    }
    if functions := functions_for(config, shares=part.shares):
        options["custom_weight_loader"] = functions
    if engine.dp > 1:
        options |= {"dp_size": engine.dp, "enable_dp_attention": True}
    if engine.ep > 1:
        options["ep_size"] = engine.ep
    if part.nnodes > 1:
        options |= {"nnodes": part.nnodes, "node_rank": part.node_rank, "dist_init_addr": part.rendezvous}
    elif part.rendezvous is not None:
        options["nccl_port"] = int(part.rendezvous.rpartition(":")[2])
    if config.precision != "bf16":
        options |= _fp8_options(config)
    elif starts_with_random_weights(config, model_dir):
        options["load_format"] = "dummy"
    options |= _speculative_options(config, part)
    return options | {name.replace("-", "_"): value for name, value in engine.extra.items()}


def _most_requests(engine: EngineSettings) -> dict[str, int]:
    """Limits with which each of SGLang's schedulers runs its share of ``engine.max_running`` requests.

    A prompt that is prefilled in parts has a slot, and takes a second one from the limit of a batch
    (``get_new_batch_prefill`` in ``srt/managers/scheduler.py``, SGLang 0.5.16).  Without a slot to spare, the
    last of as many requests as slots would wait until another has ended: for a whole rollout, if all are sent
    at once.  The second limit keeps batches within ``engine.max_running``, for which there are CUDA graphs.
    """
    each = max(1, engine.max_running // engine.dp)
    return {"max_running_requests": engine.max_running + engine.dp, "pp_max_micro_batch_size": each}


def functions_for(config: Config, *, shares: bool) -> list[str]:
    """Functions to be called in every process of an engine before its first weight sync.

    ``shares``: as in :class:`EnginePart`.
    """
    return [LOADER] * config.engine.records_loading + [SLEEPER] * shares


def _fp8_options(config: Config) -> dict[str, Any]:
    """The published model is unquantized: its config has no block size, and its weights are not loaded."""
    block = [FP8_BLOCK, FP8_BLOCK]
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
    }
    if config.engine.power_of_two_scales:
        quantization["scale_fmt"] = "ue8m0"
    return {
        "load_format": "dummy",
        "json_model_override_args": json.dumps({"quantization_config": quantization}),
    }


def _speculative_options(config: Config, part: EnginePart) -> dict[str, Any]:
    speculative = config.engine.speculative
    options: dict[str, Any] = {}
    if speculative is not None:
        options = {
            "speculative_algorithm": speculative.algorithm,
            "speculative_num_steps": speculative.num_steps,
            "speculative_eagle_topk": speculative.eagle_topk,
            "speculative_num_draft_tokens": speculative.num_draft_tokens,
        }
        if speculative.draft_model is not None:
            options["speculative_draft_model_path"] = speculative.draft_model
    if part.shares and config.engine.drafts_with_weights:
        # The trainer has no weights for the draft model, so weights discarded during sleep would be lost.
        options["enable_draft_weights_cpu_backup"] = True
    return options


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as command-line arguments: true becomes a flag, false and null are omitted."""
    command_line: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        command_line.append(f"--{name.replace('_', '-')}")
        if isinstance(value, dict):
            command_line.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            command_line += [str(item) for item in value]
        elif value is not True:
            command_line.append(str(value))
    return command_line
