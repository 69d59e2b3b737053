"""A SLURM cluster of four nodes on this machine: real daemons, each node in its own namespaces.

Needs root on Debian with the packages slurm-wlm, munge and iproute2.  All files are in one folder, every
process is ended by pid, and one network bridge is created and removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from orhpc.launch.slurm.features import parse_version
from tests.slurm.cluster_files import CONF, INIT

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip")
PACKAGES = "slurm-wlm munge iproute2"
NODES = 4
NOT_THE_JOBS = ("SLURM_", "SBATCH_", "GLOO_", "NCCL_")
"""Variables of this process that jobs do not inherit: other tests in it have trained over loopback."""
_NAMESPACES = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child=KILL"]
_BRIDGE = "orhpc0"
NET = "10.78.0"
_LOCK = Path("/tmp/orhpc-slurm.lock")
"""Lock held while a cluster runs: two clusters would use the same network."""
_RESTART_S = 5.0


def missing() -> str | None:
    """One line with the reason why the cluster cannot be started here; None if it can."""
    if os.geteuid():
        return "not root"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install {PACKAGES}"
        # In a container, root may not be allowed to create namespaces and bridges.
    trials = [["unshare", *_NAMESPACES, "true"], ["ip", "link", "add", "orhpcv9", "type", "bridge"]]
    failed = [t for t in trials if subprocess.run(t, capture_output=True, check=False).returncode]
    ip("link", "del", "orhpcv9", check=False)
    return f"not permitted: {' '.join(failed[0])}" if failed else None


def release() -> tuple[int, int] | None:
    """Release of this machine's slurmctld, such as (22, 5); None if it names none."""
    return parse_version(
        subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    )


def leave_out(reason: str) -> NoReturn:
    """Report tests that cannot run here: a failure in CI, one line elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def wait_until(
    condition: Callable[[], object], timeout: float, what: str, report: Callable[[], str] = str
) -> object:
    """Poll until a condition is true; on a timeout, ``report`` returns additional text for the error."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout:.0f} s: {what}\n{report()}")
        time.sleep(0.2)
    return value


