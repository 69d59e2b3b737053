"""An attempt without started parts, and commits without trainers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from orhpc.config.files import dump_config, load_config
from orhpc.driver.run import Run
from orhpc.driver.state import State
from orhpc.plan.placement import Node, plan
from orhpc.rundir import CommitName, RunDir, commits


def make_run(folder: Path) -> Run:
    """Begin a real attempt of the tiny config."""
    rundir = RunDir(folder / "run")
    rundir.create()
    config = load_config("configs/tiny.yaml", ["wandb.enabled=false", "train.max_tokens_per_gpu=1000"])
    number = rundir.begin_attempt(kind="local")
    own = rundir.attempt(number)
    (own / "config.yaml").write_text(dump_config(config))
    (own / "placement.yaml").write_text(plan(config, (Node("here", "127.0.0.1", 2),)).to_yaml())
    return Run(rundir, number, folder / "stop")


def committed(rundir: RunDir, step: int, attempt: int, content: bytes = b"weights") -> Path:
    """A complete commit, whose shard is not read as tensors here."""
    name = CommitName(step, attempt)
    folder = commits.begin(rundir, name)
    (folder / "trainer.00000-of-00001.safetensors").write_bytes(content)
    shard = commits.ShardFile(
        "trainer.00000-of-00001.safetensors", len(content), hashlib.sha256(content).hexdigest()
    )
    state = State(step=step, max_tokens=1000).to_manifest()
    return commits.finalize(folder, commits.Manifest(step, attempt, None, (shard,), state))
