"""Checks of a node and of external servers: each verdict is one correct line."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT, PreflightError
from orhpc.launch.__main__ import submit
from orhpc.launch.checks import commit_space, host_memory, internet, preflight
from orhpc.launch.slurm.job import Job
from orhpc.process.memory_limit import free_bytes, memory_bytes
from orhpc.rundir import RunDir
from tests.model_configs import REAL
from tests.model_folder import write_model_folder
from tests.programs import write_program

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "NO_PROXY", "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listening() -> Iterator[int]:
    """A port on which a process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def silent_port() -> int:
    """A port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def config_of(url: str | None = None, **sections: object) -> Config:
    environment = {"serve": "letters"} if url is None else {"url": url}
    tree: dict[str, object] = {"model": {"path": "bundled:tiny"}, "environments": {"e": environment}}
    tree |= {"placement": {"device": "cpu", "devices_per_node": 1}, "engine": {"backend": "cpu", "tp": 1}}
    return Config.model_validate(tree | sections)


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program first on the PATH."""
    write_program(folder, name, text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# --- GPUs -------------------------------------------------------------------------------------------


def nvlink_status(counts: list[tuple[str, int]]) -> str:
    """The output of nvidia-smi for GPUs (model, active links) with 18 links each."""
    lines: list[str] = []
    for index, (model, active) in enumerate(counts):
        lines.append(f"GPU {index}: {model} (UUID: GPU-{index})")
        lines += [f"\t Link {n}: {'26.562 GB/s' if n < active else '<inactive>'}" for n in range(18)]
    return "\n".join(lines) + "\n"


@given(st.lists(st.tuples(st.sampled_from(["NVIDIA H100", "NVIDIA A100"]), st.integers(0, 18)), max_size=8))
def test_a_gpu_with_fewer_links_than_the_others_is_bad(counts: list[tuple[str, int]]) -> None:
    models = {model: [n for m, n in counts if m == model] for model, _ in counts}
    uneven = any(len(set(links)) > 1 for links in models.values())
    if uneven:
        with pytest.raises(PreflightError, match=r"^GPU \d has \d+ active NVLinks, others have \d+$"):
            preflight.nvlink_verdict(nvlink_status(counts))
    else:
        most = max((n for _, n in counts), default=0)
        expected = f"{most} links a GPU are active" if most else "no NVLink here"
        assert preflight.nvlink_verdict(nvlink_status(counts)) == expected


@pytest.mark.parametrize(
    ("rows", "output"),
    [
        (["H100, 0, Not Active"] * 2, "ok   gpus: 2 x H100"),
        (["H100, [N/A], Not Active"] * 2, "ok   gpus: 2 x H100"),
        (["H100, 0, Not Active"], "BAD  gpus: found 1, need 2"),
        (["H100, 0, Not Active", "H100, 3, Not Active"], "BAD  gpus: GPU 1: 3 uncorrected memory errors"),
        (
            ["H100, 0, Active", "H100, 0, Not Active"],
            "BAD  gpus: GPU 0: the hardware has slowed down its clocks",
        ),
    ],
)
def test_gpus(rows: list[str], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(rows)
    program(tmp_path, "nvidia-smi", f"[ $1 = nvlink ] || cat <<END\n{text}\nEND", monkeypatch)
    config = config_of(placement={"device": "cuda", "devices_per_node": 2}, engine={"tp": 2})
    verdicts = preflight.node_verdicts(config, job(), tmp_path)
    lines = [f"{'ok ' if v.good else 'BAD'}  {v.check}: {v.line}" for v in verdicts]
    assert next(line for line in lines if "  gpus: " in line).startswith(output)
    assert "ok   nvlink: no NVLink here" in lines


# --- the node ---------------------------------------------------------------------------------------


def job() -> Job:
    return Job("7", 0, 0, 1, "n0", "7", Path("/tmp"))


def test_a_wrong_clock_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def clock() -> preflight.Verdict:
        return next(v for v in preflight.node_verdicts(config_of(), job(), tmp_path) if v.check == "clock")

    assert clock().good
    real = preflight.time.time
    monkeypatch.setattr(preflight, "time", SimpleNamespace(time=lambda: real() - 90))
    assert not clock().good
    assert clock().line.startswith("90 s away from the clock of ")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_node_is_excluded_and_an_unreachable_server_excludes_none(
    tmp_path: Path, silent_port: int
) -> None:
    preflight.require(config_of(), job(), RunDir(tmp_path))
    sick = config_of(slurm={"health_command": "echo one; echo two; exit 4"})
    with pytest.raises(preflight.BadNode, match=r"^n0: health command: exit 4: two$"):
        preflight.require(sick, job(), RunDir(tmp_path))
    # No other node would reach the server either.
    with pytest.raises(PreflightError, match=r"^n0: internet: environments\.e: 127\.0\.0\.1 cannot be"):
        preflight.require(config_of(f"http://127.0.0.1:{silent_port}"), job(), RunDir(tmp_path))


def test_a_node_without_host_memory_for_offloaded_state_is_refused_in_one_line(tmp_path: Path) -> None:
    """It does not count as a bad node: another node like it would not suffice either."""
    write_model_folder(tmp_path, REAL["Qwen3-30B-A3B"][0])
    wanted = {"model": {"path": str(tmp_path)}, "engine": {"tp": 2}}
    place = {"device": "cuda", "devices_per_node": 8, "host_memory_gib": 600.0}
    output = r"needs 341\.\d+ \(while engines .* = 682\.\d+ GiB .* has 600\.00 GiB"
    with pytest.raises(PreflightError, match=output):
        host_memory.check(config_of(placement=place, **wanted))
    with pytest.raises(PreflightError, match=output):  # before a job is submitted
        submit(config_of(placement=place, **wanted), "none.yaml", [])
    assert "host_memory_gib: null" in host_memory.check_configured(
        config_of(placement={**place, "host_memory_gib": None}, **wanted)
    )
    enough = host_memory.check(config_of(placement={**place, "host_memory_gib": 700.0}, **wanted))
    assert enough == "700 GiB, 682 needed in addition to the processes"
    unknown = host_memory.check(config_of(placement=place, engine={"tp": 2}, model={"path": "not/here"}))
    assert unknown.startswith("600 GiB; the need is not known: ")
    assert host_memory.check(config_of()).endswith(" GiB")


def test_a_run_whose_commits_do_not_fit_the_disk_is_refused_before_its_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30.53 billion parameters; master weights and moments take 12 bytes for each."""
    write_model_folder(tmp_path, REAL["Qwen3-30B-A3B"][0])
    real, free = shutil.disk_usage(tmp_path), 1098e9

    def usage(path: Path) -> Any:
        return real._replace(free=int(free))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    here = {"root": str(tmp_path / "runs"), "name": "x"}
    config = config_of(model={"path": str(tmp_path)}, run=here)
    rundir = RunDir(tmp_path / "runs" / "x")
    with pytest.raises(
        PreflightError, match=r"1098\.0 GB free, .* take 1099\.2 GB \(3 of 366\.4 GB at once, 0 of"
    ):
        commit_space.check(config, rundir)
    with pytest.raises(PreflightError, match=r"lower checkpoint\.keep"):
        submit(config, "none.yaml", [])
    with pytest.raises(PreflightError, match=r"^n0: run directory: .*GB free, commits take"):
        preflight.require(config, job(), rundir)
    never = config_of(model={"path": str(tmp_path)}, run=here, checkpoint={"save_interval": None})
    assert commit_space.check(never, rundir).endswith("GB free")
    free = 1100e9
    assert commit_space.check(config, rundir).endswith("commits take 1099.2 GB")
    rundir.create()
    attempt = rundir.begin_attempt()
    rundir.record_start(attempt, None)
    (rundir.checkpoints / f"step_4.a{attempt:03d}").mkdir()
    free = 733e9  # one commit exists, so space for two more suffices
    assert commit_space.check(config, rundir).endswith("commits take 732.8 GB")
    free = 1e9  # space may be freed: a run with a commit is not refused
    assert commit_space.check(config, rundir).endswith("1 of them there): they will fail")


def test_the_lowest_memory_limit_of_machine_and_job_counts(tmp_path: Path) -> None:
    machine, own, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    machine.write_text("MemTotal:       1024 kB\nMemFree: 1 kB\n")
    own.write_text("0::/slurm/job_7/step_0\n")
    job = root / "slurm/job_7"
    (job / "step_0").mkdir(parents=True)
    assert memory_bytes(own, root, machine) == 1 << 20
    (root / "slurm/memory.max").write_text("4096\n")  # the limit of all jobs
    (job / "memory.max").write_text("500000\n")
    (job / "step_0/memory.max").write_text("max\n")
    assert memory_bytes(own, root, machine) == 500000
    own.write_text("5:cpu,memory:/slurm/job_7/step_0\n")
    old = root / "memory/slurm/job_7"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("300000\n")
    assert memory_bytes(own, root, machine) == 300000
    assert memory_bytes(own, root, tmp_path / "none") == 300000
    assert memory_bytes(tmp_path / "none", root, tmp_path / "none") == 0


def test_free_memory_counts_the_files_that_can_be_reclaimed_but_no_shared_memory(tmp_path: Path) -> None:
    machine, own, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    machine.write_text("MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    own.write_text("0::/slurm/job_7/step_0\n")
    job = root / "slurm/job_7"
    (job / "step_0").mkdir(parents=True)
    assert free_bytes(own, root, machine) == 1 << 20
    (job / "memory.max").write_text("500000\n")
    (job / "memory.current").write_text("400000\n")
    assert free_bytes(own, root, machine) == 100000
    (job / "memory.stat").write_text("anon 1\nfile 50000\nshmem 20000\n")
    assert free_bytes(own, root, machine) == 130000
    own.write_text("5:cpu,memory:/slurm/job_7/step_0\n")
    old = root / "memory/slurm/job_7"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("300000\n")
    (old / "memory.usage_in_bytes").write_text("299000\n")
    (old / "memory.stat").write_text("cache 7\ntotal_cache 500\ntotal_shmem 100\n")
    assert free_bytes(own, root, machine) == 1400
    assert free_bytes(tmp_path / "none", root, tmp_path / "none") == 0


def test_the_command_prints_one_line_per_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "1", "SLURMD_NODENAME": "n0"}
    for name, value in {**names, "ORHPC_JOB_FOLDER": "/tmp"}.items():
        monkeypatch.setenv(name, value)
    config = str(Path(__file__).parents[3] / "configs/tiny.yaml")
    monkeypatch.chdir(tmp_path)
    assert preflight.main([config]) == EXIT_OK
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["n0", "ok"]] * 7
    assert preflight.main([config, "slurm.health_command=exit 1"]) == EXIT_PREFLIGHT
    assert "n0  BAD  health command: exit 1: no output\n" in capsys.readouterr().out


# --- external servers
# ----------------------------------------------------------------------------------------


def test_a_run_without_external_servers_contacts_none() -> None:
    assert internet.wanted(config_of()) == []
    assert internet.survey(config_of()) == internet.Survey("no external server is needed", {})
    prompts = {"prompts": {"data": {"path": "train.jsonl"}}}  # served by the job, as with serve
    assert internet.wanted(config_of(environments=prompts)) == []


def test_w_and_b_is_offline_if_it_cannot_be_reached(
    listening: int, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening}")
    assert internet.survey(config_of()) == internet.Survey("127.0.0.1 reached", {})
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent_port}")
    found = internet.survey(config_of())
    assert found.switches == {"WANDB_MODE": "offline"}
    assert "127.0.0.1 not reached" in found.line
    assert internet.wanted(config_of(wandb={"enabled": False})) == []


def test_a_model_on_the_hub_is_refused_unless_it_is_on_disk(
    tmp_path: Path, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = config_of(model={"path": "some/model"})
    with pytest.raises(PreflightError, match=r"model\.path: some/model: 127\.0\.0\.1 cannot be"):
        internet.survey(config)


def test_only_the_proxy_has_to_be_reachable(
    listening: int, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("http://environment.invalid:80")
    with pytest.raises(PreflightError, match=r"environment\.invalid cannot be reached"):
        internet.survey(config)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listening}")
    assert internet.survey(config).line == "environment.invalid reached"
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{silent_port}")
    with pytest.raises(PreflightError, match=f"127.0.0.1:{silent_port}"):
        internet.survey(config)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert internet.survey(config_of(f"http://127.0.0.1:{listening}")).line == "127.0.0.1 reached"


def test_the_command_checks_the_job_s_number_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "3", "ORHPC_JOB_FOLDER": "/tmp"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []
    monkeypatch.setattr(
        preflight, "node_verdicts", lambda config, job, folder: seen.append(config.placement.nodes) or []
    )
    assert preflight.main([str(Path(__file__).parents[3] / "configs/tiny.yaml")]) == EXIT_OK
    assert seen == [3]
