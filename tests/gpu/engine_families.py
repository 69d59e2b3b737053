"""Train small random models of each family with SGLang on one GPU; compare all weights after every sync.

    python tests/gpu/engine_families.py --out DIR [--only NAME ...] [--together 3] [--set K=V ...]

A run a family through ``python -m orhpc.launch``: rollouts by SGLang, updates by Megatron where it has the
family and by FSDP otherwise, routing replay for mixtures of experts.  After every sync SGLang's weights are
compared bit for bit with an export of the trainer's; the log-probabilities of both show that SGLang also uses
them.  The table has what SGLang's processes said about direct loading.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.sglang_check import events, keep, launch, show_failure  # noqa: E402
from tests.gpu.sglang_models import WORK  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 256}
_DEEPSEEK_EXPERTS = {
    **_EXPERTS, "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# SGLang's kernels for latent attention are written for the published sizes.
_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_MILLION = {"rope_theta": 1e6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "megatron",
        {
            **_DEEPSEEK_EXPERTS, **_LATENT, "n_group": 4, "topk_group": 2, "moe_layer_freq": 1,
            "routed_scaling_factor": 2.5, "rope_theta": 10000, "max_position_embeddings": 163840,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
            },
        },
    ),
    "glm4_moe": (
        "megatron",
        {
            **_DEEPSEEK_EXPERTS, **_MILLION, "use_qk_norm": True, "attention_bias": True,
            "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5,
        },
    ),
    "glm4_moe_lite": (
        "megatron", {**_DEEPSEEK_EXPERTS, **_LATENT, **_MILLION, "routed_scaling_factor": 1.8}
    ),
    "minimax_m2": (
        "megatron",
        {
            "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256,
            "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
            "qk_norm_type": "per_layer", "head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6,
        },
    ),
    "mixtral": (
        "megatron",
        {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 256, **_MILLION},
    ),
    "qwen2_moe": (
        "megatron",
        {
            "num_experts": 16, "shared_expert_intermediate_size": 256, "norm_topk_prob": False, **_EXPERTS,
            **_MILLION,
        },
    ),
    "qwen3_moe": ("megatron", {"num_experts": 16, "norm_topk_prob": True, **_EXPERTS, **_MILLION}),
    "gemma2": (
        "megatron",
        {
            "head_dim": 256, "sliding_window": 128, "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    # The sixth layer sees everything, by other rotary frequencies.
    "gemma3_text": (
        "fsdp",
        {
            "head_dim": 256, "sliding_window": 128, "num_hidden_layers": 6, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, **_MILLION,
        },
    ),
    "glm4": ("megatron", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "llama": (
        "megatron",
        {
            "rope_theta": 500000.0, "max_position_embeddings": 131072,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
    ),
    "mistral": ("fsdp", {"sliding_window": None, **_MILLION}),
    "qwen2": ("fsdp", {"tie_word_embeddings": True, **_MILLION}),
    "qwen3": ("fsdp", _MILLION),
}  # fmt: skip
"""Backend, and what ``config.json`` has beyond :data:`SMALL`: keys of published models, in their spelling."""

SETTINGS = (
    "wandb.enabled=false", "checkpoint.save_interval=null", "train.steps=5", "model.chat_format=chatml",
    "engine.check_weights=true", "engine.direct_loading=true",
    # Small, so that the parameters of each layer are in several buckets.
    "engine.sync_bucket_mb=2",
    # Concurrent runs count each other's memory as used; a token limit bounds each engine's memory.
    "engine.memory_fraction=0.8", "engine.extra.max_total_tokens=65536",
    "engine.extra.moe_runner_backend=triton", "engine.extra.cuda_graph_bs_decode=[16,64]",
    "engine.extra.enforce_disable_flashinfer_allreduce_fusion=true",
    "rollout.batch_size=8", "rollout.n_samples=8", "train.global_batch_size=64", "train.lr=0.0003",
    "train.max_tokens_per_gpu=8192",
    # A random model never answers correctly: without this reward, weights would hardly change.
    "rollout.custom_reward=tests.gpu.random_model:even_tokens",
)  # fmt: skip
MOST_DIFFERENT, MOST_OTHERS = 0.02, 0.15
"""Bounds of a step's mean log-probability difference (0.008 at most when all was well) and of the share of
its tokens for which the trainer would take other experts (0.07)."""
MOST_DIFFERENT_FP8, MOST_OTHERS_FP8 = 0.1, 0.6
"""The same for engines in FP8 (0.073 and 0.44): experts of random models are chosen by narrow margins."""
MIXTURE = ("rollout.record_routes=true", "train.routing_replay=true")


def write_folder(family: str) -> Path:
    """A random model in bf16 with a byte tokenizer, and a ``config.json`` as published."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from orhpc.models.bundled import _byte_tokenizer

    folder = WORK / f"family-{family}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True)
    end = _byte_tokenizer(folder) - 1
    content = SMALL | FAMILIES[family][1]
    config = AutoConfig.for_model(family, **content, eos_token_id=end, bos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                spread = 0.02 if parameter.dim() < 2 else 0.7 * parameter.shape[-1] ** -0.5
                parameter.normal_(std=spread)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(std=0.02)
    model.save_pretrained(folder)
    ends = {"eos_token_id": end, "bos_token_id": None, "pad_token_id": None}
    about = {"architectures": [type(model).__name__], "model_type": family, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(about | content | ends, indent=1))
    return folder


def settings(family: str) -> list[str]:
    """Overrides of a family's run."""
    backend, content = FAMILIES[family]
    mixture = "num_experts_per_tok" in content
    return [
        *SETTINGS, *(MIXTURE if mixture else ()), f"train.backend={backend}",
        f"model.path={WORK / f'family-{family}'}",
    ]  # fmt: skip


def run(family: str, options: argparse.Namespace, ends: float) -> tuple[str, bool, str]:
    """One row of the table."""
    root, began = WORK / f"run-{family}", time.monotonic()
    if began > ends - 60:
        return family, False, "not run: no time was left"
    code = launch(root, *settings(family), *options.set, deadline_s=ends - began)
    keep(root, options.out)
    done = [e for e in events(root) if e["event"] == "step"]
    if code != 0 or not done:
        show_failure(root)
        return family, False, f"exit {code}, {len(done)} steps; {why(root)}"
    learnt = done[0].get("grad_norm", 0) > 0  # later ones can be 0: these models soon get every reward
    fp8 = any(each.startswith("precision=fp8") for each in options.set)
    different, others = (MOST_DIFFERENT_FP8, MOST_OTHERS_FP8) if fp8 else (MOST_DIFFERENT, MOST_OTHERS)
    agree = all(
        e["logprob_diff_mean"] < different and e.get("token_mismatch_fraction", 0) < others for e in done
    )
    shown = ("logprob_diff_mean", "logprob_diff_max", "token_mismatch_fraction")
    last = {key: float(f"{done[-1][key]:.2g}") for key in shown if key in done[-1]}
    syncs = [round(e["sync_seconds_total"] - e.get("sync_seconds_check", 0.0), 2) for e in done]
    note = f"{len(done)} steps, {time.monotonic() - began:.0f} s, {last}, syncs {syncs}; {said(root)}"
    return family, learnt and agree, note


def why(root: Path) -> str:
    found = re.findall(
        r"^.*(?:Error|error:|refused).*$", (root.parent / f"{root.name}.log").read_text(), re.M
    )
    return found[-1].strip()[:300] if found else ""


def said(root: Path) -> str:
    """What the engine's processes logged about direct loading, each line once."""
    lines: dict[str, None] = {}
    for log in root.glob("*/attempts/*/*"):
        if log.is_file():
            text = log.read_text(errors="replace")
            for line in re.findall(r"(\S+ and what is sent with it .*|weights whose loading only .*)", text):
                lines[line[:260]] = None
    return " | ".join(itertools.islice(lines, 4)) or "nothing said about direct loading"


def rows_of(options: argparse.Namespace) -> Iterator[tuple[str, bool, str]]:
    ends = time.monotonic() + options.seconds
    names = [name for name in FAMILIES if not options.only or name in options.only]
    write = [sys.executable, __file__, "--out", str(options.out), "--write", "--only"]
    with ThreadPoolExecutor(options.together) as pool:
        written = list(pool.map(lambda name: subprocess.run([*write, name], check=False).returncode, names))
        for name, code in zip(names, written, strict=True):
            if code:
                yield name, False, "transformers could not write the model"
        yield from pool.map(
            lambda name: run(name, options, ends),
            [name for name, code in zip(names, written, strict=True) if not code],
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], choices=FAMILIES, metavar="NAME")
    parser.add_argument("--together", type=int, default=3, help="runs at the same time")
    parser.add_argument("--seconds", type=float, default=500, help="of all runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the runs' config")
    parser.add_argument("--write", action="store_true", help="only write the models' folders")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.write:
        for name in options.only:
            write_folder(name)
        return 0
    failed, table = 0, []
    for name, ok, note in rows_of(options):
        failed += not ok
        table.append({"family": name, "ok": ok, "note": note})
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {note}", flush=True)
    (options.out / "families.json").write_text(json.dumps(table, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
