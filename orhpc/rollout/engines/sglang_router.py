"""``python -m orhpc.rollout.engines.sglang_router``: sglang-router in front of the engines; hides its key.

Each worker knows only its own requests; the router sees all requests, sends a new rollout to the engine
with the fewest, and its later turns to the same engine (policy ``manual``, by the header
``X-SMG-Routing-Key``).  Release 0.3 drops the request fields for expert routes, so runs that record routes
do not use it.

It cannot listen on an inherited socket.  Its port is therefore released just before it starts, and its
address is published only after a check that the router itself listens there.  A remaining risk: if the
router ends during a run, another user who immediately takes its port receives the engines' key.  Without
the key, the router answers only health requests and requests for its engines' metrics.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orhpc.config import Config
from orhpc.errors import EXIT_CONFIG, ConfigError
from orhpc.process.ports import free_ports
from orhpc.process.secrets import read_engine_key
from orhpc.process.terminal import protect_server
from orhpc.rollout.engines.process import ServerProcess
from orhpc.rollout.engines.sglang_server import end_with_parent

PACKAGE = "sglang_router"
_LOOPBACK = "127.0.0.1"


def router_wanted(config: Config, engines: int) -> bool:
    """Whether to use a router: ``engine.router``, by default if it is installed and useful.

    Raises ConfigError when it is requested but not installed.
    """
    asked = config.engine.router
    if asked is False or engines < 2 or config.rollout.record_routes:
        return False
    if asked is None and config.engine.backend == "cpu":
        return False
    installed = importlib.util.find_spec(PACKAGE) is not None
    if asked and not installed:
        raise ConfigError("engine.router: sglang-router is not installed here; pip install sglang-router")
    return installed


class RouterProcess(ServerProcess):
    """The router process for these engines (URLs), listening on ``host:port``."""

    what = "router"
    inherits = False

    def __init__(
        self, urls: Sequence[str], host: str, port: int, key: str, log_path: str, request_timeout_s: float
    ) -> None:
        argv = [
            sys.executable,
            "-m",
            "orhpc.rollout.engines.sglang_router",
            "--host",
            host,
            "--port",
            str(port),
        ]
        argv += ["--request-timeout", str(round(request_timeout_s)), "--worker-urls", *urls]
        super().__init__(host, port, argv, dict(os.environ), key, log_path)


def main(argv: Sequence[str] | None = None) -> int:
    """Route until stopped; an invalid key file or release prints one line and returns exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m orhpc.rollout.engines.sglang_router")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--request-timeout", type=int, required=True, help="seconds")
    parser.add_argument("--worker-urls", nargs="+", required=True)
    parser.add_argument("--api-key-file", type=Path)
    options = parser.parse_args(argv)
    protect_server()
    try:
        key = read_engine_key(options.api_key_file)
        end_with_parent()
        _serve(options, key)
    except ConfigError as error:
        print(f"orhpc: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    return 0


def _serve(options: argparse.Namespace, key: str | None) -> None:
    from sglang_router.launch_router import launch_router  # pyright: ignore[reportMissingImports]
    from sglang_router.router_args import RouterArgs  # pyright: ignore[reportMissingImports]

    try:
        settings: Any = RouterArgs(
            worker_urls=options.worker_urls,
            host=options.host,
            port=options.port,
            api_key=key,
            policy="manual",
            assignment_mode="min_load",
            request_timeout_secs=options.request_timeout,
            worker_startup_check_interval=1,
            health_check_interval_secs=5,
            # Metrics cannot be disabled, and a conflict on their default port, 29000, ends the router.
            prometheus_host=_LOOPBACK,
            prometheus_port=free_ports(1, _LOOPBACK)[0],
            # Workers repeat failed requests, since they know versions and seeds.
            disable_retries=True,
            disable_circuit_breaker=True,
            log_level="warn",
        )
    except TypeError as error:
        raise ConfigError(f"engine.router: this sglang-router release is not supported: {error}") from error
    launch_router(settings)


if __name__ == "__main__":
    sys.exit(main())
