"""Which layers' expert routes each stage of the trainers' pipeline needs."""

from __future__ import annotations

from orhpc.config import Config
from orhpc.config.megatron import RankPlace
from orhpc.models import read_shape
from orhpc.plan.memory import stage_layers
from orhpc.wire.routes import RouteShare


def route_layers(config: Config, model_dir: str) -> list[list[int]]:
    """The layers of every stage, ascending; a trainer without a pipeline is one stage of all.

    Raises ModelError when the model's folder cannot be read.
    """
    m = config.megatron
    shape = read_shape(model_dir)
    pipelined = config.train.backend == "megatron"
    cuts = stage_layers(shape, m.pp, m.vpp) if pipelined else stage_layers(shape, 1, 1)
    return [sorted(layers) for layers in cuts]


def route_share(config: Config, model_dir: str, rank: int, ranks: int) -> RouteShare | None:
    """What one trainer rank fetches of every rollout's expert routes; null: none."""
    if not config.routes_wanted:
        return None
    by_stage = route_layers(config, model_dir)
    if len(by_stage) == 1:
        return RouteShare()
    stage = RankPlace.of(rank, ranks, config.megatron).pp
    return RouteShare(stage, tuple(by_stage[stage]))
