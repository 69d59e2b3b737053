"""The process around the cpu engine: keys, failures to start, and lifetimes of parent and child."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orhpc.errors import ConfigError, EngineUnavailable
from orhpc.rollout.engines.process import EngineProcess, ServerProcess
from tests.trainer_kit import free_port

from .conftest import KEY, Server, engine_config


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: object, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def no_external(servers: dict[str, Server]) -> None:
    if not servers["dense"].own:
        pytest.skip("about the cpu engine's process")


@pytest.mark.slow
@pytest.mark.usefixtures("no_external")
def test_the_process_starts_serves_and_stops(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    process = EngineProcess(
        engine_config(extra={"load_format": "dummy"}),
        str(folders["dense"][0]), "127.0.0.1", free_port(), KEY, str(log), 0,
    )  # fmt: skip
    assert process.pid is None and not process.alive()
    process.stop()
    process.start()
    assert process.pid is not None
    started = psutil.Process(process.pid)
    # Popen returns when exec closes its pipe, a moment before the kernel sets the new command line.
    assert wait_for(lambda: "--api-key-file" in started.cmdline())
    command = started.cmdline()
    assert not any(KEY in part for part in command)
    key_file = Path(command[command.index("--api-key-file") + 1])
    assert key_file.stat().st_mode & 0o777 == 0o600
    asyncio.run(process.wait_ready(240.0))
    assert process.alive() and not key_file.exists()
    assert KEY not in log.read_text()
    start = time.monotonic()
    process.stop(30.0)
    assert time.monotonic() - start < 20.0, "it did not heed TERM"
    assert not process.alive() and gone(process.pid)


@pytest.mark.slow
@pytest.mark.usefixtures("no_external")
def test_it_ends_with_its_parent(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    argv = [
        sys.executable, "-m", "orhpc.rollout.engines.cpu", "--model-path", str(folders["dense"][0]),
        "--port", str(free_port()), "--threads", "1",
    ]  # fmt: skip
    code = (
        f"import subprocess, time; p = subprocess.Popen({argv!r}); print(p.pid, flush=True); time.sleep(600)"
    )
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert wait_for(lambda: b"serving" in (tmp_path / "log").read_bytes(), 180.0)
        # The signal that the kernel sends when only a thread ends must not be mistaken for the parent's.
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.3)
        assert not gone(child)
        parent.kill()
        parent.wait()
        assert wait_for(lambda: gone(child), 60.0)
    finally:
        parent.kill()
        parent.stdout.close()
        if not gone(child):
            os.kill(child, signal.SIGKILL)


def test_a_server_knows_a_parent_that_ended_while_it_was_imported(tmp_path: Path) -> None:
    """Its parent is then another process, of which it must not wait for the end."""
    log = tmp_path / "engine.log"
    server = (
        "import os, sys, time; end = time.monotonic() + 20\n"
        "while os.getppid() == int(sys.argv[1]) and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
        "from orhpc.rollout.engines import sglang_server\n"
        "sglang_server._WATCH_S = 0.1; sglang_server.end_with_parent(); time.sleep(20)\n"
    )
    code = (
        "import os; from orhpc.rollout.engines.process import ServerProcess\n"
        f"command = [{sys.executable!r}, '-c', {server!r}, str(os.getpid())]\n"
        f"server = ServerProcess('127.0.0.1', {free_port()}, command, dict(os.environ), None, {str(log)!r})\n"
        "server.start(); print(server.pid, flush=True); os._exit(0)\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    child = int(parent.stdout)
    try:
        assert wait_for(lambda: gone(child), 15.0), log.read_text()
    finally:
        if not gone(child):
            os.kill(child, signal.SIGKILL)


def test_the_cpu_engine_knows_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from orhpc.rollout.engines.cpu import __main__ as program

    monkeypatch.setenv("ORHPC_SERVER_PARENT", str(os.getppid()))
    child = os.fork()
    if not child:
        try:
            program._die_with_parent()
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_server_that_ends_while_it_is_stopped_is_stopped(tmp_path: Path) -> None:
    """The thread that waits for its end reaps it before its status is known to others."""
    command = [sys.executable, "-c", "pass"]
    server = ServerProcess("127.0.0.1", free_port(), command, dict(os.environ), None, str(tmp_path / "log"))
    server.inherits = False  # so that no thread waits for it
    server.start()
    process: Any = server._process
    process._waitpid_lock.acquire()
    os.waitpid(process.pid, 0)
    release = threading.Timer(0.1, process._waitpid_lock.release)
    release.start()
    server.stop()
    release.join()
    assert not server.alive()


@pytest.mark.slow
@pytest.mark.usefixtures("no_external")
def test_a_failure_to_start_says_why(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    log = tmp_path / "engine.log"
    process = EngineProcess(engine_config(), str(empty), "127.0.0.1", free_port(), KEY, str(log), 0)
    process.start()
    with pytest.raises(ConfigError, match=r"config\.json") as failure:
        asyncio.run(process.wait_ready(240.0))
    assert str(log) in str(failure.value)
    process.stop()


def test_a_crash_while_starting_is_reported_by_its_exception(tmp_path: Path) -> None:
    """SGLang's last log lines report the shutdown of its processes, not the cause."""
    crash = (
        "import traceback\n"
        "try: raise RuntimeError('rmsnorm failed to dispatch data type Float')\n"
        "except RuntimeError: traceback.print_exc()\n"
        "raise SystemExit('kill_process_tree called: parent_pid=7')"
    )
    log = tmp_path / "engine.log"
    command, port = [sys.executable, "-c", crash], free_port()
    process = ServerProcess("127.0.0.1", port, command, dict(os.environ), None, str(log))
    process.start()
    with pytest.raises(
        EngineUnavailable, match="ended while starting: RuntimeError: rmsnorm failed"
    ) as failure:
        asyncio.run(process.wait_ready(60.0))
    assert str(log) in str(failure.value)


