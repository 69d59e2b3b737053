"""Common mistakes of new users: each gives one line that says what to do, and the right exit code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from orhpc.errors import EXIT_CONFIG, EXIT_PREFLIGHT
from tests.first_day.conftest import Stranger, one_line
from tests.first_day.test_runs import SMALL
from tests.hub import Hub
from tests.model_configs import REAL
from tests.model_folder import write_model_folder

pytestmark = pytest.mark.slow
LAUNCH = ("launch", "--local", "train.yaml", "model.path=Acme/Qwen3", *SMALL)
DRY = ("launch", "--dry-run", "gpu.yaml")
MISTAKES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "a config's name misspelled": (
        ("launch", "--local", "trian.yaml"),
        EXIT_CONFIG,
        r"trian\.yaml: no such config.*mean train\.yaml\?",
    ),
    "two configs": (("launch", "train.yaml", "gpu.yaml"), EXIT_CONFIG, "one config file at a time"),
    "a setting's name misspelled": (
        (*LAUNCH, "train.step=3"),
        EXIT_CONFIG,
        r"train\.step: unknown setting; did you mean 'steps'\?",
    ),
    "batch sizes that do not add up": ((*LAUNCH, "rollout.n_samples=3"), EXIT_CONFIG, "golden rule"),
    "a number that is text": ((*LAUNCH, "train.lr=fast"), EXIT_CONFIG, r"train\.lr: "),
    "a model folder that is not there": (
        (*LAUNCH, "model.path=/models/Qwen3"),
        EXIT_CONFIG,
        r"/models/Qwen3: no such folder, and not a hub",
    ),
    "a model's name misspelled": (
        (*LAUNCH, "model.path=Acme/Qwen33"),
        EXIT_CONFIG,
        "no such folder here, and no such model at http://",
    ),
    "a revision that does not exist": (
        (*LAUNCH, "model.path=Acme/Llama-3", "model.revision=v7"),
        EXIT_CONFIG,
        "has no revision 'v7'",
    ),
    "a model folder with only its config": (
        (*LAUNCH, "model.path=half"),
        EXIT_CONFIG,
        r"half has no weights \(model\.safetensors",
    ),
    "a reward's module that is not there": (
        (*LAUNCH, "rollout.custom_reward=rewards:brief"),
        EXIT_CONFIG,
        r"no module 'rewards' in .*task",
    ),
    "a reward's function misspelled": (
        (*LAUNCH, "rollout.custom_reward=reward:breif"),
        EXIT_CONFIG,
        r"did you mean reward:brief\?",
    ),
    "an environment's class misspelled": (
        (*LAUNCH, "environments.mine.serve=environment:Summs"),
        EXIT_CONFIG,
        r"you mean environment:Sums\?",
    ),
    "a bundled environment misspelled": (
        (*LAUNCH, "environments.mine.serve=arithmatic"),
        EXIT_CONFIG,
        r"nor bundled \(arithmetic, ",
    ),
    "an environment without its key": (
        (*LAUNCH, "environments.Some/Env.weight=1"),
        EXIT_PREFLIGHT,
        "OPENREWARD_API_KEY must be set",
    ),
    "a server's address that is none": (
        (*LAUNCH, "environments.other.url=localhost:80"),
        EXIT_CONFIG,
        "is not http:",
    ),
    "a checkpoint that is not there": (
        (*LAUNCH, "checkpoint.load=/nowhere"),
        EXIT_CONFIG,
        "/nowhere is neither a checkpoint folder nor",
    ),
    "an evaluation of an unknown source": (
        (*LAUNCH, "evaluation.splits.other=[test]"),
        EXIT_CONFIG,
        "'other' is not one of the environments",
    ),
    "a GPU config on a machine without": (
        ("launch", "--local", "gpu.yaml", "model.path=Acme/Qwen3"),
        EXIT_PREFLIGHT,
        "sglang.*not installed",
    ),
    "heads that do not divide": (
        (*DRY, "model.path=Acme/Qwen3", "placement.devices_per_node=8", "engine.tp=8"),
        EXIT_CONFIG,
        r"8 does not divide 4 attention heads; engine\.tp=\d would do",
    ),
    "rollouts longer than the model's context": (
        (*DRY, "model.path=Acme/Qwen3", "rollout.max_total_tokens=16384"),
        EXIT_CONFIG,
        "SGLang serves at most 8192 tokens of this model",
    ),
    "a model that does not fit": (
        (*DRY, "model.path=big"),
        EXIT_CONFIG,
        "a trainer device needs .* ranks would do",
    ),
    "a batch job where there is no SLURM": (
        ("launch", "train.yaml", "model.path=Acme/Qwen3"),
        EXIT_PREFLIGHT,
        "sbatch",
    ),
    "a folder that is no run": (("status", "runs"), EXIT_CONFIG, "is not a run directory"),
    "a project over another": (("init", "."), EXIT_CONFIG, "exists already: choose another folder"),
}


@pytest.fixture(scope="module")
def folders(stranger: Stranger) -> None:
    (stranger.folder / "half").mkdir()
    write_model_folder(stranger.folder / "half", REAL["Llama-3.2-1B"][0])
    (stranger.folder / "half" / "model.safetensors").unlink()
    write_model_folder(stranger.folder / "big", REAL["Qwen3-30B-A3B"][0])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_error_line(mistake: str, stranger: Stranger, folders: None) -> None:
    args, code, text = MISTAKES[mistake]
    done = stranger.run("orhpc", *args, timeout=300)
    assert re.search(text, one_line(done.stderr)), done.stderr
    assert done.returncode == code


def test_a_gated_model_without_a_token(stranger: Stranger, hub: Hub) -> None:
    hub.token = "secret"
    try:
        done = stranger.run(
            "orhpc", *LAUNCH, "model.path=Acme/GLM-4.5", "run.name=gated", HF_HOME="elsewhere"
        )
    finally:
        hub.token = None
    assert re.search(
        r"Acme/GLM-4\.5 is gated: accept its terms at .*, then set HF_TOKEN", one_line(done.stderr)
    )
    assert done.returncode == EXIT_CONFIG


def test_a_hub_that_cannot_be_reached(stranger: Stranger) -> None:
    elsewhere = {"HF_HOME": "elsewhere2", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = stranger.run("orhpc", *LAUNCH, "run.name=away", **elsewhere)
    assert "cannot be reached from here" in done.stderr
    assert "orhpc fetch Acme/Qwen3" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.returncode == EXIT_PREFLIGHT


@pytest.fixture(scope="module")
def broken(stranger: Stranger) -> subprocess.CompletedProcess[str]:
    """The first start of a run whose environment raises."""
    source = (stranger.folder / "environment.py").read_text()
    prompt = "    def prompt(self) -> str:\n"
    (stranger.folder / "broken_environment.py").write_text(
        source.replace(prompt, f"{prompt}        missing_name\n")
    )
    args = ["environments.mine.serve=broken_environment:Sums", "run.name=broken", "evaluation.interval=0"]
    return stranger.run("orhpc", *LAUNCH, *args)


def test_an_environment_that_raises_is_shown_once_with_its_own_traceback(
    broken: subprocess.CompletedProcess[str], stranger: Stranger
) -> None:
    text = broken.stdout + broken.stderr
    assert broken.returncode == EXIT_CONFIG, text
    assert "NameError" in text
    assert "broken_environment.py" in text
    assert text.count("ready after") <= 1
    attempts = Path(stranger.folder, "runs", "broken", "attempts")
    assert [p.name for p in attempts.iterdir() if p.name.isdigit()] == ["001"]


@pytest.mark.long
def test_a_corrected_config_is_accepted_after_a_failed_first_start(
    broken: subprocess.CompletedProcess[str], stranger: Stranger
) -> None:
    """The run made no step, so its settings may be corrected."""
    out = stranger.ok("orhpc", *LAUNCH, "run.name=broken", "evaluation.interval=0", "train.steps=1")
    assert "changed since the last start: environments.mine.serve" in out
    assert "finished" in out
