"""How the first node notices within seconds that another node is lost.

In a job with spares each other launcher listens on a port (:class:`Beacon`), and the first node connects to
it every two seconds (:class:`NodeWatch`).  A refused connection means that the launcher has ended; no answer
means that the machine or its network is off.  Nothing is sent or read, so a stranger who connects learns only
that the port is open.  SLURM takes minutes (``SlurmdTimeout``) to notice a node that has lost power, but only
SLURM knows of a node whose slurmd has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from orhpc.launch.node.rendezvous import NodeReady
from orhpc.process.ports import hold_port, start_listening

_PERIOD_S = 2.0
"""Seconds between two looks at all nodes, and for the answer of one."""
_ASK_SLURM_S = 15.0
"""Seconds between two questions to SLURM's controller."""
LEAST_S = 6.0
"""Seconds without an answer after which a node is lost."""
_LEAST_LOOKS = 3
"""Looks in a row without an answer, in addition: this node may have been suspended."""


class Beacon:
    """Accepts connections and closes them, until the launcher ends."""

    def __init__(self, address: str) -> None:
        self._socket = hold_port(address)
        self.port: int = self._socket.getsockname()[1]
        start_listening(self._socket, 16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(_PERIOD_S)  # out of descriptors: the backlog answers meanwhile

    def close(self) -> None:
        """Refuse connections from now on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)  # wakes the thread
        self._socket.close()


class Cause(StrEnum):
    """Why a node counts as lost."""

    SILENT = "does not answer"
    ENDED = "its launcher ended"
    DOWN = "SLURM shows it as down"


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that does not take part any more."""

    name: str
    cause: Cause
    since_s: float
    """Seconds since it was last known to work."""

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}"


class NodeWatch:
    """Looks at nodes in a thread, because a look at a node that is off takes seconds."""

    def __init__(self, down: Callable[[], Iterable[str]]) -> None:
        """``down``: names of the job's nodes that SLURM shows as down; may take a minute."""
        self._down = down
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeReady] = {}
        self._good: dict[str, float] = {}
        """When each node was last known to work."""
        self._failed: dict[str, tuple[int, Cause]] = {}
        """Looks in a row without an answer, and the last cause."""
        self._at_slurm: dict[str, float] = {}
        """Nodes that SLURM shows as down, since when."""
        self._over = threading.Event()

    def start(self) -> None:
        for work, period_s in ((self._look, _PERIOD_S), (self._ask_slurm, _ASK_SLURM_S)):
            threading.Thread(target=self._repeat, args=(work, period_s), daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def watch(self, nodes: Iterable[NodeReady]) -> None:
        """Watch these nodes, and no others, from now on."""
        with self._lock:
            self._nodes = {node.name: node for node in nodes}
            now = time.monotonic()
            self._good = {name: self._good.get(name, now) for name in self._nodes}
            self._failed = {name: f for name, f in self._failed.items() if name in self._nodes}

    def lost(self) -> list[Loss]:
        """The watched nodes that are lost."""
        now = time.monotonic()
        found: list[Loss] = []
        with self._lock:
            for name in self._nodes:
                looks, cause = self._failed.get(name, (0, Cause.SILENT))
                gone_s = now - self._good[name]
                if name in self._at_slurm:
                    found.append(Loss(name, Cause.DOWN, max(gone_s, now - self._at_slurm[name])))
                elif looks >= _LEAST_LOOKS and gone_s >= LEAST_S:
                    found.append(Loss(name, cause, gone_s))
        return found

    def note(self, answers: Mapping[str, Cause | None]) -> None:
        """Take over the results of one look; None: the node has answered."""
        now = time.monotonic()
        with self._lock:
            for name, cause in answers.items():
                if cause is None:
                    self._good[name] = now
                    self._failed.pop(name, None)
                else:
                    self._failed[name] = (self._failed.get(name, (0, cause))[0] + 1, cause)

    def look_now(self) -> None:
        """Look until every node has answered or is lost; for a failure whose reason may be a lost node."""
        for _ in range(_LEAST_LOOKS + 1):
            self._look()
            if not self._failed or self.lost():
                return
            time.sleep(_PERIOD_S)

    def _look(self) -> None:
        with self._lock:
            nodes = list(self._nodes.values())
        self.note(asyncio.run(_look_at(nodes)))

    def _ask_slurm(self) -> None:
        down = set(self._down())
        now = time.monotonic()
        with self._lock:
            self._at_slurm = {name: self._at_slurm.get(name, now) for name in down}

    def _repeat(self, work: Callable[[], None], period_s: float) -> None:
        while not self._over.wait(period_s):
            work()


async def _look_at(nodes: Iterable[NodeReady]) -> dict[str, Cause | None]:
    nodes = list(nodes)
    answers = await asyncio.gather(*(_answer(node.address, node.beacon) for node in nodes))
    return {node.name: answer for node, answer in zip(nodes, answers, strict=True)}


async def _answer(address: str, port: int) -> Cause | None:
    """Connect once; return what is wrong, or None."""
    try:
        async with asyncio.timeout(_PERIOD_S):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return Cause.ENDED
    except (OSError, TimeoutError):
        return Cause.SILENT
    writer.close()
    return None
