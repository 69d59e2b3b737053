"""The environment servers that a job runs itself, on the node of the rollout workers that use them.

Other users of the node can reach them, and tool calls there run as this user.  So every request must carry
the attempt's key, and a server's port is held from its selection until the attempt is over, so that no other
process can listen on it and receive the key.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from subprocess import Popen

from orhpc.config import Config
from orhpc.errors import EXIT_CONFIG, ConfigError, EnvironmentUnavailable
from orhpc.launch.node import processes
from orhpc.launch.node.replicas import replicas_of
from orhpc.plan.placement import Node
from orhpc.process.hashing import same_hashes
from orhpc.process.ports import hold_port, stop_listening
from orhpc.process.secrets import OF_TRACKERS, variables_of
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog

_MIN_LIFE_S = 30.0
"""A server that ends within this time after its start, without being killed, is considered broken."""
_EARLY_KILLS = 2
"""Number of consecutive times that a server may be killed that early; it may need too much memory."""


class ServedEnvironments:
    """The environment servers that the job runs itself on this node."""

    def __init__(self, config: Config, node: Node, rundir: RunDir, attempt: int) -> None:
        """``attempt``: its folder has the servers' key, which is read at their start, and gets their logs."""
        self._config, self._node, self._rundir, self._attempt = config, node, rundir, attempt
        self._folder = rundir.attempt(attempt)
        self._address, self._key = node.address, ""
        self._commands: dict[str, tuple[list[str], Path]] = {}
        self._held: dict[str, socket.socket] = {}
        self._running: dict[str, Popen[bytes]] = {}
        self._started: dict[str, float] = {}
        self._early_kills: dict[str, int] = {}
        self._withheld: dict[str, set[str]] = {}
        """Variables that a server does not get: its tools may run what the model has written."""

    def reserve(self) -> dict[str, list[str]]:
        """Choose and hold a port for every replica; return base URLs by environment."""
        urls: dict[str, list[str]] = {}
        for name, settings in self._config.environments.items():
            if not settings.is_served:
                continue
            environment, options = settings.served(self._rundir.data_of(name))
            secrets = {**self._config.secrets, **settings.secrets}
            own = {*OF_TRACKERS, *variables_of(self._config.own_secrets)}
            for replica in range(replicas_of(self._config, name, self._node.cpus)):
                label = f"{name.replace('/', '_')}_{replica}"
                listener = self._held[label] = hold_port(self._address)
                port = listener.getsockname()[1]
                command = [sys.executable, "-m", "orhpc.environments.server"]
                command += ["--environment", environment, "--host", self._address, "--port", str(port)]
                command += ["--listen-fd", str(listener.fileno()), "--key-from-stdin"]
                if secrets:
                    command += ["--secrets-json", json.dumps(secrets)]
                if options:
                    command += ["--options-json", json.dumps(options)]
                self._commands[label] = command, self._folder / f"environment_{label}_{self._node.name}.log"
                self._withheld[label] = own - variables_of(secrets)
                urls.setdefault(name, []).append(f"http://{self._address}:{port}")
        return urls

    def start(self) -> None:
        """Start every replica; they may still be loading afterwards."""
        # Kept in memory, because a server may have to be restarted after the file has been removed.
        self._key = (self._folder / "environment.key").read_text()
        for label in self._commands:
            self._spawn(label)

    def keep_up(self) -> None:
        """Restart servers that have ended; their sessions are lost, and the rollouts are retried.

        Raises:
            ConfigError: a server refused its environment's settings.
            EnvironmentUnavailable: a server ended soon after its start, or was killed after several starts.
        """
        for label, process in list(self._running.items()):
            if process.poll() is not None:
                stop_listening(self._held[label])  # the ended server shared this socket with us
                early = time.monotonic() - self._started[label] < _MIN_LIFE_S
                kills = self._early_kills.get(label, 0) + 1 if early and process.returncode < 0 else 0
                self._early_kills[label] = kills
                if early and not 0 < kills <= _EARLY_KILLS:
                    log = self._commands[label][1]
                    if process.returncode == EXIT_CONFIG:
                        raise ConfigError(processes.last_line(log).removeprefix("orhpc: "))
                    raise EnvironmentUnavailable(
                        f"environment server {label} ended with status {process.returncode}: "
                        f"{processes.last_line(log)} ({log})"
                    )
                self._spawn(label)
                events = EventLog(self._rundir.events, self._attempt)
                events.write("environment_restarted", server=label, status=process.returncode)
                events.close()

    def stop(self) -> None:
        for process in self._running.values():
            processes.stop(process, grace_s=3.0)
        while self._held:
            self._held.popitem()[1].close()

    def _spawn(self, label: str) -> None:
        command, log = self._commands[label]
        # By default the server logs every request, which costs more than many environments do.  The level
        # counts from the import of openreward, before the server's own code runs.
        given = {n: v for n, v in os.environ.items() if n not in self._withheld[label]}
        env = {"OPENREWARD_LOG_LEVEL": "WARNING", **given, "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
        listener = self._held[label]
        process = processes.spawn(
            command, log=log, env=same_hashes(env), piped=True, pass_fds=[listener.fileno()]
        )
        processes.write_input(process, f"{self._key}\n")
        self._running[label], self._started[label] = process, time.monotonic()
