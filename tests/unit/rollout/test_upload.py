"""Uploads to a local endpoint that records, fails or hangs; training must not be affected."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from orhpc.config import Config
from orhpc.errors import PreflightError
from orhpc.rollout import upload
from orhpc.rollout.upload import Uploader
from orhpc.types import Rollout, RolloutEnd, Task

pytestmark = pytest.mark.slow


class Endpoint:
    """The rollout endpoints of OpenReward's API; ``mode`` is record, error or hang."""

    def __init__(self) -> None:
        self.mode = "record"
        self.events: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.released = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if endpoint.mode == "hang":
                    endpoint.released.wait(20)
                if endpoint.mode == "record":
                    endpoint.keys.add(self.headers.get("x-api-key"))
                    endpoint.events += body["events"]
                self._answer(200 if endpoint.mode == "record" else 500)

            def do_GET(self) -> None:
                if endpoint.mode == "hang":
                    endpoint.released.wait(20)
                self._answer(404)

            def _answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    made = Endpoint()
    monkeypatch.setenv("OPENREWARD_API_URL", made.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield made
    made.released.set()
    made.server.shutdown()


def _rollout(number: int) -> Rollout:
    return Rollout(
        id=f"{number}.0",
        group_id=number,
        sample=0,
        task=Task("adder", "train", 3),
        seed=1,
        tokens_T=np.arange(4, dtype=np.int32),
        loss_mask_T=np.array([False, False, True, True]),
        logprobs_T=np.zeros(4, np.float32),
        versions_T=np.array([-1, -1, 0, 0], np.int32),
        end=RolloutEnd.TERMINAL,
        reward=1.0,
        messages=[
            {"role": "user", "content": "What is 1 + 2?"},
            {
                "role": "assistant",
                "content": "Let me add.",
                "reasoning": "a sum",
                "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"error": "not JSON"}],
            },
            {"role": "tool", "content": "3", "name": "add", "reward": 0.5},
            {"role": "tool", "content": "Error", "name": "", "error": "malformed"},
            {"role": "assistant", "content": "3"},
            {"role": "tool", "content": "Right.", "name": "answer", "reward": 0.5},
        ],
    )


def test_transcripts_are_uploaded_completely(endpoint: Endpoint) -> None:
    uploader = Uploader("the-key-of-the-test", "run", model_name="tiny")
    for number in range(3):
        uploader.put(_rollout(number))
    counts = uploader.close(60.0)
    assert (counts.uploaded, counts.failed, counts.dropped) == (3, 0, 0)
    assert endpoint.keys == {"the-key-of-the-test"}
    started = [e for e in endpoint.events if e["eventType"] == "rollout"]
    assert {e["rolloutName"] for e in started} == {"0.0", "1.0", "2.0"}
    assert {(e["runName"], e["environment"], e["split"]) for e in started} == {("run", "adder", "train")}
    first = next(e["eventId"] for e in started if e["rolloutName"] == "0.0")
    messages = sorted(
        (e for e in endpoint.events if e.get("rolloutEventId") == first), key=lambda e: e["index"]
    )
    assert [m["type"] for m in messages] == [
        "user_message",
        "reasoning",
        "assistant_message",
        "tool_call",
        "tool_call",
        "tool_result",
        "tool_result",
        "assistant_message",
        "tool_result",
    ]
    assert [m["callId"] for m in messages[3:5]] == [m["callId"] for m in messages[5:7]]
    assert [m.get("reward") for m in messages] == [None] * 5 + [0.5, None, None, 0.5]
    assert [m["isFinished"] for m in messages] == [False] * 8 + [True]


@pytest.mark.parametrize("mode", ["error", "hang"])
def test_a_broken_service_affects_only_the_upload(
    endpoint: Endpoint, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.mode = mode
    monkeypatch.setattr(upload, "FAILURES", 2)
    uploader = Uploader("key", "run", queue_rollouts=4, upload_timeout_s=1.0)
    began = time.monotonic()
    for number in range(200):
        uploader.put(_rollout(number))
    assert time.monotonic() - began < 1.5  # two uploads take at least 2 s to fail
    began = time.monotonic()
    counts = uploader.close(12.0)
    assert time.monotonic() - began < 15.0
    assert counts.uploaded == 0
    assert 1 <= counts.failed <= 2
    assert counts.failed + counts.dropped == 200


def test_failed_uploads_are_reported_at_the_first_and_the_tenth(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Uploader, rollout: Rollout) -> bool:
        raise ConnectionError("refused with key-of-mine")

    monkeypatch.setattr(Uploader, "_upload", refused)
    monkeypatch.setattr(upload, "FAILURES", 1000)
    uploader = Uploader("key", "run")
    for number in range(12):
        uploader.put(_rollout(number))
    uploader.close(10.0)
    first, tenth = uploader.notices.drain()
    assert first == (
        "upload to OpenReward: rollout 0.0: ConnectionError: refused with key-of-mine; training continues"
    )
    assert "10 rollouts were not uploaded to OpenReward" in tenth


def test_closing_waits_at_most_the_given_time(endpoint: Endpoint) -> None:
    endpoint.mode = "hang"
    uploader = Uploader("key", "run", upload_timeout_s=30.0)
    for number in range(3):
        uploader.put(_rollout(number))
    began = time.monotonic()
    counts = uploader.close(1.0)
    assert time.monotonic() - began < 3.0
    assert counts.uploaded == 0


def _config(upload: bool) -> Config:
    return Config.model_validate(
        {
            "environments": {"e": {"url": "http://127.0.0.1:1"}},
            "rollout": {"openreward_upload": upload},
        }
    )


def test_uploads_are_disabled_by_default() -> None:
    before = set(threading.enumerate())
    uploader = Uploader.from_config(_config(False))
    uploader.put(_rollout(0))
    assert uploader.close().uploaded == 0
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may end meanwhile


def test_a_missing_key_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    with pytest.raises(PreflightError, match="OPENREWARD_API_KEY"):
        Uploader.from_config(_config(True))
