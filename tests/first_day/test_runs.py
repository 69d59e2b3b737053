"""First steps of a new user: train a model by its hub name on their own task, export it, and generate."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orhpc.errors import EXIT_CONFIG
from tests.first_day.conftest import Stranger, one_line
from tests.hub import Hub

SMALL = (
    *("train.steps=2", "rollout.batch_size=2", "rollout.n_samples=2", "train.global_batch_size=4"),
    *("model.dtype=float32", "rollout.max_response_tokens=8", "evaluation.num_samples=2"),
)
ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
asked = [{"role": "user", "content": "Hi"}]
options = {"return_tensors": "pt", "return_dict": True, "add_generation_prompt": True}
ids = tokenizer.apply_chat_template(asked, **options)["input_ids"]
print(model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] - ids.shape[1])
"""
pytestmark = pytest.mark.slow


def test_the_command_prints_its_version_and_the_installed_parts(stranger: Stranger) -> None:
    assert stranger.ok("orhpc", "--version").startswith("orhpc ")
    assert "ok   orhpc[run]: is installed" in stranger.ok("orhpc", "doctor")
    checked = stranger.ok("orhpc", "check", "train.yaml", "model.path=Acme/Qwen3")
    assert "BAD" not in checked
    assert "ok   your code: environment:" in checked
    assert "fetched before the run (now: orhpc fetch Acme/Qwen3)" in checked


@pytest.mark.parametrize("name", ["Llama-3", pytest.param("Qwen3-MoE", marks=pytest.mark.long)])
def test_a_hub_model_is_trained_resumed_and_its_export_generates(
    name: str, stranger: Stranger, hub: Hub
) -> None:
    """Dense and with experts, with the user's own reward; tests/unit/models has every family's export.

    Only the files for training are downloaded, and only once.  Repeating the command resumes, also if the hub
    can no longer be reached, but not with other settings.
    """
    hub.requests.clear()  # other tests have requested this model before
    (stranger.folder / "mine.py").write_text("def always(rollout):\n    return 0.25\n")
    command = ["orhpc", "launch", "--local", "train.yaml", f"model.path=Acme/{name}", f"run.name={name}"]
    command += [*SMALL, "rollout.custom_reward=mine:always"]
    out = stranger.ok(*command)
    assert "step 2/2" in out
    assert "reward 0.250" in out
    assert "finished; the run directory is" in out
    assert "evaluation after step 2: mine/test" in out
    fetched = hub.downloads(f"Acme/{name}")
    assert len(fetched) == len(set(fetched))
    folder = Path(stranger.ok("orhpc", "export", f"runs/{name}").split()[-1])
    exported = stranger.folder / "runs" / name / "export" / "step_2"
    assert exported.is_dir(), folder
    assert int(stranger.ok("python", "-c", ANSWER, str(exported)).split()[-1]) > 0

    changed = stranger.run(*command, "rollout.temperature=0.5")
    assert "it may not change on a resume: set another run.name to start a new run" in one_line(
        changed.stderr
    )
    assert changed.returncode == EXIT_CONFIG
    out = stranger.ok(*command, "train.steps=3", HF_ENDPOINT="http://127.0.0.1:9")
    assert "attempt 2, step 2 of 3 done" in out
    assert "reward 0.250" in out
    assert "finished" in out


@pytest.mark.parametrize("example", [pytest.param("tools", marks=pytest.mark.long), "end_state"])
def test_every_example_can_be_tried_and_checked(example: str, stranger: Stranger) -> None:
    folder = stranger.home / example
    shutil.rmtree(folder, ignore_errors=True)
    stranger.ok("orhpc", "init", str(folder), "--example", example)
    person = replace(stranger, folder=folder)
    assert "BAD" not in person.ok("orhpc", "check", "train.yaml", "model.path=Acme/Qwen3")
    tried = person.run("orhpc", "try-env", "train.yaml", stdin="")
    assert "Traceback" not in tried.stdout + tried.stderr
    assert "mine" in tried.stdout
