"""Which nodes of a job take part in an attempt, which are spares, and which were lost.

The first node keeps the roster.  It begins with the nodes that joined the rendezvous, in order of rank: the
first ``placement.nodes`` take part, the others wait.  A spare takes the index of the node that it replaces,
so that trainer ranks, engines and workers keep their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orhpc.launch.node.rendezvous import NodeReady
from orhpc.plan.placement import Node


@dataclass(frozen=True, slots=True)
class Replacement:
    """A node that was lost, and the spare that takes its place."""

    index: int
    """The place, in the placement."""
    lost: NodeReady
    spare: NodeReady


class Roster:
    """The nodes of an attempt other than the first, which has index 0 and is never replaced."""

    def __init__(self, joined: Iterable[NodeReady], places: int) -> None:
        """Args:
        joined: nodes in order of rank, of which at least ``places`` have no problem.
        places: nodes that take part, without the first.
        """
        known = list(joined)
        nodes = [node for node in known if node.problem is None]
        if len(nodes) < places:
            raise ValueError(f"{len(nodes)} nodes for {places} places")
        self.placed: list[NodeReady] = nodes[:places]
        """Nodes that take part; the first of them has index 1."""
        self.spares: list[NodeReady] = nodes[places:]
        self._known = {node.rank for node in known}

    @property
    def known(self) -> int:
        """Number of nodes that have joined so far, bad and lost ones among them."""
        return len(self._known)

    def add_late(self, joined: Iterable[NodeReady]) -> list[NodeReady]:
        """Add nodes that have joined since: they become spares.  Returns them."""
        late = [node for node in joined if node.rank not in self._known and node.problem is None]
        self.spares += late
        self._known |= {node.rank for node in late}
        return late

    def is_placed(self, name: str) -> bool:
        """Whether this node takes part."""
        return any(node.name == name for node in self.placed)

    def drop_spares(self, names: Iterable[str]) -> list[NodeReady]:
        """Remove spares that were lost themselves; returns them."""
        gone = set(names)
        dropped = [node for node in self.spares if node.name in gone]
        self.spares = [node for node in self.spares if node.name not in gone]
        return dropped

    def replace(self, names: Iterable[str]) -> list[Replacement]:
        """Give the places of lost nodes to spares, all or none; ``names``: of lost spares too.

        Raises:
            ValueError: there are fewer spares that are not lost than places to fill.
        """
        gone = set(names)
        lost = [(i, node) for i, node in enumerate(self.placed) if node.name in gone]
        usable = [node for node in self.spares if node.name not in gone]
        if len(lost) > len(usable):
            raise ValueError(f"{len(usable)} spares for {len(lost)} lost nodes")
        done: list[Replacement] = []
        for (i, node), spare in zip(lost, usable, strict=False):
            self.spares.remove(spare)
            self.placed[i] = spare
            done.append(Replacement(i + 1, node, spare))
        return done

    def others(self) -> tuple[Node, ...]:
        """The nodes that take part, without the first, by index."""
        return tuple(Node(node.name, node.address, node.cpus) for node in self.placed)

    def urls(self, own: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """Base URLs of the environment servers of the nodes that take part, by environment.

        ``own``: those of the first node.
        """
        urls = {name: list(of) for name, of in own.items()}
        for node in self.placed:
            for name, more in node.environments.items():
                urls.setdefault(name, []).extend(more)
        return urls
