"""Log-probability and entropy of target tokens where every rank holds a part of the vocabulary.

As :mod:`orhpc.train.head`, but no rank ever sees another's logits: of each row, four numbers are
agreed on (the largest logit, the softmax's denominator, the weighted sum that the entropy needs, and
the target's logit).  Logits exist for one chunk of rows at a time and are computed again in the
backward pass, unless one chunk holds all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.train.head import LogitScaling


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Which rows of the vocabulary this rank holds."""

    start: int
    rows: int
    """Real ones; what the weight holds beyond them is padding."""
    group: Any
    """Of the ranks that hold the others; None: this rank holds all."""


class _DividedLogprobs(torch.autograd.Function):
    """See :func:`divided_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        part: VocabularyPart,
        scaling: LogitScaling,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = hidden_RH.shape[0]
        logprobs_R = torch.empty(rows, dtype=torch.float32, device=hidden_RH.device)
        entropy_R, normaliser_R = torch.empty_like(logprobs_R), torch.empty_like(logprobs_R)
        kept: Tensor | None = None
        for start in range(0, rows, chunk):
            at = slice(start, min(start + chunk, rows))
            z = scaling.apply_(_logits(hidden_RH[at], weight_VH, part))
            normaliser_R[at], entropy_R[at], target_R = _statistics(z, targets_R[at] - part.start, part)
            logprobs_R[at] = target_R - normaliser_R[at]
            kept = z if rows <= chunk else None
            del z
        needed = any(ctx.needs_input_grad[:2])
        ctx.save_for_backward(
            hidden_RH, weight_VH, targets_R, normaliser_R, entropy_R, kept if needed else None
        )
        ctx.part, ctx.scaling, ctx.chunk = part, scaling, chunk
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, targets_R, normaliser_R, entropy_R, kept = ctx.saved_tensors
        rows, part = hidden_RH.shape[0], ctx.part
        grad_hidden = torch.zeros_like(hidden_RH)
        total: Tensor | None = None
        for start in range(0, rows, ctx.chunk):
            at = slice(start, min(start + ctx.chunk, rows))
            z = kept if kept is not None else ctx.scaling.apply_(_logits(hidden_RH[at], weight_VH, part))
            _gradient_(
                z, targets_R[at] - part.start, normaliser_R[at], entropy_R[at],
                *(None if g is None else g[at] for g in grads), ctx.scaling,
            )  # fmt: skip
            grad_logits = z.to(weight_VH.dtype)
            del z
            weight = weight_VH[: part.rows]
            torch.mm(grad_logits, weight, out=grad_hidden[at])
            share = grad_logits.t() @ hidden_RH[at]
            if rows > ctx.chunk:
                share = share.float()
            total = share if total is None else total.add_(share)
        grad_weight = torch.zeros_like(weight_VH)
        if total is not None:
            grad_weight[: part.rows] = total
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden_RH: Tensor, weight_VH: Tensor, part: VocabularyPart) -> Tensor:
    return torch.nn.functional.linear(hidden_RH, weight_VH[: part.rows]).float()


def _statistics(z: Tensor, targets: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the softmax's denominator, entropy in nats, and the target's logit, over all parts."""
    here = (targets >= 0) & (targets < part.rows)
    if part.rows:
        peak = z.amax(1)
        target = z.gather(1, targets.clamp(0, part.rows - 1)[:, None])[:, 0]
        target = torch.where(here, target, torch.zeros_like(target))
    else:
        peak = z.new_full((len(z),), -torch.inf)
        target = z.new_zeros(len(z))
    if part.group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=part.group)
    shifted = z - peak[:, None]
    weights = shifted.exp()
    sums = torch.stack([weights.sum(1), weights.mul_(shifted).sum(1), target])
    if part.group is not None:
        dist.all_reduce(sums, group=part.group)
    log_total = sums[0].log()
    # H = log Z - E[z], with E over the softmax; the peak drops out of the difference.
    return log_total + peak, log_total - sums[1] / sums[0], sums[2]


def _gradient_(
    z: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    scaling: LogitScaling,
) -> None:
    """Overwrite scaled logits with the gradient of the raw ones, of this rank's columns.

    ``d logp / d z_j = [j is target] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``.
    """
    scaled = z.clone() if scaling.softcap is not None else z
    z.sub_(normaliser[:, None])
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
    if grad_logprob is not None and z.shape[1]:
        here = (targets >= 0) & (targets < z.shape[1])
        share = torch.where(here, grad_logprob, torch.zeros_like(grad_logprob))
        z.scatter_add_(1, targets.clamp(0, z.shape[1] - 1)[:, None], share[:, None])
    scaling.gradient_(z, scaled)


def divided_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    part: VocabularyPart,
    *,
    scaling: LogitScaling,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return ``log softmax(scaled logits)[target]`` and the entropy, float32 ``[R]``, on every rank.

    ``hidden_RH`` is whole on every rank of the part's group and ``weight_VH`` its part of the head
    (collective).  The gradient of ``hidden_RH`` is this rank's summand: the caller adds them up.
    The entropy has a gradient only when asked for.
    """
    logprobs_R, entropy_R = _DividedLogprobs.apply(hidden_RH, weight_VH, targets_R, part, scaling, chunk)  # type: ignore[misc]
    return logprobs_R, entropy_R if entropy_gradient else entropy_R.detach()
