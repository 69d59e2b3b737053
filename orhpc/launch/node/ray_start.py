"""``ray start`` that imports its libraries before it receives its arguments.

    python -m orhpc.launch.node.ray_start

The imports take seconds, during which the nodes can rendezvous.  Then one line of JSON on standard input
gives the ``arguments`` of the command line, ``variables`` to set first, and ``head``, the ``host:port`` to
wait for, or null.  The process exits if the input ends without such a line, or when the process that started
it ends, which also limits the wait.

``ray start`` is patched in six ways for which it has no options: it accepts a loopback address, a GCS that
has ended is restarted, two servers that no run uses are not started, nothing waits for two others, commands
that no run uses are not imported, and a node has more than 30 s to start.
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
_NODE_S = 300.0
"""How long the processes of a node may take until its GCS answers that it has joined."""
_GCS_STARTS = 20
_GCS_WINDOW_S = 600.0
"""A GCS that ends more than ``_GCS_STARTS`` times within ``_GCS_WINDOW_S`` seconds is not restarted."""


def accepts(host: str, port: int) -> bool:
    """Whether a server accepts connections at this address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(_ANSWER_S)
        return probe.connect_ex((host, port)) == 0


def use_loopback() -> None:
    """Have Ray in this process use a loopback address unchanged.

    Ray would replace it by the machine's own address, and with an address other than 127.0.0.1 it listens on
    all interfaces.
    """
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def keep_gcs_up() -> None:
    """Have ``ray start --block`` restart a GCS that has ended, instead of ending the node with it.

    The state of the GCS is on disk (``RAY_gcs_storage``,
    https://github.com/ray-project/enhancements/pull/64),
    and actors and driver communicate without it; they only have to reconnect.  Unauthenticated requests that
    crash the GCS are known, so other users of the node could otherwise end a run.
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
        print(f"{time.strftime('%F %T')} the GCS ended ({gcs.returncode}) and is restarted", flush=True)
        again = services.start_ray_process(gcs.args, kind, fate_share=bool(self.kernel_fate_share))
        self.all_processes[kind] = [again]
        return [(of, process) for of, process in dead if process is not gcs]

    Node.dead_processes = dead_but_for_the_gcs


def start_no_unused_servers() -> None:
    """Have ``ray start --head`` start neither the server for Ray clients nor the dashboard's process.

    ``--include-dashboard false`` starts the latter nevertheless, with fewer modules.  Each costs seconds of
    processor time at every start, and a port that strangers can reach.
    """
    from ray._private.node import Node

    def not_started(self: Any, **_: Any) -> None:
        """Nothing reads what the method would have noted: the dashboard's address and the process."""

    Node.start_ray_client_server = not_started
    Node.start_api_server = not_started


def wait_for_no_agent_ports() -> None:
    """Have a node not wait for the servers of its dashboard agent, which no run uses.

    The node's raylet would wait 15 s for the agent to note their ports in files, and end without them
    (https://github.com/ray-project/ray/issues/65983): too short for imports from a slow filesystem or with
    too few processors.  The port -1 says that there is no such server.
    """
    import ray._raylet
    from ray._private.node import Node

    raylet: Any = ray._raylet  # compiled, without types
    found = (
        getattr(raylet, f"{name}_PORT_NAME", None) for name in ("METRICS_AGENT", "DASHBOARD_AGENT_LISTEN")
    )
    names = [name for name in found if name is not None]  # a later release may have none, and wait for none
    start_raylet = Node.start_raylet

    def start_with_ports(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in names:
            raylet.persist_port(self._session_dir, self._node_id, name, -1)
        start_raylet(self, *args, **kwargs)

    Node.start_raylet = start_with_ports


def leave_out_commands() -> None:
    """Have ``ray`` import no commands but its main ones; call it before they are imported.

    It adds those of Ray Serve, of jobs and of the state API if they can be imported.  Their libraries are
    three quarters of the processor time of its imports.
    """
    for module in ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli"):
        sys.modules[module] = None  # type: ignore[assignment] # "cannot be imported"


def wait_for_slow_nodes() -> None:
    """Have ``ray start`` wait for :data:`_NODE_S` until its node has joined, while all its processes live.

    It would give up after 30 s or one request of 30 s, which too few processors for the node's other work, or
    a slow filesystem, can exceed.
    """
    from ray._private import services
    from ray._private.node import Node

    get_node, start_processes = services.get_node, Node.start_ray_processes
    starting: list[Any] = []

    def start_and_note(self: Any) -> None:
        start_processes(self)
        starting.append(self)

    def get_node_when_joined(gcs_address: Any, node_id: Any) -> Any:
        end = time.monotonic() + _NODE_S
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > end or any(node.dead_processes() for node in starting):
                    raise
            time.sleep(_POLL_S)

    Node.start_ray_processes = start_and_note
    services.get_node = get_node_when_joined


def main() -> None:
    leave_out_commands()
    from ray.scripts.scripts import main as ray

    use_loopback()
    keep_gcs_up()
    start_no_unused_servers()
    wait_for_no_agent_ports()
    wait_for_slow_nodes()

    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    os.environ.update(order["variables"])
    if order["head"] is not None:
        host, _, port = order["head"].rpartition(":")
        while not accepts(host, int(port)):
            time.sleep(_POLL_S)
    sys.argv = ["ray", *order["arguments"]]
    ray()


if __name__ == "__main__":
    main()