@pytest.mark.slow
@pytest.mark.usefixtures("no_external")
def test_a_deadline_holds_while_starting(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    process = EngineProcess(
        engine_config(), str(folders["dense"][0]), "127.0.0.1", free_port(), KEY, str(tmp_path / "log"), 0
    )
    process.start()
    try:
        with pytest.raises(EngineUnavailable, match="did not start within"):
            asyncio.run(process.wait_ready(0.2))
    finally:
        process.stop()
    assert not process.alive()


@pytest.mark.slow
@pytest.mark.usefixtures("no_external")
def test_the_deadline_begins_when_the_engine_may_load(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Trainers may take minutes to load a model before engines get the memory of their devices."""
    process = EngineProcess(
        engine_config(), str(folders["dense"][0]), "127.0.0.1", free_port(), None, str(tmp_path / "log"), 0
    )

    async def start() -> None:
        process.start_waiting()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait_ready(0.2), 3.0)
        assert process.alive()
        process.let_load()
        await process.wait_ready(240.0)

    try:
        asyncio.run(start())
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--host", "0.0.0.0"], "api-key-file"),
        (["--host", "localhost"], "not an IP address"),
        (["--api-key-file", "/nonexistent"], "nonexistent"),
        (["--context-length", "1"], "context-length"),
        (["--mem-fraction-static", "2"], "mem-fraction-static"),
        (["--enable-return-routed-experts"], "dense"),
    ],
)
@pytest.mark.usefixtures("no_external")
def test_bad_arguments_end_with_one_line_and_exit_code_2(
    folders: dict[str, tuple[Path, Path]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    output: str,
) -> None:
    from orhpc.rollout.engines.cpu import __main__ as program

    monkeypatch.setattr(program, "_die_with_parent", lambda: None)
    argv = ["--model-path", str(folders["dense"][0]), "--port", "1", "--context-length", "64", *arguments]
    assert program.main(argv) == 2
    assert output in caplog.records[-1].getMessage()
    assert "\n" not in caplog.records[-1].getMessage()
