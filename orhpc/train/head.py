"""Log-probability and entropy of target tokens, without a ``[tokens, vocabulary]`` tensor.

Logits exist for one chunk of rows at a time and are computed again in the backward pass, unless one
chunk holds all rows: then they are kept, which costs the same memory and saves a matrix product.
Rows whose target nobody sampled are never sent here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CACHE_ELEMENTS = 1 << 20
"""Elements that element-wise work on a CPU takes at a time, so that they stay in its cache."""


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """What happens between the head's matrix product and the softmax."""

    scale: float = 1.0
    """The family's own factor on logits."""
    softcap: float | None = None
    """``c tanh(logit / c)``, after the factor."""
    temperature: float = 1.0
    """Logits are divided by it, last."""

    def apply_(self, logits: Tensor) -> Tensor:
        """Scale float32 logits in place."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return logits if factor == 1.0 else logits.mul_(factor)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def gradient_(self, grad: Tensor, scaled: Tensor) -> Tensor:
        """Turn the gradient of scaled logits into that of the raw ones, in place."""
        if self.softcap is not None:
            tanh = scaled * (self.temperature / self.softcap)
            grad.mul_(1 - tanh.square_())
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


class _ChunkedLogprobs(torch.autograd.Function):
    """See :func:`token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        scaling: LogitScaling,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = hidden_RH.shape[0]
        logprobs_R = torch.empty(rows, dtype=torch.float32, device=hidden_RH.device)
        entropy_R = torch.empty_like(logprobs_R)
        log_normaliser_R = torch.empty_like(logprobs_R)
        kept: Tensor | None = None
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden_RH[part], weight_VH, bias_V)
            for block in _blocks(logits, start):
                rows_of = slice(block.start, block.stop)
                z = scaling.apply_(logits[block.start - start : block.stop - start])
                lse, entropy_R[rows_of] = _normaliser_and_entropy(z)
                log_normaliser_R[rows_of] = lse
                logprobs_R[rows_of] = z.gather(1, targets_R[rows_of, None])[:, 0] - lse
            kept = logits if rows <= chunk else None
            del logits
        needs_grad = any(ctx.needs_input_grad[:3])
        ctx.save_for_backward(
            hidden_RH, weight_VH, bias_V, targets_R, log_normaliser_R, entropy_R, kept if needs_grad else None
        )
        ctx.scaling, ctx.chunk = scaling, chunk
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, bias_V, targets_R, log_normaliser_R, entropy_R, kept = ctx.saved_tensors
        rows = hidden_RH.shape[0]
        grad_hidden = torch.empty_like(hidden_RH)
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        grad_logprobs_R, grad_entropy_R = grads
        for start in range(0, rows, ctx.chunk):
            part = slice(start, min(start + ctx.chunk, rows))
            scaled = kept is not None
            logits = kept if kept is not None else _logits(hidden_RH[part], weight_VH, bias_V)
            for block in _blocks(logits, start):
                rows_of = slice(block.start, block.stop)
                z = logits[block.start - start : block.stop - start]
                _logit_gradient_(
                    z if scaled else ctx.scaling.apply_(z),
                    targets_R[rows_of],
                    log_normaliser_R[rows_of],
                    entropy_R[rows_of],
                    None if grad_logprobs_R is None else grad_logprobs_R[rows_of],
                    None if grad_entropy_R is None else grad_entropy_R[rows_of],
                    ctx.scaling,
                )
            grad_logits = logits.to(weight_VH.dtype)
            del logits
            torch.mm(grad_logits, weight_VH, out=grad_hidden[part])
            grad_weight = _accumulate(grad_weight, grad_logits, hidden_RH[part], rows <= ctx.chunk)
            if bias_V is not None:
                summed = grad_logits.float().sum(0)
                grad_bias = summed if grad_bias is None else grad_bias + summed
        # Without rows the gradients are zeros, not absent: sharded ranks reduce them together.
        grad_weight = torch.zeros_like(weight_VH) if grad_weight is None else grad_weight
        if bias_V is not None:
            grad_bias = torch.zeros_like(bias_V) if grad_bias is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight.to(weight_VH.dtype), grad_bias, None, None, None


def _logits(hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """``[rows, V]`` float32, from a product in the weights' own type as engines compute it."""
    return torch.nn.functional.linear(hidden_RH, weight_VH, bias_V).float()


def _blocks(logits: Tensor, start: int) -> list[range]:
    """Row ranges, counted from ``start``, small enough for a CPU's cache; one range on a device."""
    rows, columns = logits.shape
    step = rows if logits.is_cuda else max(1, CACHE_ELEMENTS // columns)
    return [range(start + at, start + min(at + step, rows)) for at in range(0, rows, step)]


def _normaliser_and_entropy(z: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the softmax's denominator, and the entropy in nats, of each row."""
    peak = z.amax(1, keepdim=True)
    shifted = z - peak
    weights = shifted.exp()
    total = weights.sum(1)
    # H = log Z - E[z], with E over the softmax; the peak drops out of the difference.
    entropy = total.log() - weights.mul_(shifted).sum(1) / total
    return total.log() + peak[:, 0], entropy


def _logit_gradient_(
    z: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    scaling: LogitScaling,
) -> None:
    """Overwrite scaled logits with the gradient of the raw ones.

    ``d logp / d z_j = [j is target] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``.
    """
    scaled = z.clone() if scaling.softcap is not None else z
    z.sub_(log_normaliser[:, None])
    if grad_entropy is None:
        z.exp_()
        if grad_logprob is not None:
            z.mul_(-grad_logprob[:, None])
    else:
        p = z.exp()
        z.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_logprob is not None:
            z.add_(grad_logprob[:, None])
        z.mul_(p.neg_())
    if grad_logprob is not None:
        z.scatter_add_(1, targets[:, None], grad_logprob[:, None])
    scaling.gradient_(z, scaled)


def _accumulate(total: Tensor | None, grad_logits: Tensor, hidden: Tensor, only_chunk: bool) -> Tensor:
    """Add one chunk's share of the weight's gradient; in float32 when there are several."""
    share = grad_logits.t() @ hidden
    if only_chunk:
        return share
    return share.float() if total is None else total.add_(share)


def token_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    *,
    scaling: LogitScaling,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return ``log softmax(scaled logits)[target]`` and the distribution's entropy, float32 ``[R]``.

    ``hidden_RH`` and ``weight_VH`` ``[V, H]`` are in the model's type; the softmax is in float32.
    ``chunk`` rows of logits exist at a time.  The entropy has a gradient only when asked for.
    """
    logprobs_R, entropy_R = _ChunkedLogprobs.apply(hidden_RH, weight_VH, bias_V, targets_R, scaling, chunk)  # type: ignore[misc]
    return logprobs_R, entropy_R if entropy_gradient else entropy_R.detach()
