"""Ray's head for tests, started like a launcher does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orhpc.launch.node import processes
from orhpc.launch.node.ray_cluster import RayNode, make_token

HOST = "127.0.0.1"


@contextmanager
def running_head(folder: Path, cpus: int) -> Iterator[tuple[RayNode, str, Path]]:
    """Yields the head, its address, and the file of its token, once its raylet has joined."""
    token = make_token(folder)
    node = RayNode("n0", HOST, token, folder / "ray.log", cpus=cpus, object_store_bytes=10**8)
    try:
        node.begin_head()
        address = node.await_head()
        assert processes.wait_until(node.joined, 240)
        yield node, address, token
    finally:
        node.stop()
