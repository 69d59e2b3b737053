"""A complete GRPO step against TRL's GRPOTrainer on the same model, tasks, shapes and dtypes.

    .venv/bin/pip install -e '.[bench]'
    .venv/bin/python benchmarks/grpo_step_vs_trl.py [--repeats 3] [--steps 6]

Both sides sample 4 prompts x 4 completions of up to 48 tokens with SmolLM2-135M-Instruct in float32 on all
cores, take one optimizer step without gradient checkpointing, and are timed by their own clocks. The first
two steps of each process are left out because memory is cold. The learning rate is 0 on both sides, so that
both keep sampling from the same policy, with answers of the same lengths. The sides alternate, because
machines are noisy; the result is the median of completion tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, TOKENS = 4, 4, 48
WARM_UP = 2


def ours(steps: int) -> list[tuple[float, float]]:
    """(completion tokens, seconds) of each step of the ordinary local run."""
    from orhpc.rundir.events import read_events, steps_of

    with tempfile.TemporaryDirectory() as root:
        overrides = {
            "run.root": root,
            "rollout.batch_size": PROMPTS,
            "rollout.n_samples": SAMPLES,
            "rollout.max_response_tokens": TOKENS,
            "train.global_batch_size": PROMPTS * SAMPLES,
            "train.steps": steps,
            "train.lr": 0.0,
            "checkpoint.save_interval": 10_000,
            "evaluation.interval": 0,
            "wandb.enabled": "false",
        }
        command = [sys.executable, "-m", "orhpc.launch", "--local", "configs/local.yaml"]
        command += [f"{key}={value}" for key, value in overrides.items()]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        events = steps_of(read_events(Path(root, "local", "events.jsonl")))
    return [(events[s]["response_tokens"], events[s]["seconds"]) for s in sorted(events)][WARM_UP:]


def theirs(steps: int) -> list[tuple[float, float]]:
    """The same for TRL, in a separate process."""
    command = [sys.executable, str(Path(__file__).absolute()), "--trl-child", "--steps", str(steps)]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.strip().splitlines()[-1])[WARM_UP:]


def trl_child(steps: int) -> None:
    """Run GRPOTrainer and print (completion tokens, seconds) for each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from orhpc.environments.arithmetic import Arithmetic
    from orhpc.models.bundled import ensure

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder = str(ensure("bundled:smollm2-135m-instruct"))
    tasks = [Arithmetic({"split": "train", "index": i}, {}) for i in range(PROMPTS * steps)]
    prompts = [[{"role": "user", "content": asyncio.run(t.get_prompt())[0].text}] for t in tasks]
    counts: list[float] = []

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        counts.append(float(sum(len(ids) for ids in completion_ids)))
        return [float(any(c.isdigit() for c in completion[0]["content"])) for completion in completions]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            max_steps=steps,
            learning_rate=0.0,
            beta=0.0,
            num_iterations=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    print(json.dumps(list(zip(counts, seconds, strict=False))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_child:
        trl_child(options.steps)
        return
    sides: dict[str, list[tuple[float, float]]] = {"orhpc": [], "trl": []}
    for repeat in range(options.repeats):
        sides["orhpc"] += ours(options.steps)
        sides["trl"] += theirs(options.steps)
        print(f"repeat {repeat + 1} of {options.repeats} done", file=sys.stderr)
    rates = {}
    print(f"{PROMPTS} prompts x {SAMPLES} x up to {TOKENS} tokens, {len(os.sched_getaffinity(0))} cores")
    for name, rows in sides.items():
        rates[name] = statistics.median(tokens / seconds for tokens, seconds in rows)
        step = statistics.median(seconds for _, seconds in rows)
        mean_tokens = statistics.mean(tokens for tokens, _ in rows)
        print(
            f"{name:>6}: {rates[name]:7.1f} completion tokens/s, {step:6.2f} s a step, "
            f"{mean_tokens:.0f} tokens a step (medians of {len(rows)} steps)"
        )
    print(f" ratio: {rates['orhpc'] / rates['trl']:7.2f} (target >= 1.5)")


if __name__ == "__main__":
    main()
