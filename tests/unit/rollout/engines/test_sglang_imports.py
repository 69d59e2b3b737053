"""What happens when SGLang's processes import modules, with a package that stands in for SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orhpc.process.start_gate import VARIABLE, close_gate

FILES = {
    "sglang/__init__.py": "__version__ = '0'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/plugins.py": "def load_plugins(): pass\n",
    "sglang/srt/utils.py": "def kill_process_tree(pid, include_parent): pass\n",
    "sglang/srt/server_args.py": """
class ServerArgs:
    model_path = "/nowhere"
    @staticmethod
    def add_cli_args(parser): pass
    @staticmethod
    def from_cli_args(raw): return ServerArgs()
""",
    "sglang/srt/model_executor/__init__.py": "",
    "sglang/srt/model_executor/model_runner.py": """
try:
    from megatron.core import parallel_state
    print("megatron", flush=True)
except ImportError:
    print("no megatron", flush=True)
class ModelRunner:
    def load_model(self): pass
""",
    "sglang/srt/rank.py": """
import time
def run():
    print("libraries", flush=True)
    from sglang.srt.model_executor.model_runner import ModelRunner
    print("repairs" if hasattr(ModelRunner.load_model, "__wrapped__") else "as it is", flush=True)
    print(f"device: {time.monotonic()}", flush=True)
""",
    "sglang/launch_server.py": """
import multiprocessing
def run_server(server_args):
    from sglang.srt.rank import run
    multiprocessing.set_start_method("spawn", force=True)
    rank = multiprocessing.Process(target=run)
    rank.start()
    rank.join()
    print("main", flush=True)
    run()
""",
    "megatron/__init__.py": "",
    "megatron/core/__init__.py": "",
    "megatron/core/parallel_state.py": "",
}
"""Like SGLang 0.5.16: ranks are spawned, import the model runner late, and that imports megatron-core."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def start(site: Path, gate: Path | None) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{site}:{Path(__file__).parents[4]}"}
    environment |= {} if gate is None else {VARIABLE: str(gate)}
    command = [sys.executable, "-m", "orhpc.rollout.engines.sglang_server"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


RANK = ["libraries", "no megatron", "repairs", "device"]
MAIN = ["libraries", "no megatron", "as it is", "device"]


def test_ranks_import_no_megatron_and_nothing_waits_without_a_gate(site: Path) -> None:
    lines = start(site, None).communicate(timeout=120)[0].splitlines()
    assert [line.partition(":")[0] for line in lines] == [*RANK, "main", *MAIN]


def test_a_rank_waits_with_its_libraries_loaded_and_the_server_does_not(site: Path) -> None:
    gate = close_gate()
    try:
        server = start(site, gate)
        assert server.stdout is not None
        assert [server.stdout.readline() for _ in range(2)] == ["libraries\n", "no megatron\n"]
        time.sleep(0.5)
        opened = time.monotonic()
    finally:
        gate.unlink()
    lines = server.communicate(timeout=120)[0].splitlines()
    assert float(lines[1].partition(": ")[2]) >= opened
    assert [line.partition(":")[0] for line in lines] == [*RANK[2:], "main", *MAIN]
