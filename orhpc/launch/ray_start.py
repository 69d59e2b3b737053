"""``ray start`` whose libraries are loaded before it is known what to start.

    python -m orhpc.launch.ray_start

Loading them takes seconds, which a node has while the others are still meeting.  One line of JSON on
standard input then says what to start: ``words`` as on the command line, ``variables`` to set first,
and ``head``, the ``host:port`` to wait for, where there is one.  The end of the input without such a
line ends this process; so does the end of the one that started it, which also bounds the wait.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

_POLL_S = 0.05
_ANSWER_S = 1.0


def accepts(host: str, port: int) -> bool:
    """Whether a server takes connections there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(_ANSWER_S)
        return probe.connect_ex((host, port)) == 0


def main() -> None:
    from ray.scripts.scripts import main as ray

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
