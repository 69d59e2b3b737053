"""``python -m orhpc.rollout.engines.sglang_router``: sglang-router before the engines, its key out of sight.

Every worker sees only its own requests; the router sees all of them, sends a new rollout to the engine
with the fewest, and its later turns to the same one (policy ``manual``, by the header
``X-SMG-Routing-Key``).  Release 0.3 leaves the fields about expert routes out of what it passes on, so
runs that record routes do without it.

It cannot listen on a socket that it inherits.  So its port is given up for it just before it starts, and
nobody is told of the router before it is seen that it listens there itself.  What stays: should the router
end within a run, another user who takes its port at once is sent the engines' key.  Without the key it
answers only questions about its health and its engines' metrics.
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
    """Whether requests go through a router: ``engine.router``, or where it is installed and of use.

    Raises ConfigError where it was asked for and is not installed.
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
    """The router of these engines (URLs), listening on ``host:port``."""

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
    """Route until told to stop; a wrong key file or release is one line and exit code 2."""
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
            # Its counters cannot be switched off, and whoever listens at their usual port, 29000, ends it.
            prometheus_host=_LOOPBACK,
            prometheus_port=free_ports(1, _LOOPBACK)[0],
            # What fails is repeated by the workers, which know versions and seeds.
            disable_retries=True,
            disable_circuit_breaker=True,
            log_level="warn",
        )
    except TypeError as error:
        raise ConfigError(f"engine.router: this release of sglang-router is not known: {error}") from error
    launch_router(settings)


if __name__ == "__main__":
    sys.exit(main())
