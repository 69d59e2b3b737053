"""One engine process, or one node's part of an engine: start it, wait until it is ready, stop it.

Clients send the engine's key with every call, so no other process may answer at its address.  The process
that starts a server binds its port first, passes the bound socket to the server, and keeps the socket after
the server has ended, so that no other process can listen on the port while the parent runs.  Before a server
is reported as ready, the parent verifies that the listener is its own child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from orhpc.config import Config
from orhpc.errors import EXIT_CONFIG, ConfigError, EngineUnavailable, PortTaken
from orhpc.process.cuda_allocator import without_expandable_segments
from orhpc.process.devices import VARIABLE, visible_devices
from orhpc.process.parent import naming_parent
from orhpc.process.ports import hold_port, stop_listening
from orhpc.process.start_gate import VARIABLE as GATE
from orhpc.process.start_gate import close_gate
from orhpc.process.terminal import to_server
from orhpc.rollout.client import EngineClient
from orhpc.rollout.engines.sglang_command import EnginePart, arguments, sglang_options

_POLL_S = 0.25
_ORPHAN_S = 4.0
"""Time (seconds) for which a server may survive its parent process and keep its port."""
_TAIL_BYTES = 16384
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit)\b")
"""Matches the last line of a Python traceback; servers log more lines after it while shutting down."""


_OUT_OF_MEMORY = re.compile(
    rb"OutOfMemoryError|CUDA out of memory|std::bad_alloc|MemoryError"
    rb"|CUDA (driver )?error: out of memory|Cuda failure (2 )?'out of memory'"
    rb"|Failed to CUDA (calloc|malloc|host alloc)|STATUS_ALLOC_FAILED|HOST_ALLOCATION_FAILED"
)
"""Matches what SGLang, torch, CUDA and Python log when a GPU's or the host's memory is used up."""
_LOWERED_FRACTION = 0.05
"""Fraction of GPU memory that an engine leaves to activations after each time that it ran out of memory."""


class ServerProcess:
    """Owns one server process; signals only this process and its children.

    The process reads the key from ``--api-key-file``, listens on the socket of ``--listen-fd``, serves
    ``/health`` without a key and ends when this one does.
    """

    what = "engine"
    inherits = True
    """Whether the server listens on an inherited socket; otherwise it binds the port itself."""

    def __init__(
        self,
        host: str,
        port: int,
        argv: list[str],
        environment: dict[str, str],
        key: str | None,
        log_path: str,
    ) -> None:
        self.url = f"http://{host}:{port}"
        self._host, self._port = host, port
        self._listener: socket.socket | None = None
        self._refusing: threading.Thread | None = None
        self._argv, self._environment = argv, environment
        self._key = key
        self._log_path = Path(log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._key_file: Path | None = None
        self._log_start = 0
        """Size of the log at the last start."""

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return None if self._process is None else self._process.pid

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start or restart the server without waiting until it is ready; ``variables``: for this start only.

        The key is passed in a file readable only by this user.  Raises PortTaken if another process has the
        port.
        """
        assert not self.alive(), "the process is running"
        argv = list(self._argv)
        passed = self._bound()
        if passed is not None:
            argv += ["--listen-fd", str(passed.fileno())]
        if self._key is not None:
            handle, name = tempfile.mkstemp(prefix="orhpc-engine-")  # created with mode 0600
            with os.fdopen(handle, "w") as file:
                file.write(self._key)
            self._key_file = Path(name)
            argv += ["--api-key-file", name]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            # A new session: a terminal's Ctrl-C reaches only the driver, which stops engines in order.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=naming_parent({**self._environment, **(variables or {})}),
                pass_fds=[passed.fileno()] if passed is not None else [],
            )  # fmt: skip
        if passed is not None:
            # This process also holds the socket: it must refuse connections after the server has ended.
            self._refusing = threading.Thread(target=_refuse_after, args=(self._process, passed), daemon=True)
            self._refusing.start()

    def _bound(self) -> socket.socket | None:
        """The socket to pass to the server; None (and the port is free) if it binds its port itself."""
        if self._listener is None:
            self._listener = self._hold()
        if self._refusing is not None:
            self._refusing.join()
        if self.inherits:
            return self._listener
        self._listener.close()
        self._listener = None
        return None

    def _hold(self) -> socket.socket:
        """Bind the port; an orphaned server of a killed parent releases it after some seconds."""
        end = time.monotonic() + _ORPHAN_S
        while True:
            try:
                return hold_port(self._host, self._port)
            except PortTaken:
                if time.monotonic() > end:
                    raise
            time.sleep(_POLL_S)

    async def wait_ready(self, deadline_s: float) -> None:
        """Return once the server answers; for a part other than the first, once its process runs.

        ``deadline_s`` counts from when nothing holds it back any more.  Raises ConfigError when the server
        refuses its options, and EngineUnavailable when it ends or takes too long, both with the relevant log
        line; PortTaken when another process answers.
        """
        client = EngineClient(self.url, key=None, request_timeout_s=deadline_s)
        end = time.monotonic() + deadline_s
        try:
            while True:
                if self._is_held_back():
                    end = time.monotonic() + deadline_s
                if not self.alive():
                    assert self._process is not None
                    if self._process.returncode == EXIT_CONFIG:
                        raise ConfigError(self._last_log_line().removeprefix("orhpc: "))
                    raise EngineUnavailable(
                        f"{self.what} {self.url} ended while starting: {self._last_log_line(_EXCEPTION)}"
                    )
                try:
                    await client.health(timeout_s=5.0)
                    if not self._listens():
                        raise PortTaken(f"{self.what} {self.url}: another process answers on its port")
                    return
                except EngineUnavailable as error:
                    if time.monotonic() > end:
                        late = f"did not start within {deadline_s:g} s"
                        raise EngineUnavailable(
                            f"{self.what} {self.url} {late}: {self._last_log_line()}"
                        ) from error
                await asyncio.sleep(_POLL_S)
        finally:
            self._remove_key_file()
            await client.close()

    def _is_held_back(self) -> bool:
        """Whether the server still waits for something else before it loads what it serves."""
        return False

    def _listens(self) -> bool:
        """Whether our process, or a child of it, listens at the address."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            return any(
                connection.status == psutil.CONN_LISTEN
                and tuple(connection.laddr) == (self._host, self._port)
                for process in (server, *server.children(recursive=True))
                for connection in process.net_connections("tcp")
            )
        return False

    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    def why_ended(self) -> str:
        """The last exception in the log of a server that has ended, its exit status and log; else empty."""
        if self._process is None or self.alive():
            return ""
        code = self._process.returncode
        status = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        with contextlib.suppress(OSError):
            lines = self._log_tail(self._log_start).decode("utf-8", "replace").splitlines()
            if found := [line.strip() for line in lines if _EXCEPTION.match(line)]:
                status = f"{found[-1]}; {status}"
        return f"{status}; log: {self._log_path}"

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the process: SIGTERM, then SIGKILL after ``timeout_s``; no effect if it is not running."""
        self._remove_key_file()
        process = self._process
        if process is None or process.poll() is not None:
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since, and another thread reaped it
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # psutil also raises if the pid was reused
                child.kill()

    def _remove_key_file(self) -> None:
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)
            self._key_file = None

    def _last_log_line(self, pattern: re.Pattern[str] | None = None) -> str:
        """The last log line that matches ``pattern``, or else the last line; with the log's path."""
        try:
            text = self._log_tail().decode("utf-8", "replace")
        except OSError as error:
            return f"its log {self._log_path} cannot be read: {error.strerror}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        matching = [line for line in lines if pattern.match(line)] if pattern is not None else []
        relevant = matching or lines or ["it logged nothing"]
        return f"{relevant[-1]} (log: {self._log_path})"

    def _log_tail(self, first: int = 0) -> bytes:
        """The end of the log, without what lies before the byte ``first``.  Raises OSError."""
        with self._log_path.open("rb") as file:
            file.seek(max(first, self._log_path.stat().st_size - _TAIL_BYTES))
            return file.read()


