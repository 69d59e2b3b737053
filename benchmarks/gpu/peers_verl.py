"""verl's side of ``peers.py``: its prompts, its command, and its timings.

The settings are those of verl's example scripts for GRPO and its guide to performance: FSDP2, packed
sequences, micro-batches by tokens, gradient checkpointing, one optimizer step on each batch, and SGLang on
each trainer's GPU, asleep during the update. What is not set has verl's default.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTENTION = "torch_varlen"
"""As ``peers_standins.ATTENTION``, which cannot be imported without torch."""
RELEASE = "0.9.1"
NOTES = (
    "verl: attention by torch.nn.attention.varlen (no flash-attn there), the same kernel as orhpc's trainer",
    "verl: log-probabilities by a Triton kernel of peers_standins.py instead of flash-attn's",
    f"verl {RELEASE} names transformers < 5.11 and SGLang 0.5.12; this machine has those of the table's head",
)
"""What stands in for something else; printed with the table."""


def write_prompts(path: Path, prompts: int, length: int) -> Path:
    """Write a JSON-lines file of chats about ``length`` bytes long, in the form of verl's datasets."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for index in range(prompts):
            a, b = numbers.randint(0, 999), numbers.randint(0, 999)
            text = f"What is {a} + {b}? Answer with the number only."
            row = {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": text + " " * max(0, length - len(text))}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": "train", "index": index},
            }
            file.write(json.dumps(row) + "\n")
    return path


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """verl's reward function: random numbers, because a random model's answers hardly contain any text."""
    return random.random()


def overrides(shape: Mapping[str, Any], model: Path, work: Path, engine: Mapping[str, Any]) -> list[str]:
    """All settings as Hydra overrides of ``ppo_trainer.yaml``.

    Args:
        shape: ``prompts``, ``samples``, ``prompt_tokens``, ``response``, ``tokens`` (of a micro-batch),
            ``steps``, ``lr``, ``memory`` (fraction for SGLang), ``running`` (requests that an SGLang runs at
            once), ``gpus``.
        model: folder of the model.
        work: folder for what verl writes.
        engine: options of SGLang.
    """
    prompts = work / "prompts.jsonl"
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": shape["prompts"],
        "data.max_prompt_length": shape["prompt_tokens"],
        "data.max_response_length": shape["response"],
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.external_lib": "benchmarks.gpu.peers_standins",
        "+actor_rollout_ref.model.override_config.attn_implementation": ATTENTION,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": shape["lr"],
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.ppo_mini_batch_size": shape["prompts"],
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": shape["tokens"],
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{rollout}.name": "sglang",
        f"{rollout}.n": shape["samples"],
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": shape["memory"],
        f"{rollout}.max_num_seqs": shape["running"],
        "reward.custom_reward_function.path": Path(__file__).absolute(),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": shape["gpus"],
        "trainer.nnodes": 1,
        "trainer.logger": '["console","file"]',
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": shape["steps"],
        "trainer.default_local_dir": work / "checkpoints",
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 4_000_000_000,
        "hydra.run.dir": work / "hydra",
    }
    args = [f"{name}={value}" for name, value in settings.items()]
    return [*args, *(f"+{rollout}.engine_kwargs.sglang.{n}={json.dumps(v)}" for n, v in engine.items())]


def command(settings: list[str]) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *settings]


def steps_of(log: Path) -> list[dict[str, float]]:
    """Figures of each step in the file that verl's ``file`` logger writes; an unfinished line is left out."""
    found: list[dict[str, float]] = []
    text = log.read_text() if log.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            event = json.loads(line)
            if "timing_s/step" in event["data"]:
                found.append(figures(event["step"], event["data"]))
    return found


def figures(step: int, data: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, and tokens, of one step.

    verl's ``gen`` is sampling and rewards, and then the release of SGLang's memory, which the table counts
    with the wake-up and the weights (``update_weights``).
    """
    seconds = data["timing_s/step"]
    release = data.get("timing_s/release", 0.0)
    known = {
        "rollout": data["timing_s/gen"] - release,
        "logprobs": data.get("timing_s/old_log_prob", 0.0),
        "update": data["timing_s/update_actor"],
        "sync": data["timing_s/update_weights"] + release,
    }
    return {
        "step": step,
        "seconds": seconds,
        **known,
        "rest": seconds - sum(known.values()),
        "total_tokens": data["perf/total_num_tokens"],
        "response_length": data["response_length/mean"],
    }
