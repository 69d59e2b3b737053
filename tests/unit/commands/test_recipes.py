"""The configs of real models fit the GPUs that their first lines name, by ``orhpc plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.commands.plan import parse
from orhpc.config.files import load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK
from orhpc.launch.model import ensure_config
from orhpc.plan.memory import GIB, reserved_bytes
from orhpc.plan.run_plan import host_parts, make_plan, state_bytes
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
    ("qwen3-30b-a3b-node.yaml precision=fp8-rollout", H200),
    ("qwen3-30b-a3b-node.yaml precision=fp8", H200),
    ("qwen3-30b-a3b-node-split.yaml", H200),
    ("qwen3-30b-a3b-split.yaml", H100),
    ("qwen3-30b-a3b-split.yaml precision=fp8-rollout", H100),
    ("glm-4.5-air.yaml", H100),
    ("qwen3-235b-a22b.yaml", H100),
    ("qwen3-235b-a22b.yaml --nodes 8 engine.tp=8 engine.ep=1", H200),
    ("deepseek-v3.yaml", H100),
]

PUBLISHED = {name: config for name, (config, *_) in REAL.items()} | {
    # The package's own model may not have been made on this machine.
    "bundled:smollm2-135m-instruct": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0, "hidden_act": "silu", "tie_word_embeddings": True, "dtype": "bfloat16",
    }
}  # fmt: skip


def arguments_of(tmp_path: Path, recipe: str, memory: str) -> list[str]:
    """Arguments of ``orhpc plan``, with a folder that holds the model's published ``config.json``."""
    name, *more = recipe.split()
    model = load_config(CONFIGS / name).model.path.rpartition("/")[2]
    folder = tmp_path / model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[model]))
    more.append(f"model.path={folder}")
    return [str(CONFIGS / name), "--device-memory", memory, *more]


def plan(tmp_path: Path, recipe: str, memory: str) -> int:
    """Exit code of ``orhpc plan``."""
    return main(["plan", *arguments_of(tmp_path, recipe, memory)])


@pytest.mark.slow
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


def rows(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the page on recipes."""
    section = (CONFIGS.parent / "docs/recipes.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip("` ") for cell in line] for line in lines[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("Memory"), ids=lambda row: row[0])
def test_the_memory_that_the_page_shows_is_the_plan_s(row: list[str], tmp_path: Path) -> None:
    recipe, *shown = row
    memory = H200 if float(shown[0].split(" of ")[1]) > 100 else H100
    request = parse(arguments_of(tmp_path, recipe, memory))
    ensure_config(request.config)
    planned = make_plan(request.config, request.device_gib)
    assert planned.device_bytes is not None
    assert planned.kv_tokens is not None
    cache, host = planned.kv_tokens * planned.kv_token, sum(host_parts(planned).values())
    room = planned.device_bytes - reserved_bytes(planned.config)
    assert shown == [
        f"{planned.trainer.total / GIB:.1f} of {room / GIB:.0f}",
        f"{planned.engine_weights / GIB:.1f} + {cache / GIB:.1f}",
        f"{host / GIB:.0f}",
        f"{state_bytes(planned) / 1e9:.0f}",
    ]


def test_the_page_shows_the_memory_of_every_recipe() -> None:
    assert {recipe for recipe, _ in RECIPES} <= {row[0] for row in rows("Memory")}


def test_every_recipe_of_a_real_model_is_checked() -> None:
    tested = {recipe.split()[0] for recipe, _ in RECIPES}
    real = {path.name for path in CONFIGS.glob("qwen3*.yaml")}
    real |= {path.name for path in CONFIGS.glob("*.yaml") if re.search(r"path: \w[\w-]*/", path.read_text())}
    assert real - {"base.yaml"} <= tested


@pytest.mark.parametrize(
    ("recipe", "memory"), [("qwen3-235b-a22b.yaml --nodes 8 engine.tp=8 engine.ep=1", H100)]
)
def test_what_does_not_fit_is_refused(tmp_path: Path, recipe: str, memory: str) -> None:
    assert plan(tmp_path, recipe, memory) == EXIT_CONFIG
