"""Parts of a Megatron trainer that can be tested without ranks: padding, refusals, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from orhpc.config import Config
from orhpc.errors import ConfigError, ModelError
from orhpc.launch.checks import fit
from orhpc.models import shape_of
from orhpc.plan.activations import layer_activations
from orhpc.plan.layout import Layout
from orhpc.plan.memory import Demand, trainer_memory
from orhpc.train.megatron.model_config import Build, build_of, spans
from orhpc.train.megatron.packing import own_slots, padded_places
from tests.model_configs import REAL, TINY
from tests.trainer_kit import make_config


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 16]),
)
def test_padding_keeps_every_token_once_and_gives_ranks_equal_shares(
    lengths: list[int], tp: int, cp: int, multiple: int
) -> None:
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    places, bounds = padded_places(cu, tp=tp, cp=cp, multiple=multiple)
    assert [p for p in places.tolist() if p >= 0] == list(range(sum(lengths)))
    assert len(places) == bounds[-1] and len(places) % (tp * cp * multiple) == 0
    assert all(size % (2 * cp if cp > 1 else 1) == 0 for size in np.diff(bounds))
    # Every sequence has its own run of slots, so that positions count from 0.
    assert [int(places[b]) for b in bounds[: len(lengths)]] == cu[:-1].tolist()
    shares = [own_slots(bounds, cp, rank) for rank in range(cp)]
    assert {len(share) for share in shares} == {len(places) // cp}
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(places)))


@pytest.mark.parametrize(
    ("megatron", "said"),
    [
        ({"tp": 4, "etp": 1}, None),
        ({"tp": 8}, "tp = 8 does not divide 12 attention heads"),
        ({"pp": 8}, "pp = 8 stages are more than 3 layers"),
        ({"ep": 8}, "the model has no experts"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_a_node_is_asked_for(
    megatron: dict[str, int], said: str | None, tmp_path: Path
) -> None:
    content = {**TINY["llama"], "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "placement": {"devices_per_node": 8},
            "environments": {"a/b": {"serve": "letters"}},
            "train": {"backend": "megatron"},
            "megatron": megatron,
        }
    )
    if said is None:
        fit.check(config)
        return
    with pytest.raises(ConfigError, match=said):
        fit.check(config)


def build(name: str, **changes: Any) -> Build:
    content = TINY[name] | changes
    return build_of(AutoConfig.for_model(**content), shape_of(content))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepseek-v32", {}, "cannot build deepseek_v32: sparse attention with an indexer"),
        ("gemma3-images", {}, r"cannot build gemma3: it also sees images; .* \(gemma3_text\) can be built"),
        ("llama4", {}, "cannot build llama4_text with 2 experts per token"),
        ("gemma2", {"use_bidirectional_attention": True}, "cannot build gemma2: its attention is not causal"),
        ("llama", {"rope_scaling": {"rope_type": "su"}}, "not know rotary positions of kind 'su'"),
    ],
)
def test_what_megatron_core_cannot_build_is_named(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "cp", "longest", "said"),
    [
        ("llama4", {"num_experts_per_tok": 1}, 2, 9, "chunks of 8 tokens .*max_total_tokens is 9"),
        ("llama4", {"num_experts_per_tok": 1}, 2, 8, None),
        ("llama4", {"num_experts_per_tok": 1}, 1, 9, None),
        ("gemma3", {}, 2, 9, "sliding window cannot be divided"),
        ("gemma2", {}, 2, 9, None),
    ],
)
def test_context_parallelism_is_refused_where_attention_does_not_see_everything(
    name: str, changes: dict[str, Any], cp: int, longest: int, said: str | None
) -> None:
    config = make_config(ranks=2, train={"backend": "megatron"})
    rollout = config.rollout.model_copy(update={"max_total_tokens": longest})
    settings = config.megatron.model_copy(update={"cp": cp})
    config = config.model_copy(update={"rollout": rollout, "megatron": settings})
    built = build(name, **changes)
    if said is None:
        assert bool(spans(built, config)) == (name == "gemma2")
        return
    with pytest.raises(ConfigError, match=said):
        spans(built, config)


def test_fp8_is_refused_where_it_would_be_ignored() -> None:
    with pytest.raises(ValueError, match="fp8"):
        Config.model_validate(
            {
                "precision": "fp8",
                "placement": {"device": "cpu", "devices_per_node": 1},
                "engine": {"backend": "cpu", "tp": 1},
                "environments": {"a/b": {"serve": "letters"}},
                "train": {"backend": "megatron"},
            }
        )


def test_the_head_and_a_recomputed_layer_are_never_there_at_once() -> None:
    shape = shape_of(REAL["Qwen3-8B"][0])
    for rows in (8192, 512):
        kept = Demand(8192, 2, "none", rows, False)
        recomputed = Demand(8192, 2, "full", rows, False)
        head = trainer_memory(shape, Layout(1), kept).head
        logits = 2 * rows * shape.vocabulary
        summed = 2 if rows == 8192 else 6
        assert head == logits + summed * shape.vocabulary * shape.hidden
        both = trainer_memory(shape, Layout(1), recomputed)
        layer = 8192 * layer_activations(shape, 0, 2, "fused")
        inputs = 8192 * len(shape.layers) * 2 * shape.hidden
        assert both.activations + both.head == inputs + max(layer, head)
        halves = trainer_memory(shape, Layout(2, tp=2), kept)
        assert halves.head == head // 2


def test_stages_hold_as_many_micro_batches_as_are_ahead_and_recompute_one_layer() -> None:
    shape = shape_of(REAL["Qwen3-8B"][0])
    demand = Demand(4096, 2, "full", 4096, False, micro_batches=16)
    memory = trainer_memory(shape, Layout(4, pp=4), demand)
    layer = 4096 * layer_activations(shape, 0, 2, "fused")
    inputs = 4096 * (len(shape.layers) // 4) * 2 * shape.hidden
    assert memory.activations in {waiting * inputs + layer for waiting in (1, 2, 3, 4)}


def test_what_the_host_keeps_of_the_optimizer_is_not_on_the_device() -> None:
    shape = shape_of(REAL["Qwen3-8B"][0])
    whole = trainer_memory(shape, Layout(1), Demand(8192, 2, "full", 8192, False))
    half = trainer_memory(shape, Layout(1), Demand(8192, 2, "full", 8192, False, offloaded=0.5))
    assert half.optimizer == whole.optimizer // 2
    assert half.weights == whole.weights