class Cluster:
    """The running cluster; use :func:`running_cluster`."""

    def __init__(
        self, root: Path, *, user_signal: bool = True, memory_limits: bool = False, expedited: bool = False
    ) -> None:
        self.root = root
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(NOT_THE_JOBS)},
            "SLURM_CONF": str(root / "slurm.conf"),
            "WANDB_MODE": "offline",
        }
        self.shared = root / "shared"
        """A folder that all nodes share."""
        chosen = {"preempt_send_user_signal": user_signal, "enable_expedited_requeue": expedited}
        self._write([name for name, wanted in chosen.items() if wanted], memory_limits)

    def _write(self, parameters: list[str], memory_limits: bool) -> None:
        for name in ("state", "spool", "log", "dev", "shared", *(f"tmp/n{i}" for i in range(NODES))):
            (self.root / name).mkdir(parents=True)
        for i in range(NODES):
            (self.root / f"tmp/n{i}").chmod(0o1777)
        for i in range(8):
            os.mknod(self.root / f"dev/nvidia{i}", 0o20666, os.makedev(1, 3))
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(
            root=self.root, host=host, net=NET, last=NODES - 1,
            parameters=f"SlurmctldParameters={','.join(parameters)}" if parameters else "",
            proctrack="proctrack/cgroup" if _cgroup_v1() else "proctrack/linuxproc",
            task="task/cgroup" if memory_limits else "task/none",
        )  # fmt: skip
        (self.root / "slurm.conf").write_text(conf)
        (self.root / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=n[0-{NODES - 1}] Name=gpu File={self.root}/dev/nvidia[0-7]\n"
        )
        (self.root / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\nConstrainCores=no\n"
            f"ConstrainDevices=no\nConstrainRAMSpace={'yes' if memory_limits else 'no'}\n"
        )
        names = [f"{NET}.1{i} n{i}" for i in range(NODES)]
        (self.root / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{NET}.1 {host}", *names, ""]))
        (self.root / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        (self.root / "init.sh").write_text(INIT.format(root=self.root, visible=_visible()))
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def start(self) -> None:
        ip("link", "del", _BRIDGE, check=False)  # left by a killed cluster
        ip("link", "add", _BRIDGE, "type", "bridge")
        ip("addr", "replace", f"{NET}.1/24", "dev", _BRIDGE)
        ip("link", "set", _BRIDGE, "up")
        r = self.root
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={r}/munge.key", f"--socket={r}/munge.sock",
            f"--pid-file={r}/munged.pid", f"--log-file={r}/log/munged.log", f"--seed-file={r}/munged.seed",
        )  # fmt: skip
        wait_until((r / "munge.sock").exists, 10, "munged")
        self._controller = self._daemon("slurmctld", "-D", "-c")
        for i in range(NODES):
            self.power_on(i)
        wait_until(lambda: self.node_states() == ["idle"] * NODES, 30, "idle nodes", self.report)

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.root / f"log/{command[0]}.out").open("ab") as log:
            daemon = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._daemons.append(daemon)
        return daemon

    def stop_controller(self) -> None:
        """Have slurmctld save its state and exit, as for an upgrade."""
        self._controller.terminate()
        self._controller.wait(120)
        self._daemons.remove(self._controller)

    def start_controller(self) -> None:
        """Restart slurmctld from its saved state."""
        self._controller = self._daemon("slurmctld", "-D")
        wait_until(self.node_states, 60, "slurmctld", self.report)

    def power_on(self, i: int) -> None:
        """Boot node ``n<i>``."""
        with (self.root / f"log/init.n{i}.out").open("wb") as log:
            shell = subprocess.Popen(
                ["unshare", *_NAMESPACES, "bash", str(self.root / "init.sh"), f"n{i}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        init = int(str(wait_until(lambda: children.read_text().split(), 10, f"init of n{i}")[0]))  # type: ignore[index]
        self._nodes[i] = (shell, init)
        ip("link", "del", f"orhpcv{i}", check=False)
        ip("link", "add", f"orhpcv{i}", "type", "veth", "peer", "name", "eth0", "netns", str(init))
        ip("link", "set", f"orhpcv{i}", "master", _BRIDGE, "up")
        inside = f"ip addr add {NET}.1{i}/24 dev eth0; ip link set eth0 up; ip route add default via {NET}.1"
        subprocess.run(["nsenter", "-t", str(init), "-n", "sh", "-c", inside], check=True)

    def power_off(self, i: int) -> None:
        """Send SIGKILL to the node's pid 1: the kernel ends all its processes at once."""
        shell, init = self._nodes.pop(i)
        os.kill(init, signal.SIGKILL)
        shell.wait()

    def kill_slurmd(self, i: int) -> None:
        """Send SIGKILL only to slurmd; the tasks on the node continue."""
        inner = (self.root / f"slurmd.n{i}.inner").read_text().strip()
        self.on_node(i, "kill", "-KILL", inner)

    def enter(self, i: int) -> list[str]:
        """Command prefix that runs a command on a node."""
        return ["nsenter", "-t", str(self._nodes[i][1]), "-n", "-p", "-m"]

    def on_node(self, i: int, *command: str) -> str:
        """Run a command on a node, outside of any job; returns its output."""
        return subprocess.run(
            [*self.enter(i), *command], check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def start_slurmd(self, i: int) -> None:
        """Restart a killed slurmd on a node like a service manager does: until it keeps running.

        A slurmd that starts while tasks of the killed one are still ending may exit at once.
        """
        asked = -_RESTART_S

        def works() -> bool:
            nonlocal asked
            if time.monotonic() > asked + _RESTART_S and not self._slurmd_runs(i):
                asked = time.monotonic()
                os.kill(self._nodes[i][1], signal.SIGUSR1)
            return self.node_states()[i] in ("idle", "allocated", "mixed")

        wait_until(works, 90, f"slurmd of n{i}", self.report)

    def _slurmd_runs(self, i: int) -> bool:
        inner = (self.root / f"slurmd.n{i}.inner").read_text().strip()
        inside = ["nsenter", "-t", str(self._nodes[i][1]), "-p", "-m", "kill", "-0", inner]
        return subprocess.run(inside, capture_output=True, check=False).returncode == 0

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root", timeout=60)
        for i in list(self._nodes):
            self.power_off(i)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        ip("link", "del", _BRIDGE, check=False)
        for base in Path("/sys/fs/cgroup").glob("*/slurm*"):
            for folder in sorted((p for p in base.rglob("*") if p.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                base.rmdir()

    def run(self, *command: str, timeout: float = 600, **more: object) -> subprocess.CompletedProcess[str]:
        """Run a command as on a login node; ``orhpc launch`` imports for half a minute on a busy machine."""
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **more,
        )  # type: ignore[call-overload,no-any-return]

    def node_states(self) -> list[str]:
        result = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T")
        return result.stdout.split()

    def state(self, job: str) -> str:
        match = re.search(r"JobState=(\S+)", self.run("scontrol", "show", "job", "-o", job).stdout)
        return match[1] if match else "GONE"

    def report(self) -> str:
        """The controller's state, for the message of a failed test."""
        queue = self.run("squeue", "--states=all", "--format=%i %P %T %r %S %e %N").stdout
        log = (self.root / "log/slurmctld.log").read_text(errors="replace")[-3000:]
        daemons = [
            f"{p.name}: {p.read_text(errors='replace')[-600:]}" for p in self.root.glob("log/slurmd.*.out")
        ]
        return "\n".join([f"nodes: {self.node_states()}", queue, log, *daemons])

    def processes(self, begun_before: float = float("inf")) -> list[str]:
        """Command lines of processes on the nodes, except those of SLURM and of the nodes themselves.

        ``begun_before``: only processes that were started before this time, in seconds since the epoch.
        """
        own = {Path(f"/proc/{init}/ns/pid").readlink() for _, init in self._nodes.values()}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    )
                    if (entry / "ns/pid").readlink() not in own or not line or _begun(entry) >= begun_before:
                        continue
                except OSError:
                    continue
                if not re.match(r"(slurmd |slurmstepd|sleep 0\.5|bash /\S+/init\.sh)", line):
                    found.append(line)
        return found

    def pids(self, i: int, title: str) -> list[int]:
        """Process ids, in this machine's namespace, of a node's processes whose title begins so."""
        own, found = Path(f"/proc/{self._nodes[i][1]}/ns/pid").readlink(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                of_node = entry.name.isdigit() and (entry / "ns/pid").readlink() == own
                if of_node and (entry / "cmdline").read_bytes().startswith(title.encode()):
                    found.append(int(entry.name))
        return found

    def copies(self, i: int, rank: int) -> list[Path]:
        """Files of a node's copies of a trainer rank's state."""
        memory = Path(f"/proc/{self._nodes[i][1]}/root/dev/shm")
        return list(memory.glob(f"orhpc-state-*/rank_{rank:05d}.*"))

    def end_jobs(self) -> None:
        """End what a failed test has left, which would fail the next one too."""
        if jobs := self.run("squeue", "-h", "-o", "%A").stdout.split():
            self.run("scancel", *jobs)
            wait_until(lambda: not self.run("squeue", "-h").stdout, 150, "an empty queue", self.report)
            wait_until(lambda: not self.processes(), 60, "nodes without processes", self.report)
            for node in self._nodes:
                self.clear_files(node)

    def clear_files(self, i: int) -> None:
        """Clear a node's /tmp and shared memory, as an administrator does after a power failure."""
        memory = Path(f"/proc/{self._nodes[i][1]}/root/dev/shm")
        for folder in (*(self.root / f"tmp/n{i}").glob("orhpc-[!s]*"), *memory.glob("orhpc-state-*")):
            shutil.rmtree(folder)

    def files(self) -> list[str]:
        """Files of jobs in the nodes' own temporary folders and shared memory."""
        found = [f for i in range(NODES) for f in (self.root / f"tmp/n{i}").glob("orhpc-[!s]*")]
        for _, init in self._nodes.values():
            found += Path(f"/proc/{init}/root/dev/shm").iterdir()
        return [str(f) for f in found]


def _visible() -> str:
    """Folders that jobs read on every node: this repository and those of the interpreter."""
    return " ".join(map(str, {Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix)}))


def _begun(process: Path) -> float:
    """Start time of a process, in seconds since the epoch."""
    ticks = int((process / "stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def die_with_parent() -> None:
    """The kernel kills this process when the test run ends, in any way."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def _cgroup_v1() -> bool:
    return Path("/sys/fs/cgroup/freezer").is_dir()


def can_limit_memory() -> bool:
    """Whether this machine has the control groups with which this release of SLURM limits memory."""
    return Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").is_file()


@contextlib.contextmanager
def running_cluster(root: Path, **settings: bool) -> Iterator[Cluster]:
    """Start a cluster when no other runs on this machine; it is removed at the end of the block."""
    with _LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = Cluster(root, **settings)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


if __name__ == "__main__":  # a cluster for experiments:  python -m tests.slurm.cluster FOLDER
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    with running_cluster(folder) as trial:
        print(f"export SLURM_CONF={trial.environment['SLURM_CONF']}", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.pause()
