"""``orhpc doctor`` and ``orhpc files``: their output on machines of several kinds."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orhpc.commands import doctor
from orhpc.commands.cli import main
from orhpc.commands.doctor import examine
from orhpc.commands.files import packaged
from orhpc.config.files import load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK, EXIT_PREFLIGHT
from orhpc.process import driver_gpus
from tests.programs import write_program

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose PATH has only the programs of the test."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", "HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def found(*arguments: str) -> dict[str, str]:
    config = load_config(arguments[0], arguments[1:]) if arguments else None
    return {f.what: f"{f.verdict} {f.line}" for f in examine(config)}


def gpu(folder: Path, driver: str, capability: str = "9.0", memory: int = 81559) -> None:
    write_program(folder, "nvidia-smi", f"echo 'NVIDIA H100 80GB HBM3, {memory}, {driver}, {capability}'")
    driver_gpus._listed_by.cache_clear()  # a process asks once


def test_a_cpu_config_needs_nothing_more_on_a_machine_without_gpus() -> None:
    rows = found("tiny.yaml")
    assert rows["orhpc[run]"].startswith("ok")
    assert rows["GPUs"].startswith("--")
    assert rows["SLURM"].startswith("-- no sbatch here: orhpc launch --local")
    assert not [line for line in rows.values() if line.startswith("BAD")]


def test_a_missing_sglang_is_reported_with_the_install_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(tmp_path, "580.95.05")
    assert main(["doctor"]) == EXIT_PREFLIGHT
    lines = capsys.readouterr().out.splitlines()
    (line,) = [x for x in lines if x.startswith("BAD  orhpc[sglang]")]
    command = line.split(": ", 2)[2]
    assert command == "pip install 'orhpc[gpu]' -c \"$(orhpc files torch-2.11.txt)\""
    assert "BAD  torch: is a build without CUDA: install it from an index with CUDA builds" in lines


def test_a_driver_older_than_torch_s_cuda_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    gpu(tmp_path, "550.54.15", capability="8.0")
    rows = found()
    assert rows["driver"] == "BAD 550.54.15 is older than 580, which torch's CUDA 13.0 needs"
    assert rows["FP8"].startswith("-- compute capability 8.0")
    gpu(tmp_path, "580.95.05")
    assert found()["CUDA"] == "ok torch's 13.0 and driver 580.95.05"


def test_incompatible_versions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata,
        "version",
        lambda name: "4.0.0" if name == "huggingface-hub" else real(name),
    )
    assert re.match(r"BAD transformers wants huggingface-hub<[\d.]+,.* here is 4\.0\.0", found()["versions"])


@pytest.mark.parametrize(
    ("cublas", "named"), [("13.1.0.3", True), ("13.8.1.7", False), ("13.10.0.20", False)]
)
def test_a_cublas_too_old_for_products_of_all_experts_is_named(
    monkeypatch: pytest.MonkeyPatch, cublas: str, named: bool
) -> None:
    installed = importlib.metadata.version
    versions = {"transformer-engine": "2.20.2", "nvidia-cublas": cublas}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or installed(name))
    lines = [finding.line for finding in doctor._cublas()]
    assert len(lines) == named
    assert all(cublas in line and "pip install --no-deps 'nvidia-cublas>=13.8.1'" in line for line in lines)


def test_a_starlette_release_that_bypasses_the_key_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version
    versions = {"starlette": "1.0.0", "sglang": "0.5.16", "torch-memory-saver": "0.0.9"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or installed(name))
    missing, wrong = doctor.missing_and_wrong("orhpc", "sglang")
    assert missing == [] and wrong == ["starlette 1.0.0 (wants >=1.0.1)"]


def test_the_python_version_that_megatron_needs_is_reported() -> None:
    missing, wrong = doctor.missing_and_wrong("orhpc", "megatron")
    if sys.version_info >= (3, 12):
        assert not [w for w in wrong if w.startswith("Python")]
    else:
        assert wrong[0].startswith(f"Python {sys.version.split()[0]} (megatron-core wants >= 3.12)")
    assert missing == [] or "transformer-engine" in missing


def test_a_login_node_needs_no_packages_of_the_compute_nodes(tmp_path: Path) -> None:
    write_program(tmp_path, "sbatch", "exit 0")
    write_program(tmp_path, "sinfo", "echo 'gpu* gpu:h100:4 12'")
    rows = found("default.yaml")
    assert rows["orhpc[sglang]"].startswith("--")
    assert rows["SLURM"] == "ok gpu* 12 nodes with gpu:h100:4"


def test_slurm_programs_without_a_cluster_are_reported_in_one_short_line(tmp_path: Path) -> None:
    write_program(tmp_path, "sbatch", "exit 0")
    write_program(tmp_path, "sinfo", "echo 'sinfo: error: Unknown host' >&2; echo 'sinfo: fatal' >&2; exit 1")
    line = "-- no jobs from here, only orhpc launch --local: sinfo: error: Unknown host"
    assert found("tiny.yaml")["SLURM"] == line


def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/proc/1/cache")
    assert (
        found()["models"]
        == "BAD /proc/1/cache/hub cannot be written: set HF_HOME to a folder that you can write"
    )


def test_a_shared_cache_is_only_read_in_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/proc/1")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert found()["models"].startswith("BAD")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found()["models"] == "ok in /proc/1, which is only read (HF_HUB_OFFLINE is set)"


def test_files_lists_every_packaged_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["files"]) == EXIT_OK
    listed = capsys.readouterr().out
    repository = [p.name for f in ("configs", "slurm") for p in (ROOT / f).iterdir()]
    assert set(packaged()) >= {*repository, "torch-2.11.txt", "torch-2.14.txt", "Dockerfile", "apptainer.def"}
    assert all(f"  {name}\n" in listed for name in packaged())
    assert main(["files", "torch-2.11.txt"]) == EXIT_OK
    assert Path(capsys.readouterr().out.strip()).read_text().count("\ntorch==2.11.0\n") == 1
    assert main(["files", "torch-2.12"]) == EXIT_CONFIG
    assert "did you mean torch-2.1" in capsys.readouterr().err


def test_recipes_name_this_release_and_existing_package_sets() -> None:
    release = importlib.metadata.version("orhpc")
    assert packaged()["apptainer.def"].read_text().count(f"orhpc-{release}-py3-none-any.whl") == 4
    for name in ("Dockerfile", "apptainer.def"):
        text = packaged()[name].read_text()
        (default,) = set(re.findall(r"TORCH=([\d.]+)$", text, re.MULTILINE))
        assert f"torch-{default}.txt" in packaged()
    subprocess.run(["/bin/sh", "-n", str(packaged()["enroot.sh"])], check=True)


@pytest.mark.slow
def test_doctor_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from orhpc.commands.cli import main; main(['doctor']); "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=dict(os.environ))


def test_packages_without_bytecode_are_named_with_the_command_that_compiles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "ray"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    real = doctor._origin
    here = {name: str(tmp_path / name / "__init__.py") for name in ("torch", "ray")}
    monkeypatch.setattr(doctor, "_origin", lambda name: here.get(name))
    line = found()["bytecode"]
    assert line.startswith("-- none of torch, ray, so that")
    command = re.search(r"for seconds: (.*) \(where", line)
    assert command is not None
    subprocess.run(command[1].split(), check=True)
    assert "bytecode" not in found()
    assert real("orhpc.config") == str(ROOT / "orhpc/config/__init__.py")
    assert real("orhpc_is_not_installed") is None
    assert real("orhpc_is_not_installed.core") is None
