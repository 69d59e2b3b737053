"""``ray start`` whose libraries are loaded before it is known what to start.

    python -m orhpc.launch.node.ray_start

Loading them takes seconds, which a node has while the others are still meeting.  One line of JSON on
standard input then says what to start: ``words`` as on the command line, ``variables`` to set first,
and ``head``, the ``host:port`` to wait for, where there is one.  The end of the input without such a
line ends this process; so does the end of the one that started it, which also bounds the wait.

``ray start`` is changed in two places, since it has no options for them: it listens on loopback where it is
told to, and a GCS that has ended is started again.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

_POLL_S = 0.05
_ANSWER_S = 1.0
_GCS_STARTS = 20
_GCS_WINDOW_S = 600.0
"""A GCS that ends more often than that within so many seconds is not started again."""


def accepts(host: str, port: int) -> bool:
    """Whether a server takes connections there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(_ANSWER_S)
        return probe.connect_ex((host, port)) == 0


def use_loopback() -> None:
    """Have Ray take a loopback address as it is, in this process.

    Ray puts the machine's own address in its place, and a Ray whose address is not 127.0.0.1 listens on all
    interfaces.
    """
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def keep_gcs_up() -> None:
    """Have ``ray start --block`` start a GCS again that has ended, instead of ending the node with it.

    What the GCS knows is on disk (``RAY_gcs_storage``, https://github.com/ray-project/enhancements/pull/64),
    and actors and driver talk to each other without it: they only have to reconnect to it.  Unauthenticated
    requests that crash it are known, so this is also what a stranger on the node can do to a run.
    """
    from ray._private import ray_constants, services
    from ray._private.node import Node

    kind = ray_constants.PROCESS_TYPE_GCS_SERVER
    dead_processes = Node.dead_processes
    ended_at: list[float] = []

    def dead_but_for_the_gcs(self: Any) -> list[Any]:
        dead = dead_processes(self)
        gcs = next((process for of, process in dead if of == kind), None)
        ended_at[:] = [at for at in ended_at if time.monotonic() - at < _GCS_WINDOW_S]
        if gcs is None or len(ended_at) == _GCS_STARTS:
            return dead
        ended_at.append(time.monotonic())
        print(f"{time.strftime('%F %T')} the GCS ended ({gcs.returncode}) and is started again", flush=True)
        again = services.start_ray_process(gcs.args, kind, fate_share=bool(self.kernel_fate_share))
        self.all_processes[kind] = [again]
        return [(of, process) for of, process in dead if process is not gcs]

    Node.dead_processes = dead_but_for_the_gcs


def main() -> None:
    from ray.scripts.scripts import main as ray

    use_loopback()
    keep_gcs_up()

    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    os.environ.update(order["variables"])
    if order["head"] is not None:
        host, _, port = order["head"].rpartition(":")
        while not accepts(host, int(port)):
            time.sleep(_POLL_S)
    sys.argv = ["ray", *order["words"]]
    ray()


if __name__ == "__main__":
    main()
