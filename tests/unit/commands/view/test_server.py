"""The server of ``orhpc view --web``: data only with the key, and nothing for other sites."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from orhpc.commands.view.server import application
from tests.unit.commands.view.kit import library_of, make_run

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(
        application(library_of(make_run(tmp_path)), "a run", "secret"), base_url="http://127.0.0.1"
    )


@pytest.mark.parametrize(
    "path", ["/data/about", "/data/rows?part=step_1", "/data/search", "/data/nothing", "/data/"]
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_data_need_the_key(client: TestClient, path: str, headers: dict[str, str]) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert "step_1" not in answer.text


def test_the_page_itself_shows_nothing_of_the_run_but_its_name(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert client.get(path).status_code == 200
    assert client.get("/assets/..%2Fpage.py").status_code == 404
    assert client.get("/assets/page.py").status_code == 404


def test_another_site_s_name_for_this_machine_is_refused(client: TestClient) -> None:
    assert client.get("/data/about", headers=KEY | {"Host": "evil.example"}).status_code == 400


def test_rows_rollouts_and_found_ones_are_sent(client: TestClient) -> None:
    assert client.get("/data/about", headers=KEY).json()["parts"][0] == "step_1"
    rows = client.get("/data/rows?part=step_2", headers=KEY).json()
    rollout = client.get(f"/data/rollout?part=step_2&id={rows[1]['id']}", headers=KEY).json()
    assert rollout["advantage"] == 1.0
    lines = client.get("/data/search?filter=reward:1", headers=KEY).text.splitlines()
    found = [json.loads(line) for line in lines]
    assert [answer["part"] for answer in found if "row" in answer] == ["step_3"] * 2 + ["step_2"] * 2 + [
        "step_1"
    ] * 2
    assert found[-1] == {"searched": 4, "of": 4}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("rows?part=step_9", 404),
        ("rows?part=../..", 404),
        ("rollout?part=step_1&id=x", 404),
        ("search?filter=end:x", 400),
    ],
)
def test_what_is_not_there_is_said(client: TestClient, path: str, status: int) -> None:
    answer = client.get(f"/data/{path}", headers=KEY)
    assert answer.status_code == status
    assert answer.json()["error"]


@pytest.mark.slow
def test_the_command_prints_an_address_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    command = [sys.executable, "-m", "orhpc.commands.cli", "view", str(run.path), "--web"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        address, key = process.stdout.readline().strip().split("#key=")
        said = "".join(process.stdout.readline() for _ in range(3))
        assert re.search(r"ssh -N -L \d+:127\.0\.0\.1:\d+ \S+@\S+", said)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}data/about")
        request = urllib.request.Request(f"{address}data/about", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["name"] == "a run"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
