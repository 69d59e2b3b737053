"""Nodes that have joined a rendezvous."""

from __future__ import annotations

from collections.abc import Iterable

from orhpc.launch.node.rendezvous import NodeReady


def ready(rank: int, problem: str | None = None, port: int = 0) -> NodeReady:
    urls = {"e": [f"http://10.0.0.{rank}:1"]}
    return NodeReady(rank, f"n{rank}", f"10.0.0.{rank}", 4, urls, beacon=port, problem=problem)


def names(nodes: Iterable[NodeReady]) -> list[str]:
    return [node.name for node in nodes]
