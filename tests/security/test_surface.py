"""A run has only the listeners, keys and files listed in docs/security.md; other users cannot use them."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.local import kit
from tests.security.conftest import Stranger

pytestmark = pytest.mark.slow
PAGE = Path("docs/security.md")
KINDS = {
    "environment server": "orhpc.environments.server",
    "engine": "orhpc.rollout.engines.cpu",
    "launcher": "orhpc.launch",
    "driver": "orhpc.driver",
    "Ray GCS": "gcs_server",
    "raylet": "raylet/raylet",
    "Ray runtime environment agent": "ray::RuntimeEnvAgent",
    "engine actor": "ray::EngineProcess",
    "trainer rank": "ray::TrainerRank",
    "copy holder": "ray::CopyHolder",
    "rollout worker": "ray::RolloutWorker",
    "idle Ray worker": "ray::IDLE",
    "torch shared memory manager": "torch_shm_manager",
}
"""Names on the page, and a part of the process's command line; the first match counts."""

WEB_SERVERS = ("environment server", "engine", "Ray runtime environment agent")
"""The other processes do not speak HTTP."""
ASKED = [("GET", "/"), ("POST", "/create"), ("POST", "/generate"), ("POST", "/letters/num_tasks")]


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the table under a heading of the page, without the table's first two lines."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def kind_of(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((kind for kind, sign in KINDS.items() if sign in line), line[:200])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunDir, list[psutil.Process]]]:
    """A run during its steps, and all of its processes."""
    root = tmp_path_factory.mktemp("surface")
    rundir = RunDir(root / "tiny")
    with kit.started(root, "train.steps=1000", "wandb.enabled=false") as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 2)
        launcher = psutil.Process(process.pid)
        yield rundir, [launcher, *launcher.children(recursive=True)]


def listening(processes: list[psutil.Process]) -> dict[int, tuple[str, str]]:
    """Maps each port to the kind of process that listens on it, and the address."""
    found: dict[int, tuple[str, str]] = {}
    for process in processes:
        try:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr
                    found[connection.laddr.port] = kind_of(process), connection.laddr.ip
        except psutil.NoSuchProcess:
            continue
    return found


def test_every_listener_is_on_the_page_and_on_loopback(running: tuple[RunDir, list[psutil.Process]]) -> None:
    found = listening(running[1])
    assert {kind for kind, _ in found.values()} <= {row[0] for row in rows_of("Listeners")}
    assert {"environment server", "engine", "driver", "Ray GCS", "raylet"} <= {k for k, _ in found.values()}
    assert {address.removeprefix("::ffff:") for _, address in found.values()} == {"127.0.0.1"}


def test_a_second_user_s_requests_are_refused(
    running: tuple[RunDir, list[psutil.Process]], stranger: Stranger
) -> None:
    rundir, processes = running
    before = len(read_events(rundir.events))
    for port, (kind, _) in listening(processes).items():
        for method, path in ASKED if kind in WEB_SERVERS else ASKED[:1]:
            address = f"http://127.0.0.1:{port}{path}"
            status, text = stranger("request", method, address, None, None, 30 if kind in WEB_SERVERS else 1)
            assert status == 401 if kind in WEB_SERVERS else status == 0, (kind, path, status, text)
    assert processes[0].is_running()
    kinds = [e["event"] for e in read_events(rundir.events)[before:]]
    assert not {"restart", "failed"} & set(kinds)


def test_keys_are_on_no_command_line_and_in_no_environment(
    running: tuple[RunDir, list[psutil.Process]],
) -> None:
    rundir, processes = running
    named = {row[1].strip("`") for row in rows_of("Keys")}
    folder = rundir.attempt(rundir.newest_attempt())
    assert named == {p.name for p in folder.iterdir() if p.suffix in (".key", ".token")}
    keys = [(folder / name).read_text().strip() for name in named]
    for process in processes:
        try:
            shown = " ".join([*process.cmdline(), *process.environ().values()])
        except psutil.NoSuchProcess:
            continue
        assert not any(key in shown for key in keys), kind_of(process)


def test_every_file_outside_of_the_run_directory_is_on_the_page(
    running: tuple[RunDir, list[psutil.Process]],
) -> None:
    rundir, processes = running
    patterns = [re.escape(row[0].strip("`")).replace(r"\*", ".*") for row in rows_of("Files")]
    for process in processes:
        try:
            opened = {str(m.path) for m in process.memory_maps()} | {f.path for f in process.open_files()}
        except psutil.NoSuchProcess:
            continue
        for path in map(Path, opened):
            if str(path).startswith(("/tmp/", "/dev/shm/")) and not path.is_relative_to(rundir.path):
                name = str(path).removesuffix(" (deleted)")
                assert any(re.match(pattern, name) for pattern in patterns), (kind_of(process), name)


def test_a_second_user_cannot_read_the_run_s_files(
    running: tuple[RunDir, list[psutil.Process]], stranger: Stranger
) -> None:
    rundir, processes = running
    folder = rundir.attempt(rundir.newest_attempt())
    assert stat.S_IMODE(rundir.path.stat().st_mode) == 0o700
    files = [rundir.events, folder / "engine.key", folder / "ray.token", folder / "driver.log"]
    own = {process.pid for process in processes}
    shared = [p for p in Path("/dev/shm").glob("torch_*") if int(p.name.split("_")[1]) in own]
    scratch = {Path(*Path(f).parts[:3]) for p in processes for f in _sockets_of(p) if "orhpc-ray-" in f}
    copies = [f for s in _state_folders(processes) for f in s.iterdir()]
    assert shared
    assert scratch
    assert {"driver", "rank"} <= {f.name.partition("_")[0] for f in copies}
    for path in [*files, *shared, *copies, *(s / "lock" for s in scratch)]:
        with pytest.raises(OSError, match="Permission"):
            stranger("opened", str(path))


def _state_folders(processes: list[psutil.Process]) -> set[Path]:
    """Folders of copies of the state that these processes have open."""
    found: set[Path] = set()
    for process in processes:
        try:
            found |= {Path(f.path).parent for f in process.open_files() if "/orhpc-state-" in f.path}
        except psutil.NoSuchProcess:
            continue
    return found


def _sockets_of(process: psutil.Process) -> list[str]:
    try:
        return [str(c.laddr) for c in process.net_connections("unix") if c.laddr]
    except psutil.NoSuchProcess:
        return []
