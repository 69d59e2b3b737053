"""A run with recorded steps and an evaluation, and a tokenizer of one token per byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orhpc.commands.view.library import Library
from orhpc.commands.view.tokens import TokenTexts
from orhpc.rundir import RunDir
from orhpc.rundir.record import record_path, write_rollouts
from orhpc.rundir.trained import TrainedRollout, write_trained
from orhpc.types import Rollout, RolloutEnd, Task
from tests.unit.rundir.test_record import make_rollout

SAMPLES = 3
HOSTILE = "</script><script>errors.push('markup')</script><img src=x onerror=errors.push('image')>\x1b[31m"


def byte_tokenizer(folder: Path) -> Path:
    """Write a byte-level ``tokenizer.json`` and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_run(folder: Path, steps: int = 3, prompt: str = "Open the door.") -> RunDir:
    """``steps`` steps of two groups, and an evaluation after step 0 of one; sample 2 of each group failed."""
    texts = Tokenizer.from_file(str(byte_tokenizer(folder / "model") / "tokenizer.json"))
    run = RunDir(folder / "a run")
    run.create()
    run.config.write_text(f"model: {{path: {folder / 'model'}}}\nenvironments: {{org/env0: {{}}}}\n")
    for step in range(1, steps + 1):
        rollouts = [_rollout(texts, 10 * step + g, s, step, prompt) for g in range(2) for s in range(SAMPLES)]
        trained = [rollout for rollout in rollouts if rollout.reward is not None]
        write_rollouts(
            record_path(run.rollouts_of(step), 1, 0), rollouts, trained=[rollout.id for rollout in trained]
        )
        computed = {r.id: TrainedRollout(2 * r.reward - 1, r.logprobs_T - 0.125) for r in trained}
        write_trained(run.rollouts_of(step), computed)
    rollouts = [_rollout(texts, 900, 0, 1, prompt)]
    write_rollouts(record_path(run.rollouts / "evaluation_0", 1, 0), rollouts)
    return run


def _rollout(texts: Tokenizer, group: int, sample: int, step: int, prompt: str) -> Rollout:
    answer = f"grüße {group}.{sample}"
    question, said = texts.encode(prompt).ids, texts.encode(answer).ids
    tokens_T = np.array(question + said, np.int32)
    mask_T = np.arange(len(tokens_T)) >= len(question)
    failed = sample == SAMPLES - 1
    rollout = make_rollout(group, sample, len(tokens_T), reward=None if failed else float(sample))
    rollout.task = Task(f"org/env{group % 10}", "train", group)
    rollout.tokens_T, rollout.loss_mask_T = tokens_T, mask_T
    rollout.logprobs_T = np.where(mask_T, -0.5, 0).astype(np.float32)
    rollout.versions_T = np.where(mask_T, max(0, step - 2), -1).astype(np.int32)
    rollout.end = RolloutEnd.FAILED if failed else RolloutEnd.TERMINAL
    rollout.error = "it broke" if failed else None
    call = {"name": "open", "arguments": {"word": HOSTILE}}
    rollout.messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer, "reasoning": "It may be locked.", "tool_calls": [call]},
        {"role": "tool", "name": "open", "content": HOSTILE, "reward": 0.25},
    ]
    return rollout


def library_of(run: RunDir) -> Library:
    """The record of a run with its tokens."""
    return Library(run, TokenTexts.of(run))
