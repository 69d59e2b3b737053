"""``orhpc clean``: it shows sizes, and removes what is named and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.errors import EXIT_CONFIG, EXIT_OK
from orhpc.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with eleven recorded steps, two evaluations, three attempts, an export and a profile."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text("{}\n")
    for step in range(1, 12):
        run.rollouts_of(step).mkdir()
        (run.rollouts_of(step) / "a001.worker_000.h5").write_bytes(b"x" * 10_000)
    for step in (0, 10):
        (run.rollouts / f"evaluation_{step}").mkdir()
    for _ in range(3):
        attempt = run.attempt(run.begin_attempt(kind="local"))
        (attempt / "driver.log").write_text("line\n" * 1000)
        (attempt / "outcome.json").write_text("{}")
    for folder in (run.export / "step_1", run.profile_of(2), run.checkpoints / "step_10.a001"):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"y" * 50_000)
    return run


def files(run: RunDir) -> set[str]:
    return {str(path.relative_to(run.path)) for path in run.path.rglob("*") if not path.is_symlink()}


def test_without_options_it_shows_sizes_and_removes_nothing(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    assert main(["clean", str(run.path)]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[-1] for line in lines[:-1]]
    assert set(shown) >= {"rollouts", "checkpoints", "export", "profiles", "attempts"}
    assert shown[0] == "rollouts"  # the largest
    assert files(run) == before


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["--rollouts", "2"], {f"rollouts/step_{n}" for n in range(1, 10)}),
        (["--rollouts", "1"], {*(f"rollouts/step_{n}" for n in range(1, 11)), "rollouts/evaluation_0"}),
        (["--rollouts", "50"], set()),
        (["--logs", "1"], {"attempts/001/driver.log", "attempts/002/driver.log"}),
        (["--exports"], {"export"}),
        (["--profiles"], {"profiles"}),
    ],
)
def test_only_what_is_named_is_removed(
    run: RunDir, words: list[str], gone: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    assert main(["clean", str(run.path), *words, "--dry-run"]) == EXIT_OK
    listed = capsys.readouterr().out.splitlines()
    assert files(run) == before
    assert {line.split()[-1] for line in listed[:-1]} == {str(run.path / name) for name in gone}
    assert main(["clean", str(run.path), *words]) == EXIT_OK
    expected = {name for name in before if not any(name == g or name.startswith(f"{g}/") for g in gone)}
    assert files(run) == expected
    assert {"checkpoints/step_10.a001/file", "attempts/001/outcome.json", "buffer"} <= expected


@pytest.mark.parametrize("words", [["--rollouts", "0"], ["--logs", "-1"]])
def test_the_newest_are_always_kept(
    run: RunDir, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    assert main(["clean", str(run.path), *words]) == EXIT_CONFIG
    assert "keep at least 1" in capsys.readouterr().err
    assert files(run) == before


def test_a_link_is_not_followed(run: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (run.rollouts_of(1) / "link").symlink_to(outside)
    assert main(["clean", str(run.path), "--rollouts", "1"]) == EXIT_OK
    assert (outside / "precious").exists()


def test_what_cannot_be_removed_is_not_called_removed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)  # as in a run of a colleague
    assert main(["clean", str(run.path), "--exports"]) == EXIT_CONFIG
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"orhpc: {run.export}: not removed: Permission denied\n"
