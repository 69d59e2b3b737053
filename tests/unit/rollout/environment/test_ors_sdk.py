"""Environments served by ors-sdk, which differs from OpenReward's SDK in parts of the protocol."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.rollout.environment.environment import Environment
from orhpc.types import Task
from tests.trainer_kit import free_port

pytestmark = pytest.mark.slow
SERVER = """
import sys
from ors import Environment, Server, Split, TextBlock, ToolOutput, tool

class Vault(Environment):
    def __init__(self, task_spec={}, secrets={}):
        super().__init__(task_spec, secrets)
        self.own = dict(secrets)
    @classmethod
    def list_splits(cls): return [Split(name="train", type="train")]
    @classmethod
    def list_tasks(cls, split): return [{"n": 1}, {"n": 2}]
    def get_prompt(self): return [TextBlock(text="Open the vault.")]
    @tool
    async def open(self) -> ToolOutput:
        "Open it."
        return ToolOutput(blocks=[TextBlock(text=repr(sorted(self.own.items())))], reward=0.5, finished=True)

Server([Vault]).run(host="127.0.0.1", port=int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server of ors-sdk, started as in its documentation."""
    folder, port = tmp_path_factory.mktemp("ors"), free_port()
    (folder / "vault.py").write_text(SERVER)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(folder / "vault.py"), str(port)], stdout=log, stderr=log
        )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None and not _answers(address):
            time.sleep(0.1)
        assert _answers(address), Path(folder, "log").read_text()
        yield address
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


@pytest.mark.parametrize("secrets", [{}, {"MY_OWN": "v1", "openai_api_key": "v2"}])
def test_secrets_reach_a_server_that_reads_them_in_the_body(url: str, secrets: dict[str, str]) -> None:
    async def run() -> tuple[str, float | None, bool]:
        settings = EnvironmentSettings(url=url)
        environment = await Environment.open("vault", settings, secrets=secrets, rollout=RolloutSettings())
        try:
            assert await environment.num_tasks("train") == 2
            async with environment.session(Task("vault", "train", 0)) as session:
                assert session.prompt == "Open the vault."
                result = await session.call("open", {})
                return result.text, result.reward, result.finished
        finally:
            await environment.close()

    assert asyncio.run(run()) == (repr(sorted(secrets.items())), 0.5, True)
