"""The user's functions and classes are found in their source, without running it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orhpc.config import Config
from orhpc.errors import ConfigError
from orhpc.launch.checks.references import check, check_reference


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(
        "import json as j\nraise SystemExit('this module must not run')\n"
        "def score(rollout): ...\nasync def agent(c, r): ...\nclass Env:\n    def inner(self): ...\n"
        "later: object = None\na, (b, c) = 1, (2, 3)\n"
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n"
        "if j:\n    def chosen(): ...\n"
    )
    package = tmp_path / "pack"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('nor this')\n")
    (package / "deep" / "__init__.py").write_text("from pack.other import *\n")
    (package / "deep" / "envs.py").write_text("class Env: ...\n")
    (tmp_path / "bare" / "deep").mkdir(parents=True)  # a package without __init__.py, twice
    (tmp_path / "bare" / "deep" / "envs.py").write_text("class Env: ...\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "mine:score",
        "mine:agent",
        "mine:Env",
        "mine:Env.inner",
        "mine:later",
        "mine:b",
        "mine:torch",
        "mine:j",
        "mine:chosen",
        "pack.deep.envs:Env",
        "pack.deep:anything",
        "bare.deep.envs:Env",
        "json:dumps",
        "orhpc.config:Config",
        "math:floor",
    ],
)
def test_existing_references_are_accepted(name: str, project: Path) -> None:
    before = set(sys.modules)
    assert check_reference("rollout.custom_reward", name, project) == name
    assert not {"mine", "pack", "bare"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("mine:scor", r"mine\.py defines no 'scor'; did you mean mine:score\?"),
        ("nowhere:f", "there is no module 'nowhere' in .* or among the installed packages"),
        ("pack.shallow:f", r"there is no module 'pack\.shallow'"),
        ("mine.sub:f", "'mine' is a module, not a package"),
        ("broken:f", r"broken\.py:1: invalid syntax"),
        ("mine", "'mine' is not package.module:name"),
        (":f", "is not package.module:name"),
        ("pack.deep.envs:Other", "defines no 'Other'"),
    ],
)
def test_missing_references_give_one_error_line(name: str, output: str, project: Path) -> None:
    with pytest.raises(ConfigError, match=output) as caught:
        check_reference("rollout.custom_reward", name, project)
    assert str(caught.value).startswith("rollout.custom_reward: ")
    assert "\n" not in str(caught.value)


def test_every_setting_that_names_code_is_checked(project: Path) -> None:
    def config(**sections: object) -> Config:
        base: dict[str, object] = {"environments": {"e": {"serve": "letters"}}}
        return Config.model_validate(base | sections)

    wrong = {
        "rollout.custom_agent": config(rollout={"custom_agent": "mine:x"}),
        "rollout.custom_reward": config(rollout={"custom_reward": "mine:x"}),
        "rollout.custom_agent ": config(rollout={"custom_agent": "slime:mine:x"}),
        "rollout.custom_reward ": config(rollout={"custom_reward": "slime-group:mine:x"}),
        "rollout.filter": config(rollout={"filter": "mine:x"}),
        "algorithm.advantage": config(algorithm={"advantage": "mine:x"}),
        "environments.e.serve": config(environments={"e": {"serve": "mine:x"}}),
    }
    for setting, each in wrong.items():
        with pytest.raises(ConfigError, match=f"^{setting.strip()}: .*mine.py defines no 'x'"):
            check(each, project)
    with pytest.raises(ConfigError, match=r"nor bundled \(arithmetic, letters, "):
        check(config(environments={"e": {"serve": "arithmatic"}}), project)
    assert check(config(), project) == "none is named"
    container = {"container": {"kind": "apptainer", "image": "x.sif"}}
    assert "interpreter" in check(config(rollout={"custom_agent": "mine:x"}, slurm=container), project)
