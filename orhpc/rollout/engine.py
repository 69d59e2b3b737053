"""One engine process, or one node's part of an engine: start it, wait until it serves, stop exactly it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from orhpc.config import Config
from orhpc.devices import VARIABLE, visible_devices
from orhpc.errors import EXIT_CONFIG, ConfigError, EngineUnavailable
from orhpc.rollout.client import EngineClient
from orhpc.rollout.sglang_command import EnginePart, arguments, sglang_options

_POLL_S = 0.25
_TAIL_BYTES = 16384
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit)\b")
"""The line of a Python traceback that says what was raised; servers go on telling how they end."""


class ServerProcess:
    """Owns one server process and nothing else: only this process and its children are ever signalled.

    The process reads the key from ``--api-key-file``, serves ``/health`` at ``url`` and ends when this
    one does.
    """

    what = "engine"

    def __init__(
        self, url: str, argv: list[str], environment: dict[str, str], key: str | None, log_path: str
    ) -> None:
        self.url = url
        self._argv, self._environment = argv, environment
        self._key = key
        self._log_path = Path(log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._key_file: Path | None = None

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server; it is not ready yet.  The key travels in a file that only we can read."""
        assert self._process is None, "an engine process is started once"
        argv = list(self._argv)
        if self._key is not None:
            handle, name = tempfile.mkstemp(prefix="orhpc-engine-")  # made with mode 0600
            with os.fdopen(handle, "w") as file:
                file.write(self._key)
            self._key_file = Path(name)
            argv += ["--api-key-file", name]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            # A session of its own: a terminal's Ctrl-C reaches the driver, which then stops engines in order.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=self._environment,
            )  # fmt: skip

    async def wait_ready(self, deadline_s: float) -> None:
        """Return once the server answers; of a part that is not the first, once its process is up.

        Raises, with what the log says last, ConfigError when the server refuses its options and
        EngineUnavailable when it ends or takes too long.
        """
        client = EngineClient(self.url, key=self._key, request_timeout_s=deadline_s)
        end = time.monotonic() + deadline_s
        try:
            while True:
                if not self.alive():
                    assert self._process is not None
                    if self._process.returncode == EXIT_CONFIG:
                        raise ConfigError(self._last_words().removeprefix("orhpc: "))
                    raise EngineUnavailable(
                        f"{self.what} {self.url} ended while starting: {self._last_words(_EXCEPTION)}"
                    )
                try:
                    await client.health(timeout_s=5.0)
                    return
                except EngineUnavailable as error:
                    if time.monotonic() > end:
                        late = f"did not start within {deadline_s:g} s"
                        raise EngineUnavailable(
                            f"{self.what} {self.url} {late}: {self._last_words()}"
                        ) from error
                await asyncio.sleep(_POLL_S)
        finally:
            self._remove_key_file()
            await client.close()

    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the process: TERM, and KILL after ``timeout_s``; harmless when it has ended or never began."""
        self._remove_key_file()
        process = self._process
        if process is None or process.poll() is not None:
            return
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # also of a process that got its number
                child.kill()

    def _remove_key_file(self) -> None:
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)
            self._key_file = None

    def _last_words(self, telling: re.Pattern[str] | None = None) -> str:
        """The last line of the log that is ``telling``, or that says anything; and where the log is."""
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return f"its log {self._log_path} cannot be read: {error.strerror}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        told = [line for line in lines if telling.match(line)] if telling is not None else []
        said = told or lines or ["it logged nothing"]
        return f"{said[-1]} (log: {self._log_path})"


class EngineProcess(ServerProcess):
    """An engine, or one node's part of one.

    ``index`` numbers the engines of a run and sets its default seed; ``threads`` limits a cpu engine's
    threads (``engine.threads`` comes first); ``part`` says which of the node's GPUs it has.  Of an
    engine of several nodes, each node has one of these, and only the first answers calls.
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
        if config.engine.backend == "cpu":
            argv = _cpu_command(config, model_dir, host, port, index, threads)
        else:
            options = sglang_options(config, model_dir, host, port, index, part)
            argv = [sys.executable, "-m", "orhpc.rollout.sglang_server", *arguments(options)]
        super().__init__(f"http://{host}:{port}", argv, server_environment(config, part), key, log_path)


def _cpu_command(
    config: Config, model_dir: str, host: str, port: int, index: int, threads: int | None
) -> list[str]:
    engine = config.engine
    argv = [sys.executable, "-m", "orhpc.rollout.cpu_engine", "--model-path", model_dir]
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
    """An engine's share of this node's cores, when engines and trainers do not compute at once."""
    engines = max(1, config.placement.rollout_devices // config.engine.tp)
    on_this_node = -(-engines // config.placement.nodes)
    return max(1, len(os.sched_getaffinity(0)) // on_this_node)


def server_environment(config: Config, part: EnginePart) -> dict[str, str]:
    """Variables of the server's process: its GPUs, and what SGLang reads from nowhere else."""
    environment = dict(os.environ)
    if config.placement.device == "cpu":
        return environment
    environment[VARIABLE] = visible_devices(part.devices, environment)
    # Both ends of a weight broadcast have to agree on it; SGLang sets it in its schedulers.
    environment["NCCL_CUMEM_ENABLE"] = "0"
    # An idle engine is asked for its health while it sleeps, when it could compute no token.
    environment.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")
    # A server that crashes waits for dumps of its GPUs, a minute in which the run could have started it anew.
    if environment.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        environment.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    # FP8 kernels for every number of rows up to 16,384 take a quarter of an hour at a first start.
    environment.setdefault("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "1")
    if (config.engine.dtype or config.model.dtype) == "float32":
        # Triton multiplies float32 with TF32's ten bits of mantissa unless told otherwise.
        environment.setdefault("TRITON_F32_DEFAULT", "ieee")
    return environment
