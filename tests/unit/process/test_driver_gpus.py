"""What nvidia-smi's answers say about a machine's GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orhpc.process.driver_gpus import DriverGpu, driver_gpus

H100 = "NVIDIA H100 80GB HBM3, 81559, 580.159, 9.0"


def answers(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_every_gpu_is_listed_and_the_driver_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path, monkeypatch, f"echo '{H100}'; echo '{H100}'")
    gpu = DriverGpu("NVIDIA H100 80GB HBM3", 81559, "580.159", "9.0")
    assert driver_gpus() == driver_gpus() == (gpu, gpu)
    assert (tmp_path / "asked").read_text() == "asked\n"


@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9",
        "echo 'No devices were found'",
        "echo 'NVIDIA GB10, [N/A], 580.1, 12.1'",  # memory shared with the host
    ],
)
def test_a_failure_and_devices_without_memory_of_theirs_are_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    answers(tmp_path, monkeypatch, script)
    assert driver_gpus() == ()


def test_a_gpu_that_has_fallen_off_the_bus_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "Unable to determine the device handle for GPU0000:4E:00.0: Unknown Error"
    answers(tmp_path, monkeypatch, f"echo '{H100}'; echo '{lost}'; exit 15")
    assert [gpu.name for gpu in driver_gpus()] == ["NVIDIA H100 80GB HBM3"]


def test_a_machine_without_nvidia_smi_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_gpus() == ()