class EngineProcess(ServerProcess):
    """An engine, or one node's part of one.

    ``index`` numbers the engines of a run and determines its default seed; ``threads`` limits a cpu engine's
    threads (``engine.threads`` takes precedence); ``part`` specifies its GPUs on the node.  An engine of
    several nodes has one such process per node, and only the first answers calls.
    """

    def __init__(
        self,
        config: Config,
        model_dir: str,
        host: str,
        port: int,
        key: str | None,
        log_path: str,
        index: int,
        threads: int | None = None,
        part: EnginePart | None = None,
    ) -> None:
        part = part or EnginePart()

        def command(config: Config) -> list[str]:
            if config.engine.backend == "cpu":
                return _cpu_command(config, model_dir, host, port, index, threads)
            options = sglang_options(config, model_dir, host, port, index, part)
            return [sys.executable, "-m", "orhpc.rollout.engines.sglang_server", *arguments(options)]

        self._config, self._command = config, command
        self._gate: Path | None = None
        super().__init__(host, port, command(config), server_environment(config, part), key, log_path)

    def start_waiting(self) -> None:
        """:meth:`start` a server that loads its model only after :meth:`let_load`."""
        self._gate = close_gate()
        try:
            self.start({GATE: str(self._gate)})
        except BaseException:
            self.let_load()
            raise

    def let_load(self) -> None:
        """Let the server load its model: the memory that it needs is free."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.unlink(missing_ok=True)

    def stop(self, timeout_s: float = 10.0) -> None:
        super().stop(timeout_s)
        self.let_load()

    def _is_held_back(self) -> bool:
        return self._gate is not None

    def ran_out_of_memory(self) -> bool:
        """Whether the server has ended and its log since its last start says that memory was used up."""
        if self.alive() or self._process is None:
            return False
        try:
            return _OUT_OF_MEMORY.search(self._log_tail(self._log_start)) is not None
        except OSError:
            return False  # then it is restarted as it was

    def lower_limits(self) -> tuple[int, float]:
        """Let the next start use less memory: half of the requests at once, and a smaller part of the GPU.

        Returns the new ``engine.max_running`` and ``engine.memory_fraction``.
        """
        engine = self._config.engine
        fraction = engine.memory_fraction
        fraction = max(fraction / 2, fraction - _LOWERED_FRACTION)
        limits = {"max_running": max(1, engine.max_running // 2), "memory_fraction": round(fraction, 3)}
        self._config = self._config.model_copy(update={"engine": engine.model_copy(update=limits)})
        self._argv = self._command(self._config)
        return self._config.engine.max_running, self._config.engine.memory_fraction


def _refuse_after(process: subprocess.Popen[bytes], listener: socket.socket) -> None:
    """After a server has ended, refuse connections on the socket shared with it, but keep the port."""
    process.wait()
    stop_listening(listener)


def _cpu_command(
    config: Config, model_dir: str, host: str, port: int, index: int, threads: int | None
) -> list[str]:
    engine = config.engine
    argv = [sys.executable, "-m", "orhpc.rollout.engines.cpu", "--model-path", model_dir]
    argv += ["--host", host, "--port", str(port)]
    argv += ["--dtype", engine.dtype or config.model.dtype]
    argv += ["--max-running-requests", str(engine.max_running)]
    argv += ["--context-length", str(engine.context_length or config.rollout.max_total_tokens)]
    argv += ["--threads", str(engine.threads or threads or _thread_share(config))]
    argv += ["--weight-version", "0", "--random-seed", str((config.run.seed + index) % (1 << 31))]
    if config.rollout.record_routes:
        argv.append("--enable-return-routed-experts")
    if config.model.trust_remote_code:
        argv.append("--trust-remote-code")
    if not config.model.check:
        argv.append("--no-model-check")
    for name, value in engine.extra.items():
        if value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        argv += [flag] if value is True else [flag, str(value)]
    return argv


def _thread_share(config: Config) -> int:
    """An engine's share of this node's cores; engines and trainers do not compute concurrently."""
    engines = max(1, config.placement.rollout_devices // config.engine.tp)
    on_this_node = -(-engines // config.placement.nodes)
    return max(1, len(os.sched_getaffinity(0)) // on_this_node)


def server_environment(config: Config, part: EnginePart) -> dict[str, str]:
    """Environment variables of the server process: its GPUs and settings that SGLang reads only there."""
    environment = {**without_expandable_segments(os.environ), **to_server(config.secret_sources)}
    if config.placement.device == "cpu":
        return environment
    environment[VARIABLE] = visible_devices(part.devices, environment)
    # Ray sets one thread, but not where the job's environment sets the variable, often to all CPUs of a task.
    # Then each rank would write the routes of every decoding step, a small array, with as many threads.
    environment["OMP_NUM_THREADS"] = str(config.engine.threads or 1)
    # Both ends of a weight broadcast must use the same value; SGLang sets it in its schedulers.
    environment["NCCL_CUMEM_ENABLE"] = "0"
    # Health checks also run while an engine sleeps, when it could not generate a token.
    environment.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")
    # Before a crash SGLang waits a minute for GPU core dumps, which would delay the restart.
    if environment.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        environment.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    # Compiling FP8 kernels for all row counts up to 16,384 takes a quarter of an hour at the first start.
    environment.setdefault("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "1")
    if (config.engine.dtype or config.model.dtype) == "float32":
        # By default Triton multiplies float32 in TF32, with 10 mantissa bits.
        environment.setdefault("TRITON_F32_DEFAULT", "ieee")
    return environment
