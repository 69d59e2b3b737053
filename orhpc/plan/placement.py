"""Placement: from a config and the available nodes to ranks, engines and their devices.

:func:`plan` is pure: the same nodes give the same placement, without side effects.  The node that starts a
part adds its addresses and ports, in ``attempts/NNN/placement.yaml``.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from orhpc.config import Config
from orhpc.config.base import nearest
from orhpc.errors import ConfigError
from orhpc.plan.workers import workers_per_node


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the job."""

    name: str
    address: str
    """Private address at which the other nodes reach it."""
    cpus: int
    """CPU cores of the job on this node."""


def local_node() -> Node:
    """Return this machine as the only node; everything binds loopback."""
    return Node(name="localhost", address="127.0.0.1", cpus=len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """One trainer rank."""

    rank: int
    node: int
    device: int
    """Device index on the node."""
    threads: int
    """CPU threads for its kernels."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """One inference engine."""

    index: int
    node: int
    """Node of its first device; an engine over several nodes also uses the following ones."""
    devices: tuple[int, ...]
    """Device indices, node by node."""
    threads: int
    span: int = 1
    """Number of nodes, each with the same number of its devices."""
    shared: bool = False
    """Whether trainers use its devices too, in turns."""

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(range(self.node, self.node + self.span))

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Return (node, device) of each of its ranks."""
        per_node = len(self.devices) // self.span
        return [(self.node + i // per_node, device) for i, device in enumerate(self.devices)]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One rollout worker."""

    index: int
    node: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of an attempt."""

    nodes: tuple[Node, ...]
    trainers: tuple[TrainerPlace, ...]
    engines: tuple[EnginePlace, ...]
    workers: tuple[WorkerPlace, ...]
    environments: dict[str, list[str]] = field(default_factory=dict)
    """URLs of the servers that the job runs, by environment."""
    ray_address: str = ""

    def processes_on(self, node: int) -> int:
        """Return the number of trainer, engine and worker processes on a node."""
        return sum(p.node == node for p in (*self.trainers, *self.engines, *self.workers))

    def copy_holders(self) -> dict[int, int]:
        """Return, for each node with trainers, the node that holds copies of their state for it.

        A ring over these nodes; if there is only one, the next node of the job; empty on a single node.
        """
        nodes = sorted({t.node for t in self.trainers})
        if len(nodes) > 1:
            return dict(zip(nodes, nodes[1:] + nodes[:1], strict=True))
        return {n: (n + 1) % len(self.nodes) for n in nodes if len(self.nodes) > 1}

    def environments_of(self, worker: int) -> dict[str, str]:
        """Return a worker's servers, on its own node and evenly distributed; its sessions stay on them."""
        address = self.nodes[self.workers[worker].node].address
        host = f"//[{address}]:" if ":" in address else f"//{address}:"
        near = {name: [u for u in urls if host in u] for name, urls in self.environments.items()}
        return {name: urls[worker % len(urls)] for name, urls in near.items()}

    def to_yaml(self) -> str:
        return yaml.safe_dump(_plain(asdict(self)), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Placement:
        raw = yaml.safe_load(text)
        return cls(
            nodes=tuple(Node(**n) for n in raw["nodes"]),
            trainers=tuple(TrainerPlace(**t) for t in raw["trainers"]),
            engines=tuple(EnginePlace(**{**e, "devices": tuple(e["devices"])}) for e in raw["engines"]),
            workers=tuple(WorkerPlace(**w) for w in raw["workers"]),
            environments=raw["environments"],
            ray_address=raw["ray_address"],
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def plan(config: Config, nodes: tuple[Node, ...]) -> Placement:
    """Place trainers, engines and workers on nodes.

    Trainers get the first devices and engines the last, so that each side fills whole nodes where
    possible.

    Raises:
        ConfigError: the config needs more nodes than are available, or an engine would span
            nodes that it does not fill.
    """
    p = config.placement
    if len(nodes) < p.nodes:
        raise ConfigError(f"placement.nodes: {p.nodes} requested, but the job has {len(nodes)}")
    nodes = nodes[: p.nodes]
    per_node = p.devices_per_node
    replay = config.train.replay_rollouts is not None
    engine_devices = 0 if replay else p.rollout_devices
    first = p.devices - p.rollout_devices
    tp = config.engine.tp
    if engine_devices and (per_node % tp if tp < per_node else tp % per_node or first % per_node):
        raise ConfigError(
            f"engine.tp: engines of {tp} GPUs do not divide a node's {per_node} devices, but of "
            f"{nearest(tp, p.engine_sizes)}"
        )
    engines: list[EnginePlace] = []
    for index in range(engine_devices // tp):
        slots = range(first + index * tp, first + (index + 1) * tp)
        threads = config.engine.threads or max(1, nodes[slots[0] // per_node].cpus // max(1, per_node // tp))
        node, span = slots[0] // per_node, max(1, tp // per_node)
        devices = tuple(s % per_node for s in slots)
        engines.append(EnginePlace(index, node, devices, threads, span, slots[-1] < p.trainer_ranks))
    trainers = [
        TrainerPlace(
            rank,
            rank // per_node,
            rank % per_node,
            config.train.threads or max(1, nodes[rank // per_node].cpus // min(per_node, p.trainer_ranks)),
        )
        for rank in range(p.trainer_ranks)
    ]
    own_workers = workers_per_node(config, min(node.cpus for node in nodes))
    workers = [WorkerPlace(i, i // own_workers) for i in range(0 if replay else own_workers * len(nodes))]
    return Placement(nodes, tuple(trainers), tuple(engines), tuple(workers))
