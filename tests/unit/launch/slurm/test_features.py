"""What newer releases of SLURM offer is used where the cluster has it.

The SLURM of the other tests has neither; here, programs answer as those of 25.11 do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.config import Config
from orhpc.launch.slurm import features, scheduler, submission
from orhpc.rundir import RunDir

ALLOWED = "SlurmctldParameters     = enable_configless,enable_expedited_requeue"
NO_LINE = "SlurmctldHost[0]        = head"


def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, config: str, code: int = 0) -> None:
    """Put a SLURM of a release and a configuration on the path."""
    for name, text in {
        "sbatch": f'[ "$1" = --version ] && echo "{version}"',
        "scontrol": f'[ "$*" = "show config" ] && echo "Configuration data as of now\n{config}"; exit {code}',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def config_of(**settings: object) -> Config:
    tree = {"environments": {"a/b": {"serve": "letters"}}, "slurm": settings, "run": {"name": "x"}}
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ("slurm 25.11.2", (25, 11)),
        ("slurm-wlm 22.05.8", (22, 5)),
        ("slurm 26.05.0-0rc1", (26, 5)),
        ("?", None),
    ],
)
def test_the_release_is_that_of_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, version: tuple[int, int] | None
) -> None:
    slurm(tmp_path, monkeypatch, answer, NO_LINE)
    assert features.version() == version


def test_without_slurm_there_is_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert features.version() is None


@pytest.mark.parametrize(
    ("version", "config", "code", "line"),
    [
        ("slurm 25.11.0", ALLOWED, 0, None),
        ("slurm 26.05.1", "SlurmctldParameters = enable_expedited_requeue", 0, None),
        ("slurm 25.05.7", ALLOWED, 0, "needs SLURM 25.11, and this is 25.05; the job is requeued through"),
        ("slurm-wlm 22.05.8", ALLOWED, 0, "needs SLURM 25.11, and this is 22.05"),
        ("slurm 25.11.0", NO_LINE, 0, "the site does not allow it (SlurmctldParameters=enable_expedited_req"),
        ("slurm 25.11.0", ALLOWED.replace("enable_exp", "enable_not_exp"), 0, "the site does not allow it"),
        ("slurm 25.11.0", NO_LINE, 1, "the site does not allow it"),
        ("?", ALLOWED, 0, "the release of SLURM is not known here"),
    ],
)
def test_a_job_is_expedited_only_where_sbatch_would_accept_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    config: str,
    code: int,
    line: str | None,
) -> None:
    slurm(tmp_path, monkeypatch, version, config, code)
    said: list[str] = []
    options, _ = submission.sbatch_arguments(
        config_of(expedited_requeue=True), RunDir(tmp_path), "a.yaml", [], said.append
    )
    assert ("--requeue=expedite" in options) is (line is None)
    assert len(said) == (line is not None)
    assert (line or "") in "".join(said)


def test_without_the_setting_nothing_is_asked_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, "slurm 25.11.0", ALLOWED)
    said: list[str] = []
    assert features.requeue_options(config_of(), said.append) == said == []


@pytest.mark.parametrize(
    ("version", "name"),
    [("slurm 25.11.0", "slurm-%j-%r.out"), ("slurm 26.05.0", "slurm-%j-%r.out"),
     ("slurm 25.05.9", "slurm-%j.out"), ("?", "slurm-%j.out")],
)  # fmt: skip
def test_each_start_has_its_own_output_where_slurm_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, name: str
) -> None:
    slurm(tmp_path, monkeypatch, version, NO_LINE)
    options, _ = submission.sbatch_arguments(config_of(), RunDir(tmp_path), "a.yaml", [], print)
    assert options[:2] == ["--output", str(tmp_path / name)]


def test_a_job_that_is_being_expedited_is_still_active() -> None:
    """SLURM shows this state between the end of one start and the next."""
    assert "EXPEDITING" in scheduler.ACTIVE


def test_the_first_component_stands_for_a_heterogeneous_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """squeue names its components JOB+0 and JOB+1, and scontrol shows a line for each."""
    for name, lines in {
        "squeue": ["7+0 RUNNING", "7+1 COMPLETING", "9 PENDING", "11_3 RUNNING"],
        "scontrol": ["JobId=7 JobState=RUNNING Restarts=2", "JobId=8 HetJobId=7 JobState=PENDING Restarts=2"],
    }.items():
        program = tmp_path / name
        program.write_text("#!/bin/sh\n" + "".join(f'echo "{line}"\n' for line in lines))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    states = {"7": "RUNNING", "9": "PENDING", "11_3": "RUNNING"}
    assert scheduler.job_states(["7", "8", "9", "11_3"]) == states
    info = scheduler.job_info("7")
    assert info is not None
    assert (info.fields["JobId"], info.state, info.restarts) == ("7", "RUNNING", 2)
