"""Log-probability and entropy of target tokens, without a ``[tokens, vocabulary]`` tensor.

Logits exist for one chunk of rows at a time and are recomputed in the backward pass, unless one
chunk holds all rows: then they are kept, which costs the same memory and saves a matrix product.
Callers pass only rows whose target was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CACHE_ELEMENTS = 1 << 20
"""Elements per block of element-wise work on a CPU, so that a block fits its cache."""


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """Transformation of logits between the head's matrix product and the softmax."""

    scale: float = 1.0
    """The family's factor on logits."""
    softcap: float | None = None
    """``c tanh(logit / c)``, applied after the factor."""
    temperature: float = 1.0
    """Divisor of logits, applied last."""

    def apply_(self, logits: Tensor) -> Tensor:
        """Scale float32 logits in place."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return logits if factor == 1.0 else logits.mul_(factor)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def gradient_(self, grad: Tensor, scaled: Tensor) -> Tensor:
        """Convert the gradient of scaled logits into that of raw logits, in place."""
        if self.softcap is not None:
            tanh = scaled * (self.temperature / self.softcap)
            grad.mul_(1 - tanh.square_())
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The rows of the vocabulary on this rank, if several ranks share it."""

    start: int
    rows: int
    """Number of real rows; further rows of the weight are padding."""
    group: Any
    """Group of the ranks that share the vocabulary; None: this rank holds all of it."""


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
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = hidden_RH.shape[0]
        own_VH = weight_VH if part is None else weight_VH[: part.rows]
        local_R = targets_R if part is None else targets_R - part.start
        logprobs_R = torch.empty(rows, dtype=torch.float32, device=hidden_RH.device)
        entropy_R = torch.empty_like(logprobs_R)
        log_normalizer_R = torch.empty_like(logprobs_R)
        kept: Tensor | None = None
        for start in range(0, rows, chunk):
            at = slice(start, min(start + chunk, rows))
            logits = torch.nn.functional.linear(hidden_RH[at], own_VH, bias_V)
            logits, statistics = _statistics(logits, local_R[at], scaling)
            lse, entropy_R[at], target = _combined(statistics, None if part is None else part.group)
            log_normalizer_R[at] = lse
            logprobs_R[at] = target - lse
            kept = logits if rows <= chunk else None
            del logits
        needs_grad = any(ctx.needs_input_grad[:3])
        ctx.save_for_backward(
            hidden_RH, weight_VH, bias_V, local_R, log_normalizer_R, entropy_R, kept if needs_grad else None
        )
        ctx.scaling, ctx.chunk, ctx.part = scaling, chunk, part
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, bias_V, local_R, log_normalizer_R, entropy_R, kept = ctx.saved_tensors
        rows = hidden_RH.shape[0]
        own_VH = weight_VH if ctx.part is None else weight_VH[: ctx.part.rows]
        grad_hidden = torch.empty_like(hidden_RH)
        grad_own: Tensor | None = None
        grad_bias: Tensor | None = None
        for start in range(0, rows, ctx.chunk):
            at = slice(start, min(start + ctx.chunk, rows))
            logits = kept
            if logits is None:
                logits = _raw_or_scaled(
                    torch.nn.functional.linear(hidden_RH[at], own_VH, bias_V), ctx.scaling
                )
            own_grads = tuple(None if g is None else g[at] for g in grads)
            _gradient_(logits, local_R[at], log_normalizer_R[at], entropy_R[at], own_grads, ctx.scaling)
            grad_logits = logits.to(weight_VH.dtype)
            del logits
            torch.mm(grad_logits, own_VH, out=grad_hidden[at])
            grad_own = _accumulate(grad_own, grad_logits, hidden_RH[at], rows <= ctx.chunk)
            if bias_V is not None:
                summed = grad_logits.float().sum(0)
                grad_bias = summed if grad_bias is None else grad_bias + summed
            del grad_logits  # before the next chunk's logits exist
        # Without rows the gradients are zeros, not None: ranks reduce them together.
        if bias_V is not None:
            grad_bias = torch.zeros_like(bias_V) if grad_bias is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, _as_whole(grad_own, weight_VH), grad_bias, None, None, None, None


