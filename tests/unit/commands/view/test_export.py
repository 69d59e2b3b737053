"""The exported page: what it contains, and what it says it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orhpc.commands.cli import main
from orhpc.commands.view.export import write_page
from orhpc.commands.view.filter import Filter
from orhpc.errors import ConfigError
from orhpc.rundir import RunDir
from tests.unit.commands.view.kit import library_of, make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def data_of(file: Path) -> dict[str, Any]:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text())
    assert block is not None
    return json.loads(block[1])


def test_everything_is_in_one_file_and_nothing_is_loaded(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["view", str(run.path), "--export", str(file)]) == 0
    data = data_of(file)
    assert data["about"]["parts"] == ["step_1", "step_2", "step_3", "evaluation_0"]
    assert (data["about"]["first"], data["about"]["left_out"]) == ("step_3", "")
    assert len(data["rollouts"]) == 19
    rest = file.read_text().replace(json.dumps(data, separators=(",", ":"), ensure_ascii=False), "")
    assert not re.search(r"""(src|href)\s*=\s*["']|https?://""", rest.split('id="data"')[0])
    assert file.read_text().count("</script>") == 5  # the data and four scripts


def test_a_group_is_written_whole_if_one_of_its_rollouts_passes(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert (
        main(
            ["view", str(run.path), "--export", str(file), "--filter", "reward:1 env:org/env1", "--step", "2"]
        )
        == 0
    )
    assert sorted(data_of(file)["rollouts"]) == ["step_2/21.0", "step_2/21.1", "step_2/21.2"]


def test_a_full_file_has_the_newest_groups_and_says_what_is_left_out(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    count, left_out = write_page(library_of(run), file, Filter(), None, 8000)
    data = data_of(file)
    assert data["about"]["parts"] == ["step_3"]
    assert len(data["rollouts"]) == count < 19
    assert "are left out" in left_out
    assert data["about"]["left_out"] == left_out


@pytest.mark.parametrize(("line", "folder"), [("step:99", "."), ("", "missing")])
def test_an_empty_or_impossible_file_is_refused(run: RunDir, tmp_path: Path, line: str, folder: str) -> None:
    with pytest.raises(ConfigError):
        write_page(library_of(run), tmp_path / folder / "page.html", Filter.parse(line), None, 8000)
    assert not (tmp_path / folder / "page.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--step", "1", "--evaluation", "0"],
        ["--rollout", "1.0", "--web"],
        ["--filter", "x", "--web"],
        ["--port", "80"],
        ["--megabytes", "0"],
        ["--filter", "end:x"],
        ["--web", "--port", "99999"],
        ["--web", "--step", "9"],
    ],
)
def test_contradictions_are_one_line(
    run: RunDir, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run.path), *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
