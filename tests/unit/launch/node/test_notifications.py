"""Messages of an attempt to a real HTTP server, and a webhook that fails."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.errors import ConfigError, NodeLost, PreflightError
from orhpc.launch import prepare
from orhpc.launch.node import notifications
from orhpc.launch.node.notifications import GapWatch, Notifier, post
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events

CONFIG = Path(__file__).parents[4] / "configs/tiny.yaml"


class Webhook:
    """A server that keeps the bodies that it receives."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[int] = []
        """Status codes of the next answers; then 200."""
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = hook.answers.pop(0) if hook.answers else 200
                if status == 200:
                    hook.bodies.append(body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", f"{hook.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                hook.bodies.append({"redirected": True})
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/T0/s3cr3t-p4th"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    monkeypatch.setattr(notifications, "_LOOK_S", 0.05)
    found = Webhook()
    monkeypatch.setenv("MY_WEBHOOK", found.url)
    yield found
    found.server.shutdown()


class Started:
    """An attempt of a run with a webhook."""

    def __init__(self, folder: Path, *overrides: str, url: str = "env:MY_WEBHOOK") -> None:
        self.config = load_config(CONFIG, [f"notify.webhook={url}", *overrides])
        self.rundir = RunDir(folder / "run")
        self.rundir.create()
        self.number = self.rundir.begin_attempt()
        self.events = EventLog(self.rundir.events, self.number)
        self.lines: list[str] = []

    def notifier(self) -> Notifier:
        return Notifier(self.config, self.rundir, self.number, lambda: False, self.lines.append)

    def step(self, step: int) -> None:
        self.events.write("step", step=step, steps=9, seconds=1.0, phases={})


@pytest.mark.slow
def test_a_run_s_start_alarm_and_end_are_sent(tmp_path: Path, hook: Webhook) -> None:
    run = Started(tmp_path)
    with run.notifier():
        run.events.write("bring_up", step=4, commit="step_4.a001")
        run.events.write("ready", step=4, steps=9)
        run.step(5)
        run.events.write("alarm", step=5, reason="grad_norm 12 is above 10", metric="grad_norm")
        run.events.write("finished", step=5)
    assert [b["event"] for b in hook.bodies] == ["started", "alarm", "finished"]
    started, alarm, finished = hook.bodies
    assert started["text"] == "tiny: started (attempt 1, step 4 of 9, from commit step_4.a001)"
    assert alarm["text"] == "tiny: alarm: grad_norm 12 is above 10"
    assert alarm["metric"] == "grad_norm"
    assert finished["text"] == "tiny: finished after step 5"
    assert finished["directory"] == str(run.rundir.path)
    assert run.lines == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "failed", "kind": "NonFinite", "error": "a NaN"}, "failed after step 1: NonFinite: a NaN"),
        ({"event": "stopped", "step": 1, "reason": "asked to stop"}, "stopped after step 1 (asked to stop)"),
    ],
)
def test_an_end_says_why(tmp_path: Path, hook: Webhook, event: dict[str, Any], text: str) -> None:
    run = Started(tmp_path, "notify.events=[end]")
    with run.notifier():
        run.step(1)
        run.events.write(**event)
    assert [b["text"] for b in hook.bodies] == [f"tiny: {text}"]
    assert hook.bodies[0]["outcome"] == event["event"]


@pytest.mark.slow
def test_a_killed_driver_and_a_lost_node_are_reported(tmp_path: Path, hook: Webhook) -> None:
    run = Started(tmp_path)
    with run.notifier():
        run.step(3)
    with run.notifier() as notifier:
        notifier.ended(NodeLost("node7 is gone"))
    texts = [b["text"] for b in hook.bodies]
    assert texts == ["tiny: failed: its driver was killed", "tiny: failed: NodeLost: node7 is gone"]


@pytest.mark.slow
def test_a_long_gap_is_reported_once(tmp_path: Path, hook: Webhook) -> None:
    run = Started(tmp_path, "notify.gap_at_least_s=0.5", "notify.gap_factor=2", "notify.events=[gap]")
    with run.notifier():
        for step in range(1, 6):
            run.step(step)
            time.sleep(0.1)
        time.sleep(1.5)
        run.events.write("finished", step=5)
    (body,) = hook.bodies
    assert body["event"] == "gap"
    assert body["step"] == 5


def test_what_is_usual_is_learned_from_steps() -> None:
    watch = GapWatch(5.0, 60.0)
    for now in (0.0, 100.0, 200.0):
        watch.step(now)
    assert watch.gap_s(10_000.0) is None  # two intervals are too few
    watch.step(300.0)
    assert watch.gap_s(799.0) is None
    assert watch.gap_s(801.0) == (501.0, 100.0)
    assert watch.gap_s(900.0) is None
    watch.step(1000.0)  # the gap itself is not usual
    assert watch.gap_s(1501.0) == (501.0, 100.0)
    watch.stop()
    assert watch.gap_s(9999.0) is None