def _statistics(logits: Tensor, targets: Tensor, scaling: LogitScaling) -> tuple[Tensor, Tensor]:
    """Return statistics of each row, ``[4, R]``, and the logits in the form the backward pass needs.

    Largest scaled logit, sum of exponentials relative to it, that sum weighted by logit minus largest, and
    the target's logit (0 if the target is not among the columns).
    """
    if logits.is_cuda:
        from orhpc.train.loss.logit_kernels import row_statistics

        return logits, row_statistics(logits, targets, scaling)
    z = logits.float()
    found = torch.empty(4, len(z), dtype=torch.float32)
    columns = z.shape[1]
    for block in _blocks(z):
        part = scaling.apply_(z[block])
        wanted = targets[block]
        here = (wanted >= 0) & (wanted < columns)
        peak = part.amax(1) if columns else part.new_full((len(part),), -torch.inf)
        shifted = part - peak[:, None]
        weights = shifted.exp()
        found[0, block] = peak
        found[1, block] = weights.sum(1)
        found[2, block] = weights.mul_(shifted).sum(1)
        chosen = part.gather(1, wanted.clamp(0, columns - 1)[:, None])[:, 0] if columns else peak
        found[3, block] = torch.where(here, chosen, torch.zeros_like(chosen))
    return z, found


def _combined(statistics: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return log of the softmax's denominator, entropy in nats, and the target's logit, over all parts."""
    peak, sums = statistics[0], statistics[1:]
    if group is not None:
        highest = peak.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        lower = (peak - highest).clamp(min=-1e30)  # a part without columns has no largest logit
        shrunk = lower.exp()
        sums = torch.stack([sums[0] * shrunk, (sums[1] + sums[0] * lower) * shrunk, sums[2]])
        dist.all_reduce(sums, group=group)
        peak = highest
    log_total = sums[0].log()
    # H = log Z - E[z], with E over the softmax; the peak drops out of the difference.
    return log_total + peak, log_total - sums[1] / sums[0], sums[2]


def _raw_or_scaled(logits: Tensor, scaling: LogitScaling) -> Tensor:
    """Return logits as :func:`_statistics` does: raw for the CUDA kernels, scaled on a CPU."""
    if logits.is_cuda:
        return logits
    z = logits.float()
    for block in _blocks(z):
        scaling.apply_(z[block])
    return z


def _gradient_(
    logits: Tensor,
    targets: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    grads: tuple[Tensor | None, ...],
    scaling: LogitScaling,
) -> None:
    """Overwrite logits with the gradient of the raw logits."""
    if logits.is_cuda:
        from orhpc.train.loss.logit_kernels import gradient_

        gradient_(logits, targets, log_normalizer, entropy, grads[0], grads[1], scaling)
        return
    for block in _blocks(logits):
        first, second = (None if g is None else g[block] for g in grads)
        _logit_gradient_(
            logits[block], targets[block], log_normalizer[block], entropy[block], first, second, scaling
        )


def _as_whole(grad_own: Tensor | None, weight_VH: Tensor) -> Tensor:
    if grad_own is not None and len(grad_own) == len(weight_VH):
        return grad_own.to(weight_VH.dtype)
    whole = torch.zeros_like(weight_VH)
    if grad_own is not None:
        whole[: len(grad_own)] = grad_own
    return whole


def _blocks(logits: Tensor) -> list[slice]:
    """Return blocks of rows that fit a CPU's cache."""
    rows, columns = logits.shape
    step = max(1, CACHE_ELEMENTS // max(1, columns))
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def _logit_gradient_(
    z: Tensor,
    targets: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    scaling: LogitScaling,
) -> None:
    """Overwrite scaled logits with the gradient of the raw logits.

    ``d logp / d z_j = [j is target] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``.
    """
    scaled = z.clone() if scaling.softcap is not None else z
    z.sub_(log_normalizer[:, None])
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
    columns = z.shape[1]
    if grad_logprob is not None and columns:
        here = (targets >= 0) & (targets < columns)
        share = torch.where(here, grad_logprob, torch.zeros_like(grad_logprob))
        z.scatter_add_(1, targets.clamp(0, columns - 1)[:, None], share[:, None])
    scaling.gradient_(z, scaled)


def _accumulate(total: Tensor | None, grad_logits: Tensor, hidden: Tensor, only_chunk: bool) -> Tensor:
    """Add one chunk's contribution to the weight's gradient; in float32 if there are several chunks."""
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
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``log softmax(scaled logits)[target]`` and the distribution's entropy, float32 ``[R]``.

    ``hidden_RH`` and ``weight_VH`` ``[V, H]`` are in the model's type; the softmax is in float32.
    ``chunk`` rows of logits exist at a time.  The entropy has a gradient only with ``entropy_gradient``.

    ``part``: each rank of a group holds a part of the vocabulary, and the whole ``hidden_RH``
    (collective).  Ranks do not exchange logits: for each row they reduce the largest logit, the
    softmax's denominator, the weighted sum for the entropy, and the target's logit.  The gradient
    of ``hidden_RH`` is then this rank's contribution; the caller sums over ranks.
    """
    logprobs_R, entropy_R = _ChunkedLogprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
        hidden_RH, weight_VH, bias_V, targets_R, scaling, chunk, part
    )
    return logprobs_R, entropy_R if entropy_gradient else entropy_R.detach()
