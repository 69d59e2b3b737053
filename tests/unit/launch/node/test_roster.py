"""The roster: which spare takes whose place."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.launch.node.roster import Roster
from orhpc.plan.placement import Node, plan
from tests.unit.launch.node.nodes import names, ready


def test_a_spare_takes_the_index_of_the_node_that_it_replaces() -> None:
    roster = Roster([ready(rank) for rank in (1, 2, 3, 4, 5)], 3)
    assert (names(roster.placed), names(roster.spares)) == (["n1", "n2", "n3"], ["n4", "n5"])
    (done,) = roster.replace({"n2"})
    assert (done.index, done.lost.name, done.spare.name) == (2, "n2", "n4")
    assert (names(roster.placed), names(roster.spares)) == (["n1", "n4", "n3"], ["n5"])
    assert roster.urls({"e": ["http://own:1"]}) == {
        "e": ["http://own:1", "http://10.0.0.1:1", "http://10.0.0.4:1", "http://10.0.0.3:1"]
    }


def test_places_are_filled_all_or_none_and_not_by_lost_spares() -> None:
    roster = Roster([ready(rank) for rank in (1, 2, 3, 4)], 2)
    with pytest.raises(ValueError, match="1 spares for 2 lost nodes"):
        roster.replace({"n1", "n2", "n3"})
    assert (names(roster.placed), names(roster.spares)) == (["n1", "n2"], ["n3", "n4"])
    assert [one.spare.name for one in roster.replace({"n1", "n3"})] == ["n4"]


def test_bad_nodes_take_no_place_and_late_ones_become_spares() -> None:
    roster = Roster([ready(1, "its GPU fell off the bus"), ready(2), ready(4)], 2)
    assert (names(roster.placed), roster.spares) == (["n2", "n4"], [])
    assert names(roster.add_late([ready(rank) for rank in (2, 3, 4)])) == ["n3"]
    assert roster.add_late([ready(1), ready(3)]) == []
    assert names(roster.spares) == ["n3"]
    with pytest.raises(ValueError, match="1 nodes for 2 places"):
        Roster([ready(1), ready(2, "bad")], 2)


def test_ranks_keep_their_numbers_when_a_node_is_replaced() -> None:
    config = load_config(Path("configs/tiny.yaml"), ["placement.nodes=3"])
    roster = Roster([ready(rank) for rank in (1, 2, 3)], 2)
    first = Node("n0", "10.0.0.0", 4)
    before = plan(config, (first, *roster.others()))
    roster.replace({"n1"})
    after = plan(config, (first, *roster.others()))
    assert (after.trainers, after.engines, after.workers) == (before.trainers, before.engines, before.workers)
    assert [node.name for node in after.nodes] == ["n0", "n3", "n2"]
