"""Serve one environment with the OpenReward server.

    python -m orhpc.environments.server --environment arithmetic --host 127.0.0.1 --port 8080

An environment may run commands for the clients that call its tools, and a job shares its nodes with other
users.  A job therefore passes the server a key on its standard input, which every request must send, and a
socket that it has held since it chose the port.  Without a key, the server listens on loopback only.  It ends
with its parent process.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import ipaddress
import json
import os
import signal
import sys
from typing import Any

import pydantic

from orhpc.config.environment import BUNDLED
from orhpc.errors import EXIT_CONFIG, ConfigError, UserCodeError
from orhpc.process.garbage import freeze_garbage
from orhpc.process.keyed_server import require_key_of_uvicorn
from orhpc.process.parent import parent_of_server
from orhpc.process.ports import inherited_socket
from orhpc.process.terminal import protect_process
from orhpc.process.user_code import user_error

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when its parent process ends or has ended, for whatever reason (Linux).

    The kernel also sends the signal when only the thread that started this process ends, e.g. a thread of a
    pool; then the parent process still exists, and this process continues.
    """
    parent = parent_of_server()

    def parent_ended(*_: object) -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    if sys.platform == "linux":
        signal.signal(signal.SIGUSR2, parent_ended)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2)
    if os.getppid() != parent:  # it ended before prctl was called
        sys.exit(1)


def environment_class(name: str, options: dict[str, Any]) -> type:
    """Return the environment class with its options set.

    Args:
        name: a name in :data:`orhpc.config.environment.BUNDLED` or ``package.module:Class``; a class
            with options has a classmethod ``configure(**options)`` that returns the configured class.
        options: keyword settings.

    Raises ConfigError if there is no such environment or an option is invalid.
    """
    module, colon, attribute = BUNDLED.get(name, name).partition(":")
    if not colon:
        raise ConfigError(
            f"environment {name!r} is neither bundled ({', '.join(sorted(BUNDLED))}) nor package.module:Class"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment {name!r} cannot be loaded: {error}") from None
    except Exception as error:
        raise user_error(f"environment {name!r}: its module", error) from error
    _check_kind(name, found)
    configure = getattr(found, "configure", None)
    if configure is None:
        if options:
            raise ConfigError(f"environment {name!r} takes no options: it has no classmethod 'configure'")
        return found
    try:
        return configure(**options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "options"
        raise ConfigError(f"environment {name!r}: {where}: {first['msg']}") from None
    except TypeError as error:
        raise ConfigError(f"environment {name!r}: {error}") from None


def _check_kind(name: str, found: Any) -> None:
    """Raises ConfigError if this is not a class that OpenReward's server can serve."""
    from openreward.environments import Environment

    if isinstance(found, type) and issubclass(found, Environment):
        return
    if not isinstance(found, type):
        raise ConfigError(f"environment {name!r} is not a class")
    needed = "environments.NAME.serve must be a subclass of openreward.environments.Environment"
    if any(base.__module__.split(".")[0] in ("ors", "ors_sdk") for base in found.__mro__):
        needed += "; this one uses ors-sdk: start its own server and set environments.NAME.url to its address"
    raise ConfigError(f"environment {name!r}: {found.__qualname__} is not an OpenReward class: {needed}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="orhpc.environments.server", description=__doc__)
    parser.add_argument("--environment", required=True, help="bundled name or package.module:Class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secrets-json", default="{}", help="sources of its secrets: name to source")
    parser.add_argument("--options-json", default="{}", help="keyword settings as a JSON object")
    parser.add_argument(
        "--key-from-stdin", action="store_true", help="read the key that requests must send from stdin"
    )
    parser.add_argument("--listen-fd", type=int, help="inherited socket, bound to the port, to listen on")
    arguments = parser.parse_args(argv)
    die_with_parent()
    try:
        protect_process(json.loads(arguments.secrets_json))
        options = json.loads(arguments.options_json)
        if not isinstance(options, dict):
            raise ConfigError("--options-json is not a JSON object")
        found = environment_class(arguments.environment, options)
        from openreward.environments import Server

        # Tracebacks are sent to the run, which shows them to the user whose code raised.
        server = Server([found], return_errors="stacktrace")
        _guard(arguments)
    except UserCodeError as error:
        print(f"{error.trace.rstrip()}\norhpc: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except (ConfigError, json.JSONDecodeError, TypeError, ValueError) as error:
        print(f"orhpc: {error}", file=sys.stderr)
        return EXIT_CONFIG
    freeze_garbage()
    server.run(host=arguments.host, port=arguments.port)
    return 0


def _guard(arguments: argparse.Namespace) -> None:
    """Make the server require the key.  Raises ConfigError if it would be reachable without one."""
    key = sys.stdin.readline().strip() if arguments.key_from_stdin else None
    if key == "":
        raise ConfigError("--key-from-stdin: the input has no key")
    try:
        loopback = ipaddress.ip_address(arguments.host).is_loopback
    except ValueError as error:
        raise ConfigError(f"--host {arguments.host} is not an IP address") from error
    if key is None and not loopback:
        raise ConfigError(f"--host {arguments.host} is not loopback, so the server needs --key-from-stdin")
    listener = None if arguments.listen_fd is None else inherited_socket(arguments.listen_fd)
    require_key_of_uvicorn(key, listener, open_health=False)


if __name__ == "__main__":
    sys.exit(main())
