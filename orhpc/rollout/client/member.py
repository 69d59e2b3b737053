"""One engine of a pool, and the order in which pools prefer engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from orhpc.rollout.client.http import EngineClient


@dataclass(slots=True, eq=False)
class Member:
    """An engine as its pool sees it."""

    client: EngineClient
    load: int = 0
    """Tokens of the requests in flight from this pool to this engine."""
    down: str | None = None
    """Why the engine receives no requests; None while it does."""
    probe: asyncio.Task[None] | None = field(default=None, repr=False)


def spread(place: int) -> float:
    """Return the element of van der Corput's sequence, in [0, 1): any first places lie far apart."""
    return int(f"{place:b}"[::-1], 2) / (1 << max(1, place.bit_length()))
