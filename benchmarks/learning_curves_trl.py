"""TRL's side of benchmarks/learning_curves.py: runs in an environment that has TRL, and not orhpc.

    python benchmarks/learning_curves_trl.py JOB.json

JOB.json: ``algorithm``, ``model`` (folder), ``prompts`` (texts, in the order of training), ``seed``,
``steps``, ``prompts_per_step``, ``samples``, ``max_tokens``, ``lr``, and of the reward of ``letters``
``wanted`` and ``min_length``.
The last line of its output is JSON: TRL's version, and for every step its sampled tokens and mean reward.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

OVERLONG_BUFFER = 4
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "temperature": 1.0,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "logging_strategy": "no",
}


@dataclass
class Judge:
    """The reward of orhpc's ``letters``, and a record of it by step."""

    tokenizer: Any
    wanted: str
    min_length: int
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Sampled tokens and mean reward of each step."""

    def reward(self, ids: list[int]) -> float:
        """Return the share of wanted characters; 0 for an answer that was cut off."""
        if not ids or ids[-1] != self.tokenizer.eos_token_id:
            return 0.0
        text = self.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        return sum(c in self.wanted for c in text) / max(len(text), self.min_length)

    def judge(self, completions: list[list[int]]) -> list[float]:
        """Return the rewards of all completions of one step, and record them."""
        rewards = [self.reward(ids) for ids in completions]
        self.steps.append((sum(map(len, completions)), sum(rewards) / len(rewards)))
        return rewards


class Scorer(torch.nn.Module):
    """Has the interface that PPOTrainer wants of a reward model, and returns the judge's rewards.

    PPOTrainer calls the backbone, then ``score`` with its last hidden states, and reads one position of the
    result; here these states are the token ids, and every position has the reward of the whole row.
    """

    base_model_prefix = "backbone"

    def __init__(self, judge: Judge, prompts: list[list[int]]) -> None:
        super().__init__()
        self.backbone = _Ids(judge.tokenizer.pad_token_id)
        self._judge, self._prompts = judge, {tuple(ids) for ids in prompts}
        self._lengths = sorted({len(ids) for ids in prompts}, reverse=True)

    def score(self, ids_BT: torch.Tensor) -> torch.Tensor:
        rewards = self._judge.judge([self._completion(row) for row in ids_BT.tolist()])
        return torch.tensor(rewards)[:, None, None].expand(*ids_BT.shape, 1)

    def _completion(self, row: list[int]) -> list[int]:
        pad, eos = self._judge.tokenizer.pad_token_id, self._judge.tokenizer.eos_token_id
        start = next(i for i, token in enumerate(row) if token != pad)
        length = next(n for n in self._lengths if tuple(row[start : start + n]) in self._prompts)
        sampled = row[start + length :]
        ends = [i for i, token in enumerate(sampled) if token in (pad, eos)]
        return sampled[: ends[0] + (sampled[ends[0]] == eos)] if ends else sampled


class _Ids(torch.nn.Module):
    """Returns its input ids as hidden states; those that are masked become padding again."""

    def __init__(self, pad: int) -> None:
        super().__init__()
        self._pad = pad

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> Any:
        ids_BT = input_ids.masked_fill(~attention_mask.bool(), self._pad)
        return type("Output", (), {"hidden_states": (ids_BT,)})()


def grouped(job: dict[str, Any], tokenizer: Any, judge: Judge, out: str) -> Any:
    """Return the trainer of GRPO, DAPO or RLOO."""
    batch = job["prompts_per_step"] * job["samples"]
    shared: dict[str, Any] = COMMON | {
        "output_dir": out,
        "per_device_train_batch_size": batch,
        "num_generations": job["samples"],
        "max_completion_length": job["max_tokens"],
        "max_steps": job["steps"],
        "learning_rate": job["lr"],
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "seed": job["seed"],
    }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return judge.judge([list(ids) for ids in completion_ids])

    functions = [reward]
    if job["algorithm"] == "rloo":
        from trl import RLOOConfig, RLOOTrainer  # pyright: ignore[reportMissingImports]

        trainer, config = RLOOTrainer, RLOOConfig(**shared)
    else:
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

        loss: dict[str, Any] = {"loss_type": "grpo"}
        if job["algorithm"] == "dapo":
            from trl.rewards import get_soft_overlong_punishment  # pyright: ignore[reportMissingImports]

            loss = {"loss_type": "dapo", "epsilon_high": 0.28}
            functions.append(get_soft_overlong_punishment(job["max_tokens"], OVERLONG_BUFFER))
        trainer, config = GRPOTrainer, GRPOConfig(**shared, **loss)
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=functions,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": _chats(job["prompts"])}),
        processing_class=tokenizer,
    )


def ppo(job: dict[str, Any], tokenizer: Any, judge: Judge, out: str) -> Any:
    """Return the trainer of PPO, with the reward function in the form of a reward model."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # pyright: ignore[reportMissingImports]

    batch = job["prompts_per_step"] * job["samples"]
    config = PPOConfig(
        **COMMON,
        output_dir=out,
        per_device_train_batch_size=batch,
        local_rollout_forward_batch_size=batch,
        total_episodes=batch * job["steps"],
        response_length=job["max_tokens"],
        stop_token="eos",
        learning_rate=job["lr"],
        num_ppo_epochs=1,
        num_mini_batches=1,
        num_sample_generations=0,
        kl_coef=0.0,
        cliprange=0.2,
        cliprange_value=0.2,
        gamma=1.0,
        lam=0.95,
        seed=job["seed"],
    )
    value = AutoModelForSequenceClassification.from_pretrained(
        job["model"], num_labels=1, dtype=torch.float32
    )
    torch.nn.init.zeros_(value.score.weight)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in _chats(job["prompts"])
    ]
    data = Dataset.from_dict({"input_ids": prompts})
    policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_model=Scorer(judge, prompts),
        value_model=value,
        train_dataset=data,
        eval_dataset=data.select(range(batch)),
    )


def _chats(prompts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    judge = Judge(tokenizer, job["wanted"], job["min_length"])
    with tempfile.TemporaryDirectory() as out:
        (ppo if job["algorithm"] == "ppo" else grouped)(job, tokenizer, judge, out).train()
    print(json.dumps({"trl": version("trl"), "steps": judge.steps[: job["steps"]]}))


if __name__ == "__main__":
    main()