@pytest.mark.slow
def test_a_failing_webhook_is_one_notice_without_its_url(
    tmp_path: Path, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_CLOSE_S", 6.0)
    hook.answers = [503]
    run = Started(tmp_path)
    with run.notifier():
        run.events.write("ready", step=0, steps=9)
        run.events.write("finished", step=9)
    assert [b["event"] for b in hook.bodies] == ["started", "finished"]  # it was tried again
    (line,) = run.lines
    assert "answered 503" in line
    notices = [e["reason"] for e in read_events(run.rundir.events) if e["event"] == "notice"]
    assert notices == [line]
    assert "s3cr3t" not in run.rundir.events.read_text()


@pytest.mark.slow
def test_a_redirect_is_not_followed(hook: Webhook) -> None:
    hook.answers = [302]
    assert post(hook.url, {}) == "the server answered 302"
    assert hook.bodies == []


@pytest.mark.slow
def test_a_server_that_is_away_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_LOOK_S", 0.05)
    monkeypatch.setattr(notifications, "_CLOSE_S", 1.0)
    monkeypatch.setenv("MY_WEBHOOK", "http://127.0.0.1:9/s3cr3t")
    run = Started(tmp_path)
    begun = time.monotonic()
    with run.notifier():
        run.events.write("finished", step=9)
    assert time.monotonic() - begun < 3.0
    assert "cannot be reached" in run.lines[0]
    assert "s3cr3t" not in run.lines[0]


@pytest.mark.slow
def test_a_metric_that_stays_beyond_its_threshold_is_one_message(tmp_path: Path, hook: Webhook) -> None:
    run = Started(tmp_path, "notify.events=[alarm, end]")
    with run.notifier():
        for step in (1, 2, 3, 3, 5, 6):  # step 3 is repeated after a restart; at step 4 all is well
            run.step(step)
            run.events.write("alarm", step=step, reason=f"grad_norm {step}", metric="grad_norm")
            run.events.write("alarm", step=step, reason=f"rollout_kl {step}", metric="rollout_kl")
        run.events.write("finished", step=6)
    assert [b["text"].partition(": ")[2] for b in hook.bodies] == [
        "alarm: grad_norm 1",
        "alarm: rollout_kl 1",
        "alarm: grad_norm 5",
        "alarm: rollout_kl 5",
        "finished after step 6",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["nothing", "a header without an end"])
def test_a_webhook_that_never_answers_does_not_delay_the_end(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_LOOK_S", 0.05)
    monkeypatch.setattr(notifications, "_CLOSE_S", 1.0)
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            if answer != "nothing":
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not over.wait(0.2):
                if answer != "nothing":
                    connection.sendall(b"x")

    threading.Thread(target=drip, daemon=True).start()
    watchdog = threading.Timer(20.0, over.set)  # without a deadline, the test would wait for ever
    watchdog.start()
    monkeypatch.setenv("MY_WEBHOOK", f"http://127.0.0.1:{listener.getsockname()[1]}/s3cr3t")
    run = Started(tmp_path)
    begun = time.monotonic()
    with run.notifier():
        run.events.write("finished", step=9)
    assert time.monotonic() - begun < 5.0
    over.set()
    watchdog.cancel()
    (line,) = run.lines
    assert "1 messages were not delivered" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a blank in it", "no HTTP server"])
def test_a_wrong_url_never_stops_a_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_LOOK_S", 0.05)
    monkeypatch.setattr(notifications, "_CLOSE_S", 1.0)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(9999)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    threading.Thread(target=answer, daemon=True).start()
    end = " p4th" if kind == "a blank in it" else ""
    monkeypatch.setenv("MY_WEBHOOK", f"http://127.0.0.1:{listener.getsockname()[1]}/s3cr3t{end}")
    run = Started(tmp_path)
    with run.notifier():
        run.events.write("ready", step=0, steps=9)
        run.events.write("finished", step=9)
    (line,) = run.lines
    assert ("not a valid URL" if kind == "a blank in it" else "not HTTP") in line
    assert "s3cr3t" not in line
    assert "p4th" not in line


def test_the_url_s_source_is_checked_before_the_queue(tmp_path: Path) -> None:
    config = load_config(CONFIG, ["notify.webhook=env:NO_SUCH_VARIABLE"])
    with pytest.raises(PreflightError, match="NO_SUCH_VARIABLE is not set"):
        prepare.check_keys(config)
    (tmp_path / "url").write_text("https://example.org/x")
    (tmp_path / "url").chmod(0o644)
    with pytest.raises(PreflightError, match="chmod it to 0600"):
        prepare.check_keys(load_config(CONFIG, [f"notify.webhook=file:{tmp_path}/url"]))
    with pytest.raises(ConfigError, match="never the value itself"):
        load_config(CONFIG, ["notify.webhook=https://hooks.example.org/x"])
