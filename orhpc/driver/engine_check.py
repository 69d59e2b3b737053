"""Check, once per attempt and before training, that every engine samples from the trainer's policy.

Every engine continues a prompt of random tokens by a few tokens, through the same protocol as rollouts, and
the trainer computes the log-probabilities of the same tokens.  This needs no knowledge of the model and
covers what :mod:`orhpc.models.forward_check` cannot: SGLang's computation and the first weight sync.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orhpc.config import Config
from orhpc.driver.fleet import Engines, Trainers
from orhpc.errors import InfraError, ModelError
from orhpc.models import vocabulary_of
from orhpc.train.actor import TrainerRank
from orhpc.types import Generation, Sampling

log = logging.getLogger(__name__)

PROMPT_TOKENS, BEYOND_WINDOW, MAX_PROMPT_TOKENS = 8, 24, 4352
"""Tokens of a prompt.  On GPUs the first prompt is ``BEYOND_WINDOW`` tokens longer than the model's largest
attention window for which it has at most ``MAX_PROMPT_TOKENS`` tokens."""
SAMPLED_TOKENS, MIN_COUNT = 24, 8
"""Tokens that each engine samples, and the smallest divisor of the mean difference over them."""
MAX_ENGINES = 64
BOUNDS = {"float32": 0.02, "bfloat16": 0.5}
"""Largest allowed mean difference in nats: ``float32`` if both compute in it, else ``bfloat16``.  On random
prompts rounding causes 1e-5 and 0.1; a wrong kind of attention or of positions causes 0.5 or more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens that one engine sampled."""

    url: str
    tokens: list[int]
    """Prompt tokens and sampled tokens."""
    logprobs: list[float]
    """Log-probabilities of the sampled tokens, from the engine."""


async def ask(engines: Engines, config: Config, model_dir: str) -> list[Answer]:
    """Have the engines sample; returns no answers if an engine fails, which is logged."""
    values: Mapping[str, Any] = json.loads((Path(model_dir) / "config.json").read_text())
    vocabulary = vocabulary_of(values) or 256
    values = {**values, **(values.get("text_config") or {})}
    generator = random.Random(7919)
    prompts: dict[str, list[int]] = {}
    for index, url in enumerate(engines.urls[:MAX_ENGINES]):
        length = _prompt_length(config, values, first=index == 0)
        prompts[url] = [generator.randrange(vocabulary) for _ in range(length)]
    sampling = Sampling(
        max_new_tokens=min(SAMPLED_TOKENS, config.rollout.max_response_tokens),
        temperature=config.rollout.temperature,
    )
    try:
        found: Mapping[str, Generation] = await engines.pool.each(
            lambda client: client.generate(prompts[client.url], sampling, rid=f"check-{client.url}"),
            list(prompts),
        )
    except InfraError as error:
        log.warning("engines and trainer are not compared: %s", error)
        return []
    return [
        Answer(url, [*prompts[url], *map(int, g.tokens_N)], [float(value) for value in g.logprobs_N])
        for url, g in found.items()
        if len(g.tokens_N)
    ]


def _prompt_length(config: Config, values: Mapping[str, Any], *, first: bool) -> int:
    length = PROMPT_TOKENS
    room = config.rollout.max_total_tokens - SAMPLED_TOKENS
    if first and config.placement.device == "cuda":
        windows = [values.get(name) for name in ("sliding_window", "attention_chunk_size", "index_topk")]
        length = max(
            [
                PROMPT_TOKENS,
                *(
                    int(w) + BEYOND_WINDOW
                    for w in windows
                    if w and int(w) + BEYOND_WINDOW <= MAX_PROMPT_TOKENS
                ),
            ]
        )
    return max(1, min(length, room))


async def compare(trainers: Trainers, answers: Sequence[Answer], config: Config) -> float:
    """Mean difference of the log-probabilities, in nats, of the engine that differs most.

    Raises:
        ModelError: the difference is larger than rounding explains.
    """
    samples = [(answer.tokens, len(answer.logprobs)) for answer in answers]
    found = await trainers.all(TrainerRank.sampled_logprobs, samples)
    (ours,) = [values for values in found if values is not None][:1]
    means = [
        float(np.abs(np.asarray(own) - np.asarray(answer.logprobs)).sum() / max(len(own), MIN_COUNT))
        for own, answer in zip(ours, answers, strict=True)
    ]
    worst = int(np.nanargmax(np.nan_to_num(means, nan=np.inf)))
    types = {config.model.dtype, config.engine.dtype or config.model.dtype}
    whole = types == {"float32"} and config.precision == "bf16"
    bound = BOUNDS["float32" if whole else "bfloat16"]
    if not means[worst] <= bound:
        raise ModelError(
            f"engine {answers[worst].url} does not sample from the trainer's policy: log-probabilities of "
            f"{len(answers[worst].logprobs)} tokens differ by {means[worst]:.3g} nats on average, where "
            f"rounding explains {bound:g}; engine.backend: {config.engine.backend} or train.backend: "
            f"{config.train.backend} does not compute this model correctly (model.check: false skips this "
            "comparison)"
        )
    log.info("engines and trainer agree within %.2g nats on %d samples", means[worst], len(answers))
    return means[worst]
