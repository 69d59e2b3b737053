"""Is what a trainer or an engine computes the model?  Compared with transformers' own forward pass.

Trainers pack samples, engines cache keys and values; both replace the attention of a family's transformers
class, and neither can know what every family does.  So both compare, at their start, log-probabilities of a
few random tokens with those of the family's class as ``AutoModelForCausalLM`` loads it, with its config
unchanged and one sample at a time.  A difference that rounding does not explain is a
:class:`~orhpc.errors.ModelError`: a model that is computed wrongly is refused, not trained.

Neither login nodes nor the driver import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from orhpc.errors import ModelError

SHORT = 11
"""Tokens of the second sample, which must not depend on the first one."""
BEYOND = 24
"""Tokens of the first sample beyond the longest length of :func:`lengths_that_matter`."""
MOST_TOKENS = 4352
"""Of the first sample: bounds memory, and covers the usual window and original length, 4096."""
OPERATIONS_PER_THREAD = 1e11
"""Floating-point operations that a check may take of one CPU thread: a few seconds."""
PASSES = 5
"""Of the samples through the model: the one that is checked, the reference, its rounding, two for tokens."""
BLOCK = 16
"""Tokens whose mean difference is judged: an error that begins far into a sample is not averaged away."""
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Nats by which log-probabilities may differ, in a block's mean, where nothing is known of the rounding."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What is compared."""

    tokens: tuple[Tensor, ...]
    """int64, one sample each, the longest first."""
    beyond: int | None
    """The largest length of :func:`lengths_that_matter` that no sample exceeds; null: they exceed all."""

    @property
    def described(self) -> str:
        """In a few words, for logs."""
        text = " and ".join(str(len(sample)) for sample in self.tokens)
        return f"samples of {text} tokens" + (f", none beyond {self.beyond}" if self.beyond else "")


def samples_for(config: Any, *, longest: int, parameters: int, threads: int) -> Samples:
    """Random tokens that reach beyond every length at which the model changes, where that is cheap enough.

    ``config``: of the model, as transformers reads it.  ``longest``: tokens that a sample may have.
    ``parameters`` of the model and ``threads`` of this process bound how long the comparison may take.
    """
    text = config.get_text_config()
    limits = [length for length in lengths_that_matter(text) if length < longest]
    wanted = max(limits, default=0) + BEYOND
    affordable = int(OPERATIONS_PER_THREAD * threads / (PASSES * 2 * max(parameters, 1))) - SHORT
    length = max(2, min(wanted, longest, MOST_TOKENS, max(affordable, BEYOND)))
    generator = torch.Generator().manual_seed(7919)
    tokens = tuple(
        torch.randint(0, int(text.vocab_size), (n,), generator=generator)
        for n in (length, min(SHORT, longest))
    )
    return Samples(tokens, max((limit for limit in limits if limit >= length), default=None))


def lengths_that_matter(text: Any) -> list[int]:
    """Windows, chunks, selected keys, and lengths from which rotary positions change; of a text config."""
    found = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "index_topk")]
    bound = fixed_positions(text)
    found.append(bound[1] if bound else None)
    return [int(length) for length in found if length]


def fixed_positions(config: Any) -> tuple[str, int] | None:
    """Kind of rotary positions that change with the length, and the longest sequence for which they do not.

    transformers computes such frequencies from the longest sequence of a batch (``dynamic_rope_update``), so
    that beyond that length a sample's values depend on the samples that are computed with it, and on whether
    keys were cached before the sequence grew.  Null: the model's positions do not change.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else rope.values()
    found: list[tuple[int, str]] = []
    for values in kinds:
        if not isinstance(values, Mapping):
            continue
        kind = str(values.get("rope_type") or values.get("type") or "default")
        if kind == "longrope":
            original = values.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            found.append((int(original or text.max_position_embeddings), kind))
        elif "dynamic" in kind:
            found.append((int(text.max_position_embeddings), kind))
    return (min(found)[1], min(found)[0]) if found else None


def refuse_changing_positions(config: Any, longest: int, what: str, setting: str) -> None:
    """Refuse a model whose rotary positions change within ``longest`` tokens.

    ``what`` computes it; ``setting`` bounds the length.  Raises ModelError.
    """
    bound = fixed_positions(config)
    if bound is not None and longest > bound[1]:
        raise ModelError(
            f"{config.model_type}: beyond {bound[1]} tokens its rotary positions ({bound[0]}) change with "
            f"the longest sequence of a batch, which {what} cannot follow; set {setting} to {bound[1]} or "
            f"less, not {longest}"
        )


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, samples: Samples, temperature: float) -> list[Tensor]:
    """float32 ``[T - 1]`` of each sample: of its tokens after the first, by the model's own forward pass."""
    return [
        picked(model(input_ids=tokens[None], use_cache=False).logits[0, :-1], tokens[1:], temperature)
        for tokens in samples.tokens
    ]


@torch.no_grad()
def likely(model: PreTrainedModel, samples: Samples) -> Samples:
    """The same samples with tokens that the model may have sampled.

    Half precision rounds unlikely tokens' log-probabilities by several times as much as likely ones', which
    would hide a wrong computation.  Each of two passes replaces all tokens after the first at once, by what
    the model samples after the tokens that stood before them.
    """
    generator = torch.Generator().manual_seed(6007)
    found: list[Tensor] = []
    for tokens in samples.tokens:
        for _ in range(2):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)[:, 0]
            tokens = torch.cat([tokens[:1], drawn])
        found.append(tokens)
    return replace(samples, tokens=tuple(found))


def picked(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the targets, float32 ``[T]``."""
    return (logits_TV.float() / temperature).log_softmax(-1).gather(1, targets_T[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two computations of the same log-probabilities are apart, in nats."""

    mean: float
    """Largest mean over :data:`BLOCK` neighboring tokens of one sample."""
    largest: float

    @classmethod
    def of(cls, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Difference:
        """Of one list of ``[T]`` a side; NaN counts as infinite."""
        parts = [
            (a.float() - b.float()).abs().nan_to_num(nan=float("inf"))
            for a, b in zip(ours, theirs, strict=True)
        ]
        means = [float(block.mean()) for part in parts for block in _blocks(part)]
        return cls(max(means, default=0.0), max((float(part.max()) for part in parts), default=0.0))


def _blocks(values_T: Tensor) -> Iterator[Tensor]:
    """Neighboring tokens, the last block as long as the others."""
    for start in range(0, max(1, len(values_T)), BLOCK):
        end = min(start + BLOCK, len(values_T))
        yield values_T[max(0, end - BLOCK) : end]


def refuse(model_type: str, what: str, difference: Difference, allowed: float, advice: str) -> None:
    """Raise ModelError where the difference is larger than allowed; ``advice`` says what may help."""
    if not difference.mean <= allowed:
        raise ModelError(
            f"{model_type}: log-probabilities of {what} differ by {difference.mean:.3g} nats on average (at "
            f"most {difference.largest:.3g}) from transformers' own forward pass, where rounding explains "
            f"{allowed:.3g}: it does not compute this model; {advice} (model.check: false leaves this "
            "comparison out)"
        )
