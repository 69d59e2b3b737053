"""Tests of the comparison itself: correct results with float16 experts pass, incorrect routes fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orhpc.rollout.client import EngineClient
from orhpc.types import Generation, Sampling
from orhpc.wire.routes import RouteArray
from tests.gpu.sglang_protocol import ROUTER_MARGIN, TOLERANCE

from .conftest import CONTEXT, Server, prompt_of
from .faulty_engine import FaultyEngine, Report, Routed, RouterFault, serving
from .tiny_models import make_folder, moe_config

LAYER = 1
"""The first layer whose router sees experts' outputs; not the last, so that later layers see its changes."""


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FaultyEngine, Server]]:
    if request.config.getoption("--engine-url"):
        pytest.skip("about the comparison, not about the server")
    # Every layer is sparse, since SGLang's Qwen3-MoE treats all layers as sparse.
    folder = make_folder(moe_config(()), tmp_path_factory.mktemp("half") / "moe", 0)
    engine = FaultyEngine(folder, CONTEXT)
    with serving(engine) as url:
        yield engine, Server(
            url, None, folder, None, own=False, moe=True, context=CONTEXT,
            tolerance=TOLERANCE["tiny moe"], router_margin=ROUTER_MARGIN, device="cpu",
        )  # fmt: skip


@pytest.fixture
def engine(served: tuple[FaultyEngine, Server]) -> Iterator[FaultyEngine]:
    yield served[0]
    served[0].report = served[0].router = None


@pytest.fixture
def half(engine: FaultyEngine, served: tuple[FaultyEngine, Server]) -> Server:
    return served[1]


def nearest_to_a_tie(server: Server, count: int, of: int = 4000) -> list[list[int]]:
    """The prompts with the smallest score difference between the last chosen expert and the next one."""
    model = server.reference().model
    prompts = [prompt_of(20, 1000 + i) for i in range(of)]
    gaps: list[Tensor] = []

    def keep(gate: nn.Module, inputs: tuple[Tensor], _out: object) -> None:
        best = functional.linear(inputs[0], gate.weight).topk(3).values  # type: ignore[arg-type]
        gaps.append((best[:, 1] - best[:, 2]).view(-1, 20).amin(-1))

    hook = model.model.layers[LAYER].mlp.gate.register_forward_hook(keep)
    with torch.no_grad():
        for part in torch.tensor(prompts).split(500):
            model(input_ids=part, logits_to_keep=1)
    hook.remove()
    return [prompts[i] for i in torch.cat(gaps).argsort()[:count].tolist()]


def answers(server: Server, prompts: list[list[int]]) -> list[Generation]:
    async def all_of_them(client: EngineClient) -> list[Generation]:
        jobs = [
            client.generate(p, Sampling(max_new_tokens=6, seed=i), rid=f"half{i}")
            for i, p in enumerate(prompts)
        ]
        return await asyncio.gather(*jobs)

    return server.use(all_of_them)


def test_near_ties_go_either_way(half: Server) -> None:
    """At near ties, the reference differs a lot with its own experts, and never with the engine's experts."""
    prompts = nearest_to_a_tie(half, 16)
    exchanged, off = [], []
    for prompt, got in zip(prompts, answers(half, prompts), strict=True):
        scored = half.assert_logprobs(got, prompt)
        exchanged.append(bool(scored.routing.gaps_TL.any()))
        off.append(float(np.abs(half.other_logprobs(prompt, got) - got.logprobs_N).max()))
    assert any(exchanged)
    assert max(off) > 2 * half.tolerance


def another_expert(routes: RouteArray) -> RouteArray:
    """Replace one expert of one token, in every layer, by one that was not chosen."""
    routes = routes.copy()
    for taken in routes[7]:
        taken[0] = next(e for e in range(8) if e not in taken)
    return routes


def one_expert_twice(routes: RouteArray) -> RouteArray:
    routes = routes.copy()
    routes[3, LAYER] = routes[3, LAYER, 0]
    return routes


WRONG_REPORTS: dict[str, tuple[Report, str]] = {
    "the next token's": (lambda routes: np.roll(routes, -1, axis=0), "not the router's"),
    "the last token's": (lambda routes: np.roll(routes, 1, axis=0), "not the router's"),
    "the next layer's": (lambda routes: np.roll(routes, -1, axis=1), "not the router's"),
    "one other expert": (another_expert, r"in [1-3] of 75 cases.*token 7"),
    "one expert twice": (one_expert_twice, "twice in a row of layer 1"),
}


@pytest.mark.parametrize("name", WRONG_REPORTS)
def test_wrong_routes_are_found(engine: FaultyEngine, half: Server, name: str) -> None:
    prompt = prompt_of(20, 70)
    engine.report, output = WRONG_REPORTS[name]
    (got,) = answers(half, [prompt])
    assert got.routes is not None and got.routes.shape[0] == 25
    with pytest.raises(AssertionError, match=output):
        half.assert_logprobs(got, prompt)
    with pytest.raises(AssertionError, match=output):
        half.assert_routes(got.routes, [*prompt, *got.tokens_N.tolist()])


def third_best(layer: int, found: Routed) -> Routed:
    """A router that uses its third best expert as the second, with the correct weight, and records it."""
    scores, _, experts_TK = found
    if layer != LAYER:
        return found
    taken_TK = scores.topk(3).indices[:, ::2]
    assert taken_TK.shape == experts_TK.shape
    return scores, scores.softmax(-1).gather(-1, taken_TK), taken_TK


def equal_weights(layer: int, found: Routed) -> Routed:
    """The last layer's router chooses the correct experts but weights them incorrectly."""
    scores, weights_TK, experts_TK = found
    if layer != 2:
        return found
    return scores, torch.full_like(weights_TK, 0.5), experts_TK


@pytest.mark.parametrize(
    ("fault", "output"),
    [(third_best, "not the router's"), (equal_weights, "Not equal to tolerance")],
    ids=["experts", "weights"],
)
def test_wrong_routing_is_found(engine: FaultyEngine, half: Server, fault: RouterFault, output: str) -> None:
    prompt = prompt_of(20, 71)
    engine.router = fault
    half.post("/flush_cache")
    (got,) = answers(half, [prompt])
    half.post("/flush_cache")
    with pytest.raises(AssertionError, match=output):
        half.assert_logprobs(got, prompt)
    if fault is third_best:  # the replay follows it, so that only the margin reveals it
        replace(half, router_margin=float("inf")).assert_logprobs(got, prompt)
