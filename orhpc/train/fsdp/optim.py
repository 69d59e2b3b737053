"""AdamW over float32 master weights: schedule, global-norm clipping, collective check for NaN and inf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orhpc.errors import NonFinite
from orhpc.train.learning_rate import learning_rate
from orhpc.train.stopping import agree

if TYPE_CHECKING:
    from orhpc.config import TrainSettings


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    return to_local() if to_local is not None else detached


class Optimizer:
    """AdamW on this rank's shards.

    It works on the plain local tensors of the sharded parameters, so that the same fused kernel
    runs with and without sharding.  Weight decay applies to matrices, not to biases and norms.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainSettings) -> None:
        self.settings = settings
        self.steps = 0
        self.schedule_start = 0
        """Steps of another run whose state was loaded: the learning rate's schedule begins after them."""
        self.intact = True
        """Whether the state is that after :attr:`steps` steps; False during a step and after a failed one."""
        self._parameters = dict(parameters)
        self._locals = {name: nn.Parameter(local(p)) for name, p in self._parameters.items()}
        # A rank may hold no rows of a small parameter.
        held = {name: p for name, p in self._locals.items() if p.numel()}
        decayed = [p for p in held.values() if p.ndim > 1]
        plain = [p for p in held.values() if p.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            fused=True,
        )
        for p in held.values():
            self._adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def local_state(self, name: str) -> dict[str, Tensor]:
        """Return the parameter's shard and both moments, by reference; empty if this rank holds no rows."""
        parameter = self._locals[name]
        if not parameter.numel():
            empty = parameter.detach()
            return {"model": empty, "exp_avg": empty, "exp_avg_sq": empty}
        state = self._adamw.state[parameter]
        return {"model": parameter.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def set_steps(self, steps: int) -> None:
        """Continue after ``steps`` steps, with the state that was written into :meth:`local_state`.

        Sets Adam's bias correction too.
        """
        self.steps, self.intact = steps, True
        for state in self._adamw.state.values():
            state["step"].fill_(float(steps))

    def clear(self) -> None:
        """Drop all gradients."""
        for p in self._parameters.values():
            p.grad = None
        for p in self._locals.values():
            p.grad = None

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Clip and step; return the global gradient norm before clipping and the learning rate.

        ``loss`` is this rank's sum.  One all-reduce carries both the squared norm and the
        losses, so all ranks reach the same decision before any has stepped.  Raises
        :class:`~orhpc.errors.NonFinite` on all of them when either is NaN or infinite.
        """
        for name, p in self._parameters.items():
            self._locals[name].grad = None if p.grad is None else local(p.grad)
        gradients = [p.grad for p in self._locals.values() if p.grad is not None and p.grad.numel()]
        verdict = torch.zeros(2, dtype=torch.float64)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients)).double()  # pyright: ignore[reportPrivateImportUsage]
            verdict[0] = norms.square().sum().cpu()
        verdict[1] = loss.detach().double().cpu()
        agree(verdict)
        if not bool(verdict.isfinite().all()):
            self.clear()
            raise NonFinite(
                f"optimizer step {self.steps}: loss {float(verdict[1]):.4g}, "
                f"gradient norm {math.sqrt(float(verdict[0])):.4g}; no rank has stepped"
            )
        norm = math.sqrt(float(verdict[0]))
        if norm > self.settings.max_grad_norm:
            factor = self.settings.max_grad_norm / norm
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        lr = learning_rate(self.settings, self.steps - self.schedule_start)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self.intact = False
        self._adamw.step()
        self.steps += 1
        self.intact = True
        self.clear()
        return norm, lr

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the optimizer state on the device."""
        return [t for state in self._adamw.state.values() for t in state.values()]
