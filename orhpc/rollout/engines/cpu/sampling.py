"""Sampling of one token a row, from counter-based random numbers.

The token at position p of a request with seed s depends on nothing but the logits, s and p: its
random numbers come from Philox keyed with (s, p).  What else is in the batch changes the logits by
float rounding only, and the exponential race below turns that into another token with a
probability of the same size.

A race over the whole vocabulary (the token with the smallest E_i / p_i, E_i exponential, is a sample
of p; Gumbel 1954 in its max form) needs as many random numbers as tokens.  So the race is run twice: over
blocks of the vocabulary by their mass, then inside the winning block.  By the chain rule that is
still exactly a sample of p, for some hundreds of random numbers in place of fifty thousand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 256
"""Tokens a block."""

TOP_K_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's sampling parameters that this engine knows, checked."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """Whether some tokens are excluded before sampling."""
        return self.top_p < 1.0 or self.top_k < TOP_K_ALL or self.min_p > 0.0


def race_noise(seed: int, position: int, count: int) -> np.ndarray:
    """``count`` float64 exponential random numbers, a function of (seed, position) alone."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).standard_exponential(count)


@torch.inference_mode()
def sample(
    logits: torch.Tensor, params: list[SamplingParams], positions: list[int]
) -> tuple[list[int], list[float]]:
    """Draw one token a row of float32 ``[rows, vocabulary]`` (overwritten).

    Returns the token ids and their log-probabilities under ``softmax(logits / temperature)``, which
    is not truncated by top-p, top-k or min-p, as in SGLang.  ``positions`` are context positions of
    the new tokens.  A row of top-k 1 takes the most likely token and needs no random number.
    """
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    if bool((temperatures != 1.0).any()):
        logits.div_(temperatures[:, None])
    rows, vocabulary = logits.shape
    highest, most_likely = logits.max(dim=1)
    padded = -(-vocabulary // BLOCK) * BLOCK
    weights = torch.zeros(rows, padded) if padded != vocabulary else torch.empty(rows, padded)
    torch.sub(logits, highest[:, None], out=weights[:, :vocabulary])
    weights[:, :vocabulary].exp_()
    blocks = weights.view(rows, padded // BLOCK, BLOCK)
    # Sums of 256 terms in float32 and of the blocks in float64 keep the normaliser at 1e-7.
    normaliser = blocks.sum(dim=2).double().sum(dim=1).log_()

    for row, p in enumerate(params):
        if p.truncated and p.top_k > 1:
            _truncate(weights[row, :vocabulary], p)
    masses = blocks.sum(dim=2).double().numpy()
    tokens = most_likely.tolist()
    racing = [row for row, p in enumerate(params) if p.top_k > 1]
    for row in racing:
        noise = race_noise(params[row].seed, positions[row], masses.shape[1] + BLOCK)
        block = int(np.argmax(masses[row] / noise[: masses.shape[1]]))
        inside = blocks[row, block].numpy() / noise[masses.shape[1] :]
        tokens[row] = block * BLOCK + int(np.argmax(inside))
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    logprobs = (chosen - highest).double() - normaliser
    return tokens, logprobs.tolist()


def _truncate(weights: torch.Tensor, params: SamplingParams) -> None:
    """Set to 0 what top-k, top-p and min-p exclude, in place.

    The rules are SGLang's (``layers/sampler.py``): rank below k, probability mass of the more likely
    tokens at most top-p, probability at least min-p times the highest; all on the same distribution.
    """
    ordered, index = weights.sort(descending=True, stable=True)
    probabilities = ordered.double() / ordered.double().sum()
    excluded = probabilities.cumsum(0) - probabilities > params.top_p
    excluded |= probabilities < probabilities[0] * params.min_p
    excluded[params.top_k :] = True
    weights[index[excluded]] = 0.0
