"""Every device has one place; ports are below the ephemeral range."""

from __future__ import annotations

import socket

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orhpc.config import Config
from orhpc.config.base import nearest
from orhpc.config.placement import PlacementSettings
from orhpc.errors import ConfigError
from orhpc.plan.placement import Node, Placement, plan
from orhpc.process.ports import LOWEST, free_ports, hold_port, is_free


def config_of(placement: dict[str, object], tp: int) -> Config:
    return Config.model_validate(
        {"placement": placement, "engine": {"tp": tp}, "environments": {"a/b": {"serve": "letters"}}}
    )


def nodes_of(count: int) -> tuple[Node, ...]:
    return tuple(Node(f"n{i}", f"10.0.0.{i + 1}", 16) for i in range(count))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]), st.data())
def test_every_device_has_its_place(count: int, per_node: int, tp: int, data: st.DataObject) -> None:
    total = count * per_node
    engine_devices = data.draw(st.none() | st.integers(1, max(1, total - 1)))
    placement: dict[str, object] = {"nodes": count, "devices_per_node": per_node}
    if engine_devices is not None:
        assume(engine_devices < total)
        placement |= {"mode": "split", "engine_devices": engine_devices}
    assume((engine_devices or total) % tp == 0)
    placed = plan(config_of(placement, tp), nodes_of(count))
    trainers = {(t.node, t.device) for t in placed.trainers}
    engines = [
        (e.node + place // per_node, device)
        for e in placed.engines
        for place, device in enumerate(e.devices, start=e.devices[0])
    ]
    assert len(engines) == len(set(engines)) == (engine_devices or total)
    assert [t.rank for t in placed.trainers] == list(range(len(trainers)))
    if engine_devices is None:
        assert trainers == set(engines)
    else:
        assert trainers.isdisjoint(engines)
        assert len(trainers) + len(engines) == total
    assert Placement.from_yaml(placed.to_yaml()) == placed


@pytest.mark.parametrize(
    ("nodes", "engine_devices", "holders"),
    [
        (1, None, {}),
        (2, None, {0: 1, 1: 0}),
        (3, None, {0: 1, 1: 2, 2: 0}),
        (4, 4, {0: 1, 1: 0}),  # two nodes of engines
        (3, 4, {0: 1}),  # trainers on one node alone
    ],
)
def test_another_node_holds_copies_of_each_node_with_trainers(
    nodes: int, engine_devices: int | None, holders: dict[int, int]
) -> None:
    placement: dict[str, object] = {"nodes": nodes, "devices_per_node": 2}
    if engine_devices is not None:
        placement |= {"mode": "split", "engine_devices": engine_devices}
    assert plan(config_of(placement, 1), nodes_of(nodes)).copy_holders() == holders


def test_too_few_nodes_are_reported_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="4 requested, but the job has 2"):
        plan(config_of({"nodes": 4}, 4), nodes_of(2))


def test_ports_are_free_distinct_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20, "127.0.0.1", consecutive=True)
    assert ports == list(range(ports[0], ports[0] + 20))
    assert ports[0] >= LOWEST
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[3]))
        listener.listen()
        assert not is_free("127.0.0.1", ports[3])
        assert ports[3] not in free_ports(50, "127.0.0.1", seed=1)


def test_a_reserved_port_cannot_be_bound_until_it_is_released() -> None:
    held = hold_port("127.0.0.1")
    port = held.getsockname()[1]
    assert not is_free("127.0.0.1", port)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    held.close()
    assert is_free("127.0.0.1", port)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 24), st.integers(1, 24), st.integers(1, 24))
def test_the_sizes_of_engines_that_are_suggested_can_be_placed(
    nodes: int, per_node: int, trainers: int, engines: int, tp: int
) -> None:
    """And no others; the message about another one names those next to it."""
    place: dict[str, object] = {"nodes": nodes, "devices_per_node": per_node, "mode": "mixed"}
    place |= {"trainer_devices": trainers, "engine_devices": engines}
    try:
        sizes = PlacementSettings.model_validate(place).engine_sizes
    except ValidationError:
        return
    try:
        plan(config_of(place, tp), nodes_of(nodes))
    except (ConfigError, ValidationError) as error:
        assert tp not in sizes
        assert nearest(tp, sizes) in str(error)
    else:
        assert tp in sizes


def test_numbers_next_to_another_are_named_once() -> None:
    assert nearest(4, [1, 3, 6]) == "3 or 6"
    assert nearest(7, [1, 3, 6]) == "6"
    assert nearest(3, [1, 3, 6]) == "3"


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"ep": 2}])
def test_sizes_that_divide_the_trainer_ranks_are_named(sizes: dict[str, int]) -> None:
    seven = {"placement": {"devices_per_node": 7}, "environments": {"e": {"serve": "letters"}}}
    with pytest.raises(ValidationError, match="= 2 does not divide 7 trainer ranks; 1 or 7 would"):
        Config.model_validate(seven | {"train": {"backend": "megatron"}, "megatron": sizes})
