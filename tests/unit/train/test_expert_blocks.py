"""Blocks of experts, against the groups of ranks that SGLang makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orhpc.train.weights.expert_blocks import ExpertBlocks, blocks_of_engines


def sglang_expert_rank(tp_rank: int, tp: int, ep: int) -> int:
    """Place of a rank in its expert-parallel group, whose ranks are ``tp / ep`` apart."""
    apart = tp // ep
    groups = [list(range(first, tp, apart)) for first in range(apart)]
    (group,) = [ranks for ranks in groups if tp_rank in ranks]
    return group.index(tp_rank)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.randoms())
def test_each_rank_sends_what_sglang_keeps(ep: int, apart: int, engines: int, random: object) -> None:
    tp, experts = ep * apart, ep * 3
    ranks = list(range(tp * engines + 1))  # the last one shares its device with no engine
    mapped = ranks[:-1]
    random.shuffle(mapped)  # type: ignore[attr-defined]
    by_engine = {str(n): mapped[n * tp : (n + 1) * tp] for n in range(engines)}
    blocks = blocks_of_engines(by_engine, tp=tp, ep=ep, ranks=len(ranks))
    assert blocks.divides(experts)
    for of_engine in by_engine.values():
        for tp_rank, rank in enumerate(of_engine):
            first = sglang_expert_rank(tp_rank, tp, ep) * experts // ep
            assert blocks.experts(rank, experts) == range(first, first + experts // ep)
    assert blocks.of_rank[ranks[-1]] == 0


def test_experts_that_cannot_be_divided_are_sent_whole() -> None:
    assert not ExpertBlocks(4, (0,)).divides(6)
    assert not ExpertBlocks(4, (0,)).divides(0)
