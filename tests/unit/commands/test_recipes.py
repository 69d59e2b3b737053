"""The configs of real models fit the GPUs that their first lines name, by ``orhpc plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.config.files import load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK
from tests.model_configs import REAL

CONFIGS = Path(__file__).parents[3] / "configs"
H100, H200 = "80", "139"
"""GiB of one GPU that the driver shows."""
RECIPES = [
    ("qwen3-0.6b.yaml", H100),
    ("qwen3-1.7b.yaml", H100),
    ("default.yaml", H100),
    ("qwen3-30b-a3b.yaml", H100),
    ("qwen3-30b-a3b-node.yaml", H200),
    ("qwen3-30b-a3b-node-of-four.yaml", H200),
    ("qwen3-30b-a3b-node-split.yaml", H200),
    ("glm-4.5-air.yaml", H100),
    ("qwen3-235b-a22b.yaml", H100),
    ("qwen3-235b-a22b.yaml --nodes 8 engine.tp=8 engine.ep=1", H200),
    ("deepseek-v3.yaml", H100),
]


def plan(tmp_path: Path, recipe: str, memory: str) -> int:
    """Exit code of ``orhpc plan`` with a folder that holds the model's published ``config.json``."""
    name, *more = recipe.split()
    model = load_config(CONFIGS / name).model.path.rpartition("/")[2]
    folder = tmp_path / model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(REAL[model][0]))
    return main(["plan", str(CONFIGS / name), f"model.path={folder}", "--device-memory", memory, *more])


@pytest.mark.parametrize(("recipe", "memory"), RECIPES)
def test_a_recipe_fits_its_gpus(
    tmp_path: Path, recipe: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, recipe, memory) == EXIT_OK, capsys.readouterr().err
    shown = capsys.readouterr().out
    comment = (CONFIGS / recipe.split()[0]).read_text().split("extends:")[0]
    named = re.findall(r"Host memory of a node: (\d+) GiB while engines", comment)
    if named and "--nodes" not in recipe:
        (offloaded,) = re.findall(r"while engines have the devices: ([\d.]+) GiB", shown)
        assert round(float(offloaded)) == int(named[0])


def test_every_recipe_of_a_real_model_is_checked() -> None:
    tested = {recipe.split()[0] for recipe, _ in RECIPES}
    real = {path.name for path in CONFIGS.glob("*.yaml") if re.search(r"path: \w[\w-]*/", path.read_text())}
    assert real - {"base.yaml"} <= tested


@pytest.mark.parametrize(
    ("recipe", "memory"), [("qwen3-235b-a22b.yaml --nodes 8 engine.tp=8 engine.ep=1", H100)]
)
def test_what_does_not_fit_is_refused(tmp_path: Path, recipe: str, memory: str) -> None:
    assert plan(tmp_path, recipe, memory) == EXIT_CONFIG
