"""An invalid answer of an environment server, sent over HTTP, fails only that rollout, with a typed error."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.errors import BadAnswer, BadTask, ConfigError, InfraError, OrhpcError
from orhpc.rollout.environment import openreward_session as wire
from orhpc.rollout.environment.environment import Environment
from orhpc.rundir.record import write_rollouts
from orhpc.types import Rollout, RolloutEnd, Task
from tests.hostile import (
    CANARY,
    PROMPT,
    RESULT,
    TOOLS,
    Hostile,
    Raw,
    answer,
    as_json,
    endless,
    events,
    gzip_bomb,
    hostile_server,
    result,
    zipped,
)  # fmt: skip
from tests.scripted import QWEN, Policy, chat, play

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "act", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    with hostile_server() as hostile:
        yield hostile


@pytest.fixture(autouse=True)
def quick(server: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)
    server.shapes, server.requests = {}, []


def run(server: Hostile, *, megabytes: float = 16.0, lines: int = 3, **options: Any) -> Rollout:
    """Run one rollout of a model that calls the tool; raises what a worker would receive."""
    form = chat(QWEN)
    settings = {"max_turns": lines, "max_answer_mb": megabytes}
    options = {"tool_timeout_s": 20, "session_timeout_s": 20, **options}
    return play(server.url, "main", Policy(form, [CALL] * lines), form, settings=settings, **options)


def test_a_correct_server_gives_a_rollout(server: Hostile) -> None:
    made = run(server)
    assert (made.end, made.reward) == (RolloutEnd.TERMINAL, 1.0)


def deep(levels: int) -> Any:
    schema: Any = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def tool(**fields: Any) -> Raw:
    return as_json({"tools": [{"name": "act", "description": "", "input_schema": {}} | fields]})


def output(**fields: Any) -> Raw:
    return result({"ok": True, "output": {"blocks": [], "finished": True} | fields})


def text(value: Any) -> Raw:
    return output(blocks=[{"type": "text", "text": value}])


def more(reward: float) -> Raw:
    return result({"ok": True, "output": {"blocks": [], "finished": False, "reward": reward}})


def unparsed(reward: bytes) -> Raw:
    return events(("end", b'{"ok": true, "output": {"blocks": [], "reward": ' + reward + b"}}"))


WEIRD = (None, {}, 3, "act", [3], [[]])
PAID = (True, "1", [1], 1.5e308, -1e308, 1e16)
ROLE = {"type": "text", "text": "x", "detail": {"role": "user"}}
DEEP = b'{"detail": ' + b"[" * 400 + b"]" * 400 + b"}"
NUMERIC = {**TOOLS, "terminal_tool": {"name": "a", "arg": 1}}
BROKEN = [
    *((f"tools {value!r}", "/task_tools", as_json({"tools": value})) for value in WEIRD),
    ("tools are a list", "/task_tools", as_json([])),
    ("tools are null", "/task_tools", as_json(None)),
    ("tools are a number", "/task_tools", as_json(3)),
    ("no tools", "/task_tools", as_json({})),
    ("two tools of a name", "/task_tools", as_json({"tools": TOOLS["tools"] * 2})),
    ("100,000 tools", "/task_tools", as_json({"tools": [{"name": f"t{i}"} for i in range(100_000)]})),
    ("2 MB of description", "/task_tools", tool(description="x" * 2_000_000)),
    ("a tool without a name", "/task_tools", as_json({"tools": [{"description": ""}]})),
    ("a name that is a number", "/task_tools", tool(name=7)),
    ("an empty name", "/task_tools", tool(name="")),
    ("a long name", "/task_tools", tool(name="a" * 10_000)),
    ("a description that is a list", "/task_tools", tool(description=["x"])),
    ("a schema that is a text", "/task_tools", tool(input_schema="text")),
    ("a schema that is a list", "/task_tools", tool(input_schema=[1])),
    ("properties that are a list", "/task_tools", tool(input_schema={"properties": [1]})),
    ("required that is a text", "/task_tools", tool(input_schema={"required": "x"})),
    ("a schema of 450 levels", "/task_tools", tool(input_schema=deep(450))),
    ("a schema of 60 levels", "/task_tools", tool(input_schema=deep(60))),
    ("100,000 brackets", "/task_tools", answer(b"[" * 100_000)),
    ("terminal tool without a name", "/task_tools", as_json({**TOOLS, "terminal_tool": {"arg": "x"}})),
    ("terminal tool that is a text", "/task_tools", as_json({**TOOLS, "terminal_tool": "act"})),
    ("terminal tool with a numeric argument", "/task_tools", as_json(NUMERIC)),
    ("message kinds that are a text", "/task_tools", as_json({**TOOLS, "message_block_types": "tool_call"})),
    ("blocks null", "/prompt", as_json(None)),
    ("a prompt that is a text", "/prompt", as_json("Do it.")),
    ("a prompt that is an object", "/prompt", as_json({"text": "Do it."})),
    ("a block without text", "/prompt", as_json([{"type": "text"}])),
    ("a text that is a number", "/prompt", as_json([{"type": "text", "text": 3}])),
    ("a text that is null", "/prompt", as_json([{"type": "text", "text": None}])),
    ("an unknown block", "/prompt", as_json([{"type": "sound", "data": "x"}])),
    ("a block of type list", "/prompt", as_json([{"type": ["text"], "text": "x"}])),
    ("blocks within blocks", "/prompt", as_json([[{"type": "text", "text": "x"}]])),
    ("an image's type is a number", "/prompt", as_json([{"type": "image", "mimeType": 3}])),
    ("an empty body", "/prompt", answer(b"")),
    ("HTML", "/prompt", answer(b"<html>Login</html>", kind="text/html")),
    ("truncated JSON", "/prompt", answer(b'[{"type": "text", "te')),
    ("invalid UTF-8", "/prompt", answer(b'[{"type": "text", "text": "\xff\xfe"}]')),
    ("a lone surrogate", "/prompt", answer(b'[{"type": "text", "text": "\\ud800"}]')),
    ("a number of 10,000 digits", "/prompt", answer(b"9" * 10_000)),
    ("NaN", "/prompt", answer(b'[{"type": "text", "text": NaN}]')),
    ("a role for no messages", "/prompt", as_json([ROLE])),
    ("a body shorter than it says", "/prompt", answer(b"[]", headers=("Content-Length: 999999",))),
    ("a gzip that is none", "/prompt", answer(b"hello", headers=("Content-Encoding: gzip",))),
    ("a redirect to nowhere", "/prompt", answer(b"", status="307 Temporary Redirect")),
    ("a redirect elsewhere", "/prompt", answer(b"", status="307 X", headers=("Location: http://127.0.0.2:9/",))),
    ("a redirect to itself", "/prompt", answer(b"", status="307 X", headers=("Location: /main/prompt",))),
    ("no HTTP at all", "/prompt", answer(b"", status="what")),
    ("a reason of control characters", "/call", answer(b"", status="500 \xff\x1b[31m")),
    ("an error that is deep", "/call", answer(DEEP, status="500 X")),
    ("an error that is a list", "/call", answer(b"[1]", status="500 X")),
    ("Retry-After of no number", "/prompt", answer(b"", status="429 X", headers=("Retry-After: \xb2",))),
    ("a session refused", "/create", answer(b'{"detail": "no"}', status="403 Forbidden")),
    ("a call answered by a page", "/call", answer(b"<html>", kind="text/html")),
    ("a call answered by JSON", "/call", as_json(RESULT)),
    ("a call answered by nothing", "/call", events()),
    ("events that break off", "/call", events(("task_id", b"t1"), ("chunk", b'{"ok"'))),
    ("an event that is not UTF-8", "/call", events(("end", b"\xff\xfe"))),
    ("an end without data", "/call", events(("task_id", b"t1"), ("end", b""))),
    ("an end that is not JSON", "/call", events(("end", b"{"))),
    *((f"a result {value!r}", "/call", result(value)) for value in (None, [], {}, 3, "x", {"ok": True})),
    ("ok that is a text", "/call", result({"ok": "true", "output": RESULT["output"]})),
    ("ok that is 1", "/call", result({"ok": 1, "output": RESULT["output"]})),
    ("an error that is a number", "/call", result({"ok": False, "error": 3})),
    ("a reason that is a list", "/call", result({"ok": False, "error": "x", "reason": []})),
    ("an output that is a list", "/call", result({"ok": True, "output": []})),
    ("blocks null in a result", "/call", output(blocks=None)),
    ("an unknown block in a result", "/call", output(blocks=[{"type": "tool_call", "name": "x"}])),
    ("finished that is a text", "/call", output(finished="no")),
    ("finished that is a number", "/call", output(finished=1)),
    *((f"a reward of {value!r}", "/call", output(reward=value)) for value in PAID),
    ("a reward of Infinity", "/call", unparsed(b"Infinity")),
    ("a reward of 1e999", "/call", unparsed(b"1e999")),
    ("two rewards of 1e308", "/call", [more(1e308)] * 3),
    ("rewards that add up to too much", "/call", [more(9e14)] * 3),
    ("metadata of 450 levels", "/call", output(metadata=deep(225))),
    ("a task id of another kind", "/call", events(("task_id", b"\x00\xff"), ("end", b"{}"))),
]  # fmt: skip


@pytest.mark.parametrize(("path", "shape"), [pytest.param(p, s, id=name) for name, p, s in BROKEN])
def test_a_broken_answer_fails_the_rollout(server: Hostile, path: str, shape: Any) -> None:
    """``shape``: one answer for all requests to that path, or a list of consecutive answers."""
    server.shapes[path] = list(shape) if isinstance(shape, list) else shape
    try:
        made = run(server)
    except (InfraError, BadTask) as error:
        message = str(error)
    else:
        assert made.end is RolloutEnd.FAILED
        assert made.reward is None
        message = made.error or ""
    assert message
    assert "\n" not in message
    assert len(message) < 1000


ODD_BUT_VALID = [
    ("images", "/prompt", as_json([*PROMPT, {"type": "image", "data": "", "mimeType": None}])),
    ("a newer field", "/prompt", as_json([{"type": "text", "text": "Do it.", "style": {}}])),
    ("metadata that is a list", "/call", output(metadata=[1], reward=1)),
    ("a schema of true", "/task_tools", tool(input_schema={"properties": {"x": True}})),
    ("our marker in a description", "/task_tools", tool(description=' orhpcslot0x"x  orhpcslot1x"x ')),
    ("a redirect within the server", "/prompt", [
        answer(b"", status="307 X", headers=("Location: /main/prompt?again",)), as_json(PROMPT),
    ]),
    ("a line of 2 MB", "/call", output(blocks=[{"type": "text", "text": "x" * 2_000_000}], reward=1)),
    ("control characters", "/call", output(blocks=[{"text": "\x00\x1b[31m"}], reward=1)),
    ("gzip", "/prompt", zipped(json.dumps(PROMPT).encode())),
]  # fmt: skip


@pytest.mark.parametrize(("path", "shape"), [pytest.param(p, s, id=name) for name, p, s in ODD_BUT_VALID])
def test_an_unusual_but_valid_answer_is_accepted(server: Hostile, path: str, shape: Any) -> None:
    server.shapes[path] = list(shape) if isinstance(shape, list) else shape
    if isinstance(shape, list):
        server.shapes["/prompt?again"] = shape[1]
    assert run(server).end is RolloutEnd.TERMINAL


@pytest.mark.parametrize(
    ("path", "value"),
    [("/list_environments", {"a": 1}), ("/list_environments", [1]), ("/tools", []), ("/tools", {"tools": 3})],
)
def test_a_server_that_is_not_openreward_is_reported_at_the_start(
    server: Hostile, path: str, value: Any
) -> None:
    server.shapes[path] = as_json(value)
    with pytest.raises(ConfigError, match=r"environment 'main'.*OpenReward server\?"):
        run(server)


@pytest.mark.parametrize("value", [{"num_tasks": True}, {"num_tasks": "7"}, [], {"num_tasks": 10**9}])
def test_an_invalid_number_of_tasks_is_refused(server: Hostile, value: Any) -> None:
    server.shapes["/num_tasks"] = as_json(value)

    async def count() -> int:
        settings = EnvironmentSettings()
        environment = await Environment.open(
            "main", settings, secrets={}, rollout=RolloutSettings(), url=server.url
        )
        try:
            return await environment.num_tasks("train")
        finally:
            await environment.close()

    with pytest.raises(ConfigError, match=r"num_tasks|num_samples"):
        asyncio.run(count())


CHUNK = b"event: chunk\ndata: " + b"x" * 9999 + b"\n\n"
STREAM = "text/event-stream"


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        pytest.param("/prompt", gzip_bomb(), id="a gzip bomb"),
        pytest.param("/prompt", endless("application/json", b" " * 65536), id="an endless body"),
        pytest.param("/call", endless(STREAM, CHUNK), id="events"),
        pytest.param("/call", endless(STREAM, b"x" * 65536), id="an endless line"),
        pytest.param("/call", endless(STREAM, b": ping\n\n" * 500), id="endless comments"),
    ],
)  # fmt: skip
def test_an_endless_answer_is_cut_off(server: Hostile, path: str, shape: Raw) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    server.shapes[path] = shape
    try:
        made = run(server, megabytes=4.0)
        error: str | None = made.error
    except OrhpcError as failure:
        error = str(failure)
    assert "more than 4 MB (environments.NAME.max_answer_mb)" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 * 1024  # KiB


def test_a_long_error_message_is_not_read_completely(server: Hostile) -> None:
    server.shapes["/prompt"] = endless("application/json", b"x" * 65536, status="422 No")
    assert "too long to be read" in str(run(server).error)


def test_only_the_part_of_a_long_output_that_fits_is_processed(server: Hostile) -> None:
    """5 MB with a limit of 2,000 tokens: most of it is neither tokenized nor stored."""
    blocks = [{"text": "word, and " * 500_000}]
    long = result({"ok": True, "output": {"blocks": blocks, "finished": False}})
    run(server)  # load everything that is loaded once
    server.shapes["/call"] = [long, result(RESULT)]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    made = run(server, max_total_tokens=2000, max_response_tokens=200)
    assert made.end is RolloutEnd.TERMINAL
    assert made.length <= 2000
    shown = next(m["content"] for m in made.messages if m["role"] == "tool")
    assert len(shown) < 100_000
    assert "more characters left out" in shown
    assert time.process_time() - began < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 100 * 1024  # KiB


def test_a_long_prompt_is_refused_before_it_is_tokenized(server: Hostile) -> None:
    server.shapes["/prompt"] = as_json([{"type": "text", "text": " " * 5_000_000}])
    made = run(server, max_total_tokens=2000, max_response_tokens=200)
    assert made.end is RolloutEnd.PROMPT_TOO_LONG
    assert "5000000 characters" in str(made.error)
    assert sum(len(m["content"]) for m in made.messages) < 100_000


def test_a_redirect_does_not_receive_keys_or_secrets(server: Hostile) -> None:
    with hostile_server() as other:
        elsewhere = answer(b"", status="307 Temporary Redirect", headers=(f"Location: {other.url}/create",))
        server.shapes["/create"] = elsewhere
        settings = EnvironmentSettings()

        async def ask() -> None:
            environment = await Environment.open(
                "main", settings, secrets={"MY_KEY": "canary"}, rollout=RolloutSettings(), url=server.url
            )
            try:
                async with environment.session(Task("main", "train", 0)):
                    pass
            finally:
                await environment.close()

        with pytest.raises(BadAnswer, match="redirect to another address"):
            asyncio.run(ask())
        assert any("x-secrets" in headers for _, headers in server.requests)
        assert other.requests == []


TRACE = json.dumps({"detail": f"Traceback x\n  {CANARY}\nE: {CANARY}"}).encode()
ECHOED = [
    ("/create", answer(json.dumps({"detail": f"no: {CANARY}"}).encode(), status="422 No")),
    ("/call", answer(TRACE, status="500 X")),
    ("/call", answer(b"", status=f"500 {CANARY}")),
    ("/call", events(("task_id", b"t"), ("error", CANARY.encode()))),
    ("/call", text(f"your key is {CANARY}")),
    ("/call", events(("end", CANARY.encode()))),
    ("/call", result({"ok": False, "error": CANARY})),
    ("/call", output(metadata={CANARY: [CANARY]}, reward=1)),
    ("/prompt", as_json([{"text": f"say {CANARY}"}])),
    ("/task_tools", tool(description=CANARY)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "shape"), ECHOED)
def test_a_secret_that_an_environment_repeats_is_redacted(
    server: Hostile, known: None, tmp_path: Path, path: str, shape: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    server.shapes[path] = shape
    try:
        made = run(server)
    except OrhpcError as error:
        content = f"{error!r} {error.transcript} {getattr(error, 'trace', '')} {getattr(error, 'detail', '')}"
    else:
        content = f"{made.messages} {made.error}"
        ids = made.tokens_T.tolist()
        content += chat(QWEN).codec.decode(ids)
        write_rollouts(tmp_path / "a.h5", [made])
    assert CANARY not in content
    assert CANARY not in caplog.text
