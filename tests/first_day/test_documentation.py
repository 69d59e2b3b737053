"""The documentation as a new user follows it: each command and program of the pages runs, with the wheel."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.test_docs import PAGES
from tests.first_day.conftest import ROOT, Stranger

# For all commands of all pages.  The installation and the tour before them have limits for each of their
# parts; on a busy machine they took so long that no time was left.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800, func_only=True)]
NOT_RUN = {
    "pip install": "the fixture `programs` installs the wheel",
    "orhpc-env": "the same",
    "make ": "make test runs this test",
    "completion": "tests/unit/commands/test_completion.py runs the scripts in their shells",
    "sbatch": "tests/slurm submits the batch scripts",
    "launch gpu.yaml": "needs SLURM or a GPU; the same line is run with --dry-run",
    "launch --nodes 2 gpu.yaml": "the same",
    "launch --nodes 4 --spares 1 gpu.yaml": "the same; tests/slurm/test_spares.py",
    "check --nodes 2 gpu.yaml": "without SLURM and SGLang it exits with 3, as the page shows",
    "orhpc cancel": "tests/slurm cancels jobs",
    "rsync": "not ours",
    "orhpc drill": "runs of minutes; tests/local and tests/slurm have some",
    "orhpc tune": "the same",
    "ORHPC_FAULT": "the same",
    "train_config.yaml": "tests/unit/launch/test_command_line.py reads these flags",
    "--hf-checkpoint": "the same",
    "glm-4.5-air.yaml": "tests/unit/commands/test_recipes.py plans the recipes",
    "qwen3-30b-a3b-node.yaml": "the same",
    "qwen3-30b-a3b-node-of-four.yaml": "the same",
    "deepseek-v3.yaml": "the same",
    "sglang": "needs a GPU",
    "orhpc sync": "needs servers; tests/unit/tracking has some",
    "orhpc serve": "ends with Ctrl-C; tests/unit/commands/test_serve.py serves",
    "--web": "ends with Ctrl-C; tests/browser opens it",
    "orhpc sweep tiny.yaml train.lr=1e-4,1e-3": "four runs; tests/unit/launch/test_sweep.py",
    "runs/tiny-sweep": "a folder of that sweep",
    "mine.yaml": "a config that the page does not have",
    "train.replay_rollouts": "a whole run; tests/local replays records",
    "launch --local train.yaml": "a run of minutes; the other tests of this folder train it",
    "runs/gpu": "a run of a GPU",
    "--evaluation 20": "the run of the tour has no evaluation",
    "--step 40": "the run of the tour has ten steps",
}
"""Parts of the commands that this test leaves out, and why."""
TYPED = {"try-env": "7\n", "chat": ""}
"""What is typed into a command that asks."""
FOLDERS = dict.fromkeys(("runs/mine", "runs/other", "runs/timing"), "runs/tiny")
"""Runs that the pages only name, as copies of the tour's."""


def lines_of(page: Path, language: str) -> Iterator[str]:
    for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if language == "console":
            yield from re.findall(r"^\$ (.*?)(?: +# .*)?$", block, re.MULTILINE)
        else:
            yield block


def in_order() -> list[Path]:
    """The pages, the tour first: it makes the run that the others read."""
    return sorted(PAGES, key=lambda page: (page.name != "tour.md", page))


@pytest.fixture(scope="module")
def reader(stranger: Stranger) -> Stranger:
    """A user who has followed the tour: a stopped and continued run of ten steps, and its export.

    The first start is ended by ``train.steps`` where the tour's reader presses Ctrl-C, so that the steps of
    each attempt are those that the pages name; tests/local has Ctrl-C.
    """
    person = replace(stranger, folder=stranger.home)
    starts = 0
    for line in lines_of(ROOT / "docs/tour.md", "console"):
        words = shlex.split(line)
        if words[0] == "cd":
            person = replace(person, folder=person.folder / words[1])
        elif words[:2] == ["orhpc", "init"]:  # done by the fixture
            assert (person.folder / words[2]).is_dir()
        elif not is_left_out(line):
            starts += words[1] == "launch"
            shorter = ["train.steps=6"] if words[1] == "launch" and starts == 1 else []
            run(person, [*words, *shorter])
    assert starts == 2
    for name, source in FOLDERS.items():
        shutil.copytree(person.folder / source, person.folder / name)
        shutil.rmtree(person.folder / name / "export")  # a page exports it
    return person


def is_left_out(line: str) -> bool:
    return any(part in line for part in NOT_RUN) and "--dry-run" not in line


def run(person: Stranger, words: list[str]) -> None:
    done = person.run(*words, stdin=TYPED.get(words[1]))
    assert done.returncode == 0, f"{shlex.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr


def test_every_command_of_the_pages_runs(reader: Stranger) -> None:
    lines = [line for page in in_order()[1:] for line in lines_of(page, "console") if not is_left_out(line)]
    parts = [part for line in lines for part in line.split(" && ")]
    seen = set(lines_of(ROOT / "docs/tour.md", "console"))  # run by the fixture
    wanted = dict.fromkeys(p for p in parts if not p.startswith(("cd ", "orhpc init")) and p not in seen)
    assert len(wanted) >= 15
    for part in wanted:
        on_the_hub = ["model.path=Acme/Qwen3"] if "gpu.yaml" in part else []
        run(reader, [*shlex.split(part), *on_the_hub])


def test_every_reason_to_leave_a_command_out_is_still_needed() -> None:
    lines = [line for page in PAGES for line in lines_of(page, "console")]
    assert [part for part in NOT_RUN if not any(part in line for line in lines)] == []


@pytest.mark.parametrize("page", ["docs/run-directory.md", "docs/guide/evaluate-export.md"])
def test_the_programs_of_a_page_read_the_run_of_the_tour(page: str, reader: Stranger) -> None:
    programs = list(lines_of(ROOT / page, "python"))
    assert programs
    printed = reader.ok("python", "-c", "\n".join(programs))
    assert printed.strip()
