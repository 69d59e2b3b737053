"""Verify that a trainer or an engine computes the model, by comparison with transformers' forward pass.

Trainers pack samples, engines cache keys and values; both replace the attention of a family's transformers
class, and may not support every feature of a family.  At startup both therefore compare log-probabilities of
a few random tokens with those of the family's class, loaded by ``AutoModelForCausalLM`` with its config
unchanged, one sample at a time.  A difference that rounding does not explain raises
:class:`~orhpc.errors.ModelError`.

Neither login nodes nor the driver import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from orhpc.errors import ModelError
from orhpc.models.rotary import changing_positions, rotary_kinds

SHORT = 11
"""Tokens of the second sample, whose results must not depend on the first one."""
BEYOND = 24
"""Tokens of the first sample beyond the longest length of :func:`critical_lengths`."""
MOST_TOKENS = 4352
"""Maximum tokens of the first sample: bounds memory, and covers the usual window of 4096."""
OPERATIONS_PER_THREAD = 1e11
"""Floating-point operations that a check may use per CPU thread: a few seconds."""
PASSES = 5
"""Passes of the samples through the model: checked one, reference, its rounding, two for tokens."""
BLOCK = 16
"""Tokens per block: block means are compared, so that an error late in a sample is not averaged away."""
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Allowed difference of log-probabilities in nats, as a block's mean, if the rounding error is unknown."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples for the comparison."""

    tokens: tuple[Tensor, ...]
    """int64, one sample each, the longest first."""
    beyond: int | None
    """The largest of :func:`critical_lengths` that no sample exceeds; null: samples exceed all."""

    @property
    def described(self) -> str:
        """Short description for logs."""
        text = " and ".join(str(len(sample)) for sample in self.tokens)
        return f"samples of {text} tokens" + (f", none beyond {self.beyond}" if self.beyond else "")


def samples_for(config: Any, *, longest: int, parameters: int, threads: int) -> Samples:
    """Draw random tokens longer than every length at which the model changes, if affordable.

    ``config``: of the model, as transformers reads it.  ``longest``: maximum tokens of a sample.
    ``parameters`` of the model and ``threads`` of this process bound the duration of the comparison.
    """
    text = config.get_text_config()
    limits = [length for length in critical_lengths(text) if length < longest]
    wanted = max(limits, default=0) + BEYOND
    affordable = int(OPERATIONS_PER_THREAD * threads / (PASSES * 2 * max(parameters, 1))) - SHORT
    length = max(2, min(wanted, longest, MOST_TOKENS, max(affordable, BEYOND)))
    generator = torch.Generator().manual_seed(7919)
    tokens = tuple(
        torch.randint(0, int(text.vocab_size), (n,), generator=generator)
        for n in (length, min(SHORT, longest))
    )
    return Samples(tokens, max((limit for limit in limits if limit >= length), default=None))


def critical_lengths(text: Any) -> list[int]:
    """Return windows, chunks, selected keys, and lengths at which rotary positions change."""
    found = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "index_topk")]
    bound = fixed_positions(text)
    found.append(bound[1] if bound else None)
    return [int(length) for length in found if length]


def fixed_positions(config: Any) -> tuple[str, int] | None:
    """Return :func:`orhpc.models.rotary.changing_positions` of a config as transformers reads it."""
    return changing_positions(_positions_of(config))


def _positions_of(config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    names = ("rope_parameters", "rope_scaling", "original_max_position_embeddings", "max_position_embeddings")
    return {name: getattr(text, name, None) for name in names}


def unknown_positions(config: Any) -> ModelError | None:
    """Return the error for a kind of rotary positions without a function in transformers; None: all have one.

    For the KeyError with which building such a model fails: a family may have a function for its kinds.
    """
    for kind, _ in rotary_kinds(_positions_of(config)):
        if kind not in {"default", *ROPE_INIT_FUNCTIONS}:
            return ModelError(
                f"model.path: transformers {transformers.__version__} does not know rotary positions of kind "
                f"{kind!r} (rope_scaling in config.json), only default, {', '.join(ROPE_INIT_FUNCTIONS)}"
            )
    return None


def refuse_changing_positions(config: Any, longest: int, what: str, setting: str) -> None:
    """Refuse a model whose rotary positions change within ``longest`` tokens.

    ``what``: what computes the model; ``setting``: the setting that bounds the length.  Raises ModelError.
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
    """Return float32 ``[T - 1]`` per sample: of tokens after the first, by the model's own forward pass."""
    return [
        target_logprobs(
            model(input_ids=tokens[None], use_cache=False).logits[0, :-1], tokens[1:], temperature
        )
        for tokens in samples.tokens
    ]


@torch.no_grad()
def with_likely_tokens(model: PreTrainedModel, samples: Samples) -> Samples:
    """Replace the samples' tokens by ones that the model may have sampled.

    Half precision rounds unlikely tokens' log-probabilities several times more than likely ones', which
    would hide a wrong computation.  Each of two passes replaces all tokens after the first at once by
    samples of the model, given the previous tokens.
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


def target_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities of the targets, float32 ``[T]``."""
    return (logits_TV.float() / temperature).log_softmax(-1).gather(1, targets_T[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two computations of the same log-probabilities, in nats."""

    mean: float
    """Largest mean over :data:`BLOCK` neighboring tokens of one sample."""
    largest: float

    @classmethod
    def of(cls, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Difference:
        """Compare two lists of ``[T]`` tensors; NaN counts as infinite."""
        parts = [
            (a.float() - b.float()).abs().nan_to_num(nan=float("inf"))
            for a, b in zip(ours, theirs, strict=True)
        ]
        means = [float(block.mean()) for part in parts for block in _blocks(part)]
        return cls(max(means, default=0.0), max((float(part.max()) for part in parts), default=0.0))


def _blocks(values_T: Tensor) -> Iterator[Tensor]:
    """Yield blocks of consecutive tokens; the last one overlaps to have full length."""
    for start in range(0, max(1, len(values_T)), BLOCK):
        end = min(start + BLOCK, len(values_T))
        yield values_T[max(0, end - BLOCK) : end]


def refuse(model_type: str, what: str, difference: Difference, allowed: float, advice: str) -> None:
    """Raise ModelError if the difference is larger than ``allowed``; ``advice``: what may help."""
    if not difference.mean <= allowed:
        raise ModelError(
            f"{model_type}: log-probabilities of {what} differ by {difference.mean:.3g} nats on average (at "
            f"most {difference.largest:.3g}) from transformers' own forward pass, but rounding explains only "
            f"{allowed:.3g}: it does not compute this model; {advice} (model.check: false skips this "
            "comparison)"
        )
