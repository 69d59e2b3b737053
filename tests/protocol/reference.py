"""What transformers computes in float32, with the experts that an engine says it took.

An engine that rounds otherwise than transformers sends a token elsewhere wherever two experts' scores nearly
tie, and from there on computes something else, rightly.  So a mixture of experts is compared under the same
experts: the engine's recorded routes are replayed in the reference's routers, which also judge them.  In the
replayed pass a router's input is what the engine's router had, but for rounding; so an expert that the
engine took and this router would not is one whose score is as good as tied with the router's own choice, or
else the engine routes wrongly, or reports wrong routes.

Written for the tests alone; a trainer does the same with orhpc.train.fsdp.routing_replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from orhpc.wire.routes import RouteArray

Routed = tuple[Tensor, Tensor, Tensor]
"""What a router returns: its scores ``[T, experts]``, and weights and experts ``[T, topk]``."""


@dataclass(frozen=True)
class Routing:
    """Experts of ``T`` tokens: the reference's own choice, and how far it is from the engine's."""

    experts_TLK: NDArray[np.int64]
    """The reference's; 0 in dense layers."""
    gaps_TL: NDArray[np.float32]
    """Logit of the best expert that the reference would take and the engine did not, less that of the worst
    that the engine took instead; 0 where both took the same, in any order."""

    def check(self, margin: float) -> None:
        """Raise AssertionError where the engine's experts are not the reference's own or within ``margin``
        of them."""
        wrong = np.argwhere(self.gaps_TL > margin)
        if len(wrong):
            token, layer = wrong[0].tolist()
            raise AssertionError(
                f"the engine's experts are not the router's in {len(wrong)} of {self.gaps_TL.size} cases, "
                f"first at token {token}, layer {layer}, where the router's own "
                f"{self.experts_TLK[token, layer].tolist()} are better by {self.gaps_TL[token, layer]:.3g} "
                f"in logits; allowed are {margin:g}"
            )


@dataclass(frozen=True)
class Scored:
    """What the reference says of ``N`` tokens after a prompt."""

    logprobs_N: NDArray[np.float64]
    best_N: NDArray[np.float64]
    """Log-probability of the likeliest token in each one's place."""
    routing: Routing


@dataclass
class Reference:
    """A model in float32, one plain forward pass a question.

    The answer to a question asked before is kept: a test asks for what another request sampled just so.
    """

    folder: Path
    device: str
    model: PreTrainedModel = field(init=False)
    _known: dict[tuple[Any, ...], Scored] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        # The plainest implementations: a GPU's others may multiply float32 with fewer bits.
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        self.model.eval().requires_grad_(False).to(self.device)  # type: ignore[arg-type]

    def score(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        temperature: float,
        routes: RouteArray | None = None,
    ) -> Scored:
        """Score ``output`` after ``prompt``, under ``routes`` ``[tokens - 1, layers, topk]`` if given."""
        assert len(output), "there is nothing to score"
        key = (*prompt, None, *output, temperature, None if routes is None else routes.tobytes())
        if key not in self._known:
            logits_NV, routing = self._forward([*prompt, *output][:-1], len(output), routes)
            logprobs_NV = torch.log_softmax(logits_NV.double() / temperature, -1)
            taken_N1 = torch.tensor(output, device=self.device)[:, None]
            self._known[key] = Scored(
                logprobs_NV.gather(1, taken_N1)[:, 0].cpu().numpy(),
                logprobs_NV.amax(-1).cpu().numpy(),
                routing,
            )
        return self._known[key]

    def routing(self, tokens: Sequence[int], routes: RouteArray | None = None) -> Routing:
        """The experts of ``tokens``, compared with ``routes`` ``[tokens, layers, topk]`` if given."""
        return self._forward(tokens, 1, routes)[1]

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], keep: int, routes: RouteArray | None) -> tuple[Tensor, Routing]:
        text = self.model.config.get_text_config()
        layers, topk = text.num_hidden_layers, getattr(text, "num_experts_per_tok", None) or 0
        routing = Routing(
            np.zeros((len(tokens), layers, topk), dtype=np.int64), np.zeros((len(tokens), layers), np.float32)
        )
        taken_TLK = None
        if routes is not None:
            assert routes.shape == routing.experts_TLK.shape, f"routes of shape {routes.shape}"
            taken_TLK = torch.from_numpy(routes.astype(np.int64)).to(self.device)
        hooks = []
        for index, layer in enumerate(self.model.model.layers):
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                hooks.append(gate.register_forward_hook(partial(_route, routing, index, taken_TLK)))
            elif routes is not None:
                assert not routes[:, index].any(), f"layer {index} is dense and has routes"
        try:
            ids = torch.tensor([list(tokens)], device=self.device)
            return self.model(input_ids=ids, logits_to_keep=keep).logits[0], routing
        finally:
            for hook in hooks:
                hook.remove()


def _route(
    routing: Routing,
    layer: int,
    taken_TLK: Tensor | None,
    gate: nn.Module,
    inputs: tuple[Tensor, ...],
    found: Routed,
) -> Routed | None:
    """Note a router's choice and, where the engine's is another, put that in its place."""
    scores, weights_TK, own_TK = found
    routing.experts_TLK[:, layer] = own_TK.cpu().numpy()
    if taken_TLK is None:
        return None
    taken_TK = taken_TLK[:, layer]
    # The router's product itself, whatever it returns as its scores.
    logits_TE = functional.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), cast(Tensor, gate.weight))
    own_TE, taken_TE = (torch.zeros_like(logits_TE).scatter_(1, i, 1.0).bool() for i in (own_TK, taken_TK))
    assert bool((taken_TE.sum(-1) == own_TK.shape[-1]).all()), f"an expert is twice in a row of layer {layer}"
    other_T = (own_TE != taken_TE).any(-1)
    left_T = logits_TE.masked_fill(~(own_TE & ~taken_TE), -torch.inf).amax(-1)
    instead_T = logits_TE.masked_fill(~(taken_TE & ~own_TE), torch.inf).amin(-1)
    gaps_T = torch.where(other_T, left_T - instead_T, torch.zeros_like(left_T))
    routing.gaps_TL[:, layer] = gaps_T.cpu().numpy()
    replayed_TK = torch.where(other_T[:, None], _weights(logits_TE, weights_TK, own_TK, taken_TK), weights_TK)
    return scores, replayed_TK, torch.where(other_T[:, None], taken_TK, own_TK)


def _weights(logits_TE: Tensor, weights_TK: Tensor, own_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """What a router of softmax scores, normalised over the chosen or not, gives ``experts_TK``.

    Its own choice and weights tell which of the two it is.
    """
    scores_TE = logits_TE.float().softmax(-1)

    def of(chosen_TK: Tensor) -> Tensor:
        scores_TK = scores_TE.gather(-1, chosen_TK)
        normalized = bool(torch.allclose(weights_TK.sum(-1), torch.ones(()).to(weights_TK)))
        return scores_TK / scores_TK.sum(-1, keepdim=True) if normalized else scores_TK

    # Another kind of router would be replayed wrongly, and choose by more than its logits.
    torch.testing.assert_close(of(own_TK), weights_TK)
    torch.testing.assert_close(logits_TE.gather(-1, own_TK), logits_TE.topk(own_TK.shape[-1]).values)
    return of(experts_TK)
