"""``--spares`` and ``slurm.spares``, from the command line to the nodes of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from orhpc.launch.command_line import nodes_of_job
from orhpc.launch.node import launcher

CONFIG = str(Path(__file__).parents[3] / "configs/tiny.yaml")


def test_the_option_requests_more_nodes_than_the_placement_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--nodes", "4", "--spares", "1", CONFIG, f"run.root={tmp_path}", "--dry-run"]
    assert main(words) == EXIT_OK
    shown = capsys.readouterr().out
    assert "#SBATCH --nodes=5\n" in shown
    assert "#SBATCH --no-kill\n" in shown
    assert " placement.nodes=4 slurm.spares=1\n" in shown
    placement = shown.split("# placement\n")[1]
    assert placement.count("address: address-of-node") == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--local", "--spares", "1"], "--spares: --local runs on this machine alone"),
        (["drill", "--local", "--spares", "1"], "--spares: --local runs on this machine alone"),
        (["launch", "--spares", "1", "--dry-run"], "slurm.spares: spares cannot replace a job's first node"),
        (["launch", "--nodes", "2", "--spares", "-1", "--dry-run"], "slurm.spares"),
    ],
)
def test_spares_that_cannot_help_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*words, CONFIG, f"run.root={tmp_path}"]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_nodes_that_take_part_are_those_of_the_job_without_the_spares(tmp_path: Path) -> None:
    written = tmp_path / "x.yaml"
    written.write_text(f"extends: {CONFIG}\nslurm: {{spares: 2}}\n")
    assert nodes_of_job(CONFIG, [], 5) == "placement.nodes=5"
    assert nodes_of_job(CONFIG, ["slurm.spares=1"], 5) == "placement.nodes=4"
    assert nodes_of_job(str(written), [], 5) == "placement.nodes=3"
    with pytest.raises(ConfigError, match=r"slurm\.spares: 2 of the job's 2 nodes leave none"):
        nodes_of_job(str(written), [], 2)


@pytest.mark.parametrize(
    ("spares", "script", "nodes", "message"),
    [
        (1, "1", "4", None),
        (0, None, "4", None),
        (1, None, "4", "the script does not read it from a config file"),
        (1, "0", "4", "the script does not read it from a config file"),
        (0, "1", "4", "the script does not read it from a config file"),
        (1, "1", "2", "spares cannot replace a job's first node"),
    ],
)
def test_launcher_and_batch_script_agree_on_the_spares(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spares: int,
    script: str | None,
    nodes: str,
    message: str | None,
) -> None:
    """Otherwise srun would end the step with the first node that is lost, or with none."""
    folder = tmp_path / "job"
    folder.mkdir()
    variables = {
        "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NNODES": nodes, "SLURMD_NODENAME": "n1",
        "ORHPC_JOB_FOLDER": str(folder),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ORHPC_SPARES", raising=False)
    if script is not None:
        monkeypatch.setenv("ORHPC_SPARES", script)
    reached: list[int] = []
    monkeypatch.setattr(
        launcher, "other_node", lambda job, config: reached.append(config.placement.nodes) or 0
    )
    path = tmp_path / "x.yaml"
    path.write_text(f"extends: {CONFIG}\nslurm: {{spares: {spares}}}\n")
    code = launcher.main([str(path), f"run.root={tmp_path}"])
    assert code == (EXIT_OK if message is None else EXIT_CONFIG)
    assert reached == ([int(nodes) - spares] if message is None else [])
    assert message is None or message in capsys.readouterr().err
