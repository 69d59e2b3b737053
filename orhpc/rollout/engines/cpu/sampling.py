"""Sampling of one token per row with counter-based random numbers.

The token at position p of a request with seed s depends only on the logits, s and p: its random numbers
come from Philox with the key (s, p).  Other requests in the batch change the logits only by rounding, and
the exponential race below then selects another token with a probability of the same magnitude.

In an exponential race over the vocabulary, the token with the smallest E_i / p_i is a sample of p, where the
E_i are exponentially distributed (Gumbel 1954 in its max form); it needs one random number per token.
Therefore two races are run: one over blocks of the vocabulary by their probability mass, one within the
winning block.  By the chain rule the result is still an exact sample of p, with some hundreds of random
numbers instead of fifty thousand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 256
"""Tokens per block."""

TOP_K_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's sampling parameters supported by this engine, validated."""

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
    """``count`` float64 exponential random numbers, determined by (seed, position)."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).standard_exponential(count)


@torch.inference_mode()
def sample(
    logits: torch.Tensor, params: list[SamplingParams], positions: list[int]
) -> tuple[list[int], list[float]]:
    """Sample one token per row of float32 ``[rows, vocabulary]`` (overwritten).

    Returns the token ids and their log-probabilities under ``softmax(logits / temperature)``, which
    is not truncated by top-p, top-k or min-p, as in SGLang.  ``positions`` are context positions of
    the new tokens.  A row with top-k 1 selects the most likely token and uses no random number.
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
    # Sums of 256 terms in float32 and of the blocks in float64 give the normalizer a precision of 1e-7.
    normalizer = blocks.sum(dim=2).double().sum(dim=1).log_()

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
    logprobs = (chosen - highest).double() - normalizer
    return tokens, logprobs.tolist()


def _truncate(weights: torch.Tensor, params: SamplingParams) -> None:
    """Set the weights of tokens excluded by top-k, top-p and min-p to 0, in place.

    The rules are SGLang's (``layers/sampler.py``): rank below k, probability mass of the more likely
    tokens at most top-p, probability at least min-p times the highest; all on the same distribution.
    """
    ordered, index = weights.sort(descending=True, stable=True)
    probabilities = ordered.double() / ordered.double().sum()
    excluded = probabilities.cumsum(0) - probabilities > params.top_p
    excluded |= probabilities < probabilities[0] * params.min_p
    excluded[params.top_k :] = True
    weights[index[excluded]] = 0.0
