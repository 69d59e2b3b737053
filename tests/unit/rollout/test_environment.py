"""OpenReward sessions against the real server on loopback; shows that the SDK's known faults are absent."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openreward.environments import Environment as ServedEnvironment
from openreward.environments import ImageBlock, TextBlock, ToolOutput, terminal, tool
from openreward.environments.types import Message, ReasoningBlock, ToolCallBlock, ToolResultBlock
from pydantic import BaseModel

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.errors import (
    BadAnswer,
    BadTask,
    ConfigError,
    EnvironmentRaised,
    EnvironmentUnavailable,
    PreflightError,
    ToolTimeout,
    UserCodeError,
)
from orhpc.rollout.environment import call_history, leaving, receiving
from orhpc.rollout.environment import environment as environment_module
from orhpc.rollout.environment import openreward_session as wire
from orhpc.rollout.environment.addresses import choose_variant, is_private
from orhpc.rollout.environment.answers import conversation, tool_result, wire_messages
from orhpc.rollout.environment.environment import Environment
from orhpc.types import Task
from tests.served import Served, serve

pytestmark = pytest.mark.slow

LONG = "".join(
    random.Random(1).choices(["  ", "\n", "\r\n", "\t", " x ", "é", "\u2028", "word", "{", '"'], k=160_000)
)
GOLD = "the gold answer is 42"


class Text(BaseModel):
    text: str


class WhoDunIt(ServedEnvironment):
    """One tool for each kind of behavior of an environment."""

    runs: dict[str, int]
    release = threading.Event()

    def __init__(self, task_spec: Any = None, secrets: Any = None) -> None:
        super().__init__(task_spec or {}, secrets or {})
        self.secrets = dict(secrets or {})
        if self.task_spec.get("constructor"):
            raise RuntimeError("the constructor broke")

    async def setup(self) -> None:
        if self.task_spec.get("setup"):
            raise RuntimeError("setup broke")
        await asyncio.sleep(self.task_spec.get("slow", 0.0))

    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train", "test", "bad", "empty"]

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        raise NotImplementedError

    @classmethod
    async def num_tasks(cls, split: str) -> int:
        return {"train": 7, "test": 2, "bad": 4, "empty": 0}[split]

    @classmethod
    async def get_task(cls, split: str, index: int) -> Any:
        bad: list[dict[str, Any]] = [{"constructor": True}, {"setup": True}, {"image": True}, {"slow": 1.0}]
        return {"gold": GOLD, **(bad[index] if split == "bad" else {})}

    def get_prompt(self) -> list[Any]:
        if self.task_spec.get("image"):
            return [TextBlock(text="Look:"), ImageBlock(data="AAAA", mimeType="image/png")]
        return [TextBlock(text="  Who did it?\n"), TextBlock(text="Ask.")]

    def _count(self, name: str) -> None:
        type(self).runs[name] = type(self).runs.get(name, 0) + 1

    @tool
    async def long(self) -> ToolOutput:
        """A long text."""
        return ToolOutput(blocks=[TextBlock(text=LONG)], reward=0.25)

    @tool
    async def count(self, text: Text) -> ToolOutput:
        """Have a side effect."""
        self._count(text.text)
        return ToolOutput(blocks=[TextBlock(text=str(self.runs[text.text]))])

    @tool
    async def hang(self) -> ToolOutput:
        """Never answer."""
        while not self.release.is_set():
            await asyncio.sleep(0.02)
        return ToolOutput(blocks=[TextBlock(text="late")])

    @tool
    async def fail(self) -> ToolOutput:
        """Raise."""
        raise KeyError("a bug\nof two lines")

    @tool
    async def picture(self) -> ToolOutput:
        """Return an image."""
        return ToolOutput(blocks=[ImageBlock(data="AAAA", mimeType="image/png")])

    @tool
    async def pay(self, text: Text) -> ToolOutput:
        """Return the requested reward."""
        return ToolOutput(blocks=[TextBlock(text="")], reward=float(text.text), finished=text.text == "1")

    @tool
    async def secret(self) -> ToolOutput:
        """Return the secrets."""
        return ToolOutput(blocks=[TextBlock(text=repr(sorted(self.secrets.items())))])

    async def score_group(self, candidates: Any) -> list[float]:
        return [float(len(c.messages[-1].blocks[0].text)) for c in candidates]


class Plain(ServedEnvironment):
    """A plain answer ends the task; the tasks are listed."""

    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return [{"a": i} for i in range(3)]

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"Say {self.task_spec['a']}")]

    @terminal
    @tool
    async def submit(self, text: Text) -> ToolOutput:
        """Take it."""
        if text.text == "raise":
            raise ValueError("cannot be read")
        right = text.text == str(self.task_spec["a"])
        return ToolOutput(blocks=[TextBlock(text="ok")], reward=float(right), finished=True)


class Dialogue(Plain):
    """Serves its prompt as a conversation."""

    def get_messages(self) -> list[Message]:
        call = ToolCallBlock(id="1", name="look", input={"at": "door"})
        result = ToolResultBlock(tool_call_id="1", blocks=[TextBlock(text="It is shut.")])
        return [
            Message(role="system", blocks=[TextBlock(text="You are a clerk.")]),
            Message(role="user", blocks=[TextBlock(text="Hi.")]),
            Message(role="assistant", blocks=[ReasoningBlock(text="Hm."), TextBlock(text="Wait."), call]),
            Message(role="user", blocks=[result, TextBlock(text=f"Say {self.task_spec['a']}")]),
        ]

    get_prompt = ServedEnvironment.get_prompt


@pytest.fixture
def served() -> Iterator[Served]:
    WhoDunIt.runs = {}
    WhoDunIt.release.clear()
    with serve(WhoDunIt, Plain, Dialogue) as running:
        yield running
        WhoDunIt.release.set()


@asynccontextmanager
async def opened(
    url: str | None,
    name: str = "Org/whodunit",
    *,
    secrets: Any = None,
    settings: Any = None,
    configured: bool = False,
    **rollout: Any,
) -> AsyncIterator[Environment]:
    """``configured``: the URL is in the config, so that a platform may be in front of the server."""
    environment = await Environment.open(
        name,
        EnvironmentSettings(**(settings or {}), **({"url": url} if configured else {})),
        secrets=secrets or {},
        rollout=RolloutSettings(**rollout),
        url=None if configured else url,
    )
    try:
        yield environment
    finally:
        await environment.close()


Body = Callable[[Environment], Awaitable[None]]


def within(url: str, body: Body, **options: Any) -> None:
    async def all_of_it() -> None:
        async with opened(url, **options) as environment:
            await body(environment)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def task(index: int = 0, split: str = "train") -> Task:
    return Task("Org/whodunit", split, index)


# --- what works -------------------------------------------------------------------------------------


def test_tasks_prompt_tools_and_calls(served: Served) -> None:
    async def body(environment: Environment) -> None:
        assert await environment.num_tasks("train") == 5
        assert await environment.num_tasks("test") == 2
        assert environment.supports_score_group
        async with environment.session(task()) as session:
            assert session.prompt == "  Who did it?\n\nAsk."
            assert not session.terminal
            by_name = {t.name: t for t in session.tools}
            assert set(by_name) == {"long", "count", "hang", "fail", "picture", "pay", "secret"}
            assert by_name["count"].schema["required"] == ["text"]
            assert by_name["long"].schema == {"type": "object", "properties": {}}
            result = await session.call("count", {"text": "a"})
            assert (result.text, result.reward, result.finished, result.error) == ("1", None, False, None)
            result = await session.call("pay", {"text": "1"})
            assert (result.reward, result.finished) == (1.0, True)
        assert served.sessions == 0

    within(served.url, body, settings={"num_samples": 5})


def test_a_terminal_tool_takes_the_answer_and_cannot_be_called(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(Task("plain", "train", 2)) as session:
            assert (session.terminal, session.tools, session.prompt) == (True, [], "Say 2")
            assert (await session.call("submit", {"text": "2"})).error == "not_found"
            result = await session.answer("2")
            assert (result.reward, result.finished) == (1.0, True)

    within(served.url, body, name="plain")


def test_a_conversation_arrives_with_its_roles(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(Task("dialogue", "train", 1)) as session:
            assert session.conversation == (
                ("system", "You are a clerk."),
                ("user", "Hi."),
                ("assistant", 'Wait.\n[tool_call look] {"at": "door"}'),
                ("user", "[tool_result]\nIt is shut.\nSay 1"),
            )
            assert "[system]\nYou are a clerk." in session.prompt

    within(served.url, body, name="dialogue")


def test_a_plain_prompt_is_asked_for_once(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(Task("plain", "train", 1)) as session:
            assert session.conversation == ()
        assert served.calls("/plain/messages") == 0

    within(served.url, body, name="plain")


@pytest.mark.parametrize(
    "messages", [None, {}, [1], [{"role": "tool", "blocks": []}], [{"role": "user", "blocks": "Hi"}]]
)
def test_a_malformed_conversation_is_a_bad_answer(messages: Any) -> None:
    with pytest.raises(BadAnswer):
        conversation(messages, "a task", lambda kind: None)


@pytest.mark.parametrize("roles", [[], ["user", "assistant"], ["user", "system", "user"]])
def test_a_conversation_that_no_template_writes_is_left_flat(roles: list[str]) -> None:
    messages = [{"role": role, "blocks": [{"text": "x"}]} for role in roles]
    assert conversation(messages, "a task", lambda kind: None) == ()


def test_what_the_model_did_wrong_is_a_result(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            for arguments in ({}, {"text": 3}, {"text": ["x"]}):
                assert (await session.call("count", arguments)).error == "input_validation"
            unknown = await session.call("cuont", {})
            assert (unknown.error, unknown.finished) == ("not_found", False)
            assert "cuont" in unknown.text
            huge = await session.call("count", {"text": 10**30})
            assert huge.error == "input_validation"
            await session.call("pay", {"text": "1"})
            after = await session.call("count", {"text": "late"})
            assert (after.error, after.finished) == ("episode_finished", True)
        assert WhoDunIt.runs == {}

    within(served.url, body)


def test_group_scores_come_one_a_rollout(served: Served) -> None:
    async def body(environment: Environment) -> None:
        transcripts = [
            [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "x" * n}]
            for n in (3, 1, 2)
        ]
        assert await environment.score_group(task(), transcripts) == [3.0, 1.0, 2.0]
        assert served.sessions == 0

    within(served.url, body)


TRANSCRIPT = [
    {"role": "user", "content": "Who?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "Hm.",
        "tool_calls": [
            {"name": "look", "arguments": {"at": 1}},
            {"error": "no JSON"},
            {"name": "go", "arguments": {}},
        ],
    },
    {"role": "tool", "content": "a door", "name": "look"},
    {"role": "tool", "content": "Error: no JSON", "name": "", "error": "malformed"},
    {"role": "tool", "content": "", "name": "go", "error": "tool_raised"},
    {"role": "assistant", "content": "It was I."},
    {"role": "tool", "content": "Right.", "name": "answer", "reward": 1.0},
]


def test_a_transcript_is_scored_with_its_calls_as_they_were() -> None:
    made = [Message.model_validate(message) for message in wire_messages(TRANSCRIPT, rich=True)]
    assert [m.role for m in made] == ["user", "assistant", "user", "user", "user", "assistant", "user"]
    kinds = [[block.type for block in m.blocks] for m in made]
    assert kinds[1] == ["reasoning", "text", "tool_call", "tool_call"]
    assert kinds[2:5] == [["tool_result"], ["text"], ["tool_result"]]
    calls = {block.id: block for block in made[1].blocks if isinstance(block, ToolCallBlock)}
    results = [b for m in made for b in m.blocks if isinstance(b, ToolResultBlock)]
    assert [(calls[r.tool_call_id].name, r.is_error) for r in results] == [("look", False), ("go", True)]
    assert kinds[5:] == [["text"], ["text"]]


def test_an_older_server_is_given_text_alone() -> None:
    made = wire_messages(TRANSCRIPT)
    assert {block["type"] for m in made for block in m["blocks"]} == {"text"}
    assert [m["role"] for m in made] == ["user", "assistant", "user", "user", "assistant", "user"]


def test_the_gold_answer_never_crosses_the_wire(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()):
            pass
        paths = {path for path, _ in served.requests}
        assert not {p for p in paths if p.rsplit("/", 1)[-1] in ("task", "tasks", "task_range")}

    within(served.url, body)


def test_secrets_go_to_the_session_and_the_services_key_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENREWARD_API_KEY", "key-of-the-service")

    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            told = (await session.call("secret", {})).text
        assert told == repr([("MY_OWN", "v1"), ("OPENAI_API_KEY", "v2")])
        assert all("x-api-key" not in headers for _, headers in served.requests)
        with_secrets = {path for path, headers in served.requests if "x-secrets" in headers}
        assert with_secrets == {"/create_session", "/create"}

    within(served.url, body, secrets={"MY_OWN": "v1", "OPENAI_API_KEY": "v2"}, configured=True)


def test_a_server_of_the_jobs_own_is_asked_for_nothing_but_the_task(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.requests.clear()
        async with environment.session(task()) as session:
            await session.call("count", {"text": "a"})
        assert served.sessions == 0

    within(served.url, body)
    wanted = ["/create", "/whodunit/prompt", "/whodunit/task_tools", "/whodunit/call", "/delete"]
    assert [path for path, _ in served.requests] == wanted


@pytest.mark.parametrize("configured", [False, True])
def test_sessions_after_each_other_share_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    monkeypatch.setattr(receiving, "DRAIN_S", 10.0)

    async def body(environment: Environment) -> None:
        async def rollout() -> None:
            async with environment.session(task()) as session:
                await session.call("pay", {"text": "1"})

        for _ in range(4):
            await asyncio.gather(*(rollout() for _ in range(8)))

    within(served.url, body, configured=configured)
    assert len(served.connections) <= 8 + 1  # plus the one used to query the environment


def test_private_servers_are_reached_without_proxies(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def body(environment: Environment) -> None:
        assert await environment.num_tasks("train") == 7

    within(served.url, body)
    within(served.url, body, configured=True)


def test_a_stream_that_does_not_end_holds_nothing_up() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        event = b"event: end\ndata: 1\n\n"
        writer.write(head + b"%x\r\n%s\r\n" % (len(event), event))

    async def ask() -> float:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = "http://{}:{}/".format(*server.sockets[0].getsockname())
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            began = time.monotonic()
            events = receiving.sse_events(response.content, 10_000, "a call")
            assert [event async for event, _ in one(events)] == ["end"]
            await receiving.drain(response)
            took = time.monotonic() - began
        server.close()
        return took

    async def one(events: AsyncIterator[tuple[str, str]]) -> AsyncIterator[tuple[str, str]]:
        async for event in events:
            yield event
            return

    assert receiving.DRAIN_S * 0.9 <= asyncio.run(ask()) < receiving.DRAIN_S + 1.0


# --- faults of the SDK ------------------------------------------------------------------------------


def test_long_outputs_arrive_exactly(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            result = await session.call("long", {})
            assert len(LONG) > 220_000
            assert result.text == LONG
            assert result.reward == 0.25

    within(served.url, body)


def test_a_call_has_a_deadline(served: Served) -> None:
    async def body(environment: Environment) -> None:
        began = time.monotonic()
        with pytest.raises(EnvironmentUnavailable, match="no answer in time"):
            async with environment.session(task()) as session:
                await session.call("hang", {})
        assert time.monotonic() - began < 3

    within(served.url, body, tool_timeout_s=0.5)


def test_a_call_whose_answer_is_lost_is_never_made_again(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.cut["/whodunit/call"] = ["before"]
        with pytest.raises(EnvironmentUnavailable):
            async with environment.session(task()) as session:
                await session.call("count", {"text": "once"})
        assert served.calls("/whodunit/call") == 1
        assert WhoDunIt.runs == {"once": 1}

    within(served.url, body)


@pytest.mark.parametrize("status", [500, 502, 504])
def test_an_ambiguous_answer_to_a_call_is_not_tried_again(served: Served, status: int) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/whodunit/call"] = [(status, {})]
        with pytest.raises((EnvironmentUnavailable, BadTask)):
            async with environment.session(task()) as session:
                await session.call("count", {"text": "x"})
        assert served.calls("/whodunit/call") == 1

    within(served.url, body)


def test_a_call_is_resumed_after_a_broken_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.05)

    async def body(environment: Environment) -> None:
        served.cut["/whodunit/call"] = ["after", "after"]
        async with environment.session(task()) as session:
            result = await session.call("count", {"text": "resumed"})
        assert result.text == "1"
        assert served.calls("/whodunit/call") == 3
        assert WhoDunIt.runs == {"resumed": 1}

    within(served.url, body)


def test_refusals_that_ran_nothing_are_waited_out(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            served.answers["/whodunit/call"] = [
                (429, {"Retry-After": "1"}),
                (503, {"X-Backend-State": "starting", "Retry-After": "0"}),
            ]
            began = time.monotonic()
            assert (await session.call("count", {"text": "waited"})).text == "1"
            assert time.monotonic() - began >= 1.0
            assert served.calls("/whodunit/call") == 3

    within(served.url, body)


def test_a_slow_start_of_a_session_is_ridden_out(served: Served) -> None:
    starting = (503, {"X-Backend-State": "starting", "Retry-After": "1"})

    async def body(environment: Environment) -> None:
        served.answers["/create_session"] = [starting, starting]
        served.answers["/whodunit/prompt"] = [starting]
        async with environment.session(task()) as session:
            assert session.prompt

    within(served.url, body, session_timeout_s=1.5, configured=True)


def test_a_session_that_never_starts_is_given_up(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/whodunit/prompt"] = [
            (503, {"X-Backend-State": "starting", "Retry-After": "0"})
        ] * 10_000
        with pytest.raises(EnvironmentUnavailable, match="no answer in time"):
            async with environment.session(task()):
                pass

    within(served.url, body, session_timeout_s=0.5, environment_start_timeout_s=1.5)


@pytest.mark.parametrize("configured", [False, True])
def test_cancelling_never_leaks_a_session(served: Served, configured: bool) -> None:
    async def body(environment: Environment) -> None:
        async def rollout(number: int) -> None:
            async with environment.session(task()):
                await asyncio.sleep(0.02 * (number % 3))

        for wave in range(12):
            rollouts = [asyncio.ensure_future(rollout(n)) for n in range(8)]
            await asyncio.sleep(0.004 * wave)
            for each in rollouts:
                each.cancel()
            await asyncio.gather(*rollouts, return_exceptions=True)

    within(served.url, body, configured=configured)
    assert served.calls("/create") > 8
    assert served.sessions == 0


def test_a_cancelled_call_deletes_the_session(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async def rollout() -> None:
            async with environment.session(task()) as session:
                await session.call("hang", {})

        running = asyncio.ensure_future(rollout())
        while not served.calls("/whodunit/call"):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    within(served.url, body)
    assert served.sessions == 0


def test_a_lost_session_is_noticed_at_once(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            served.server._active_envs.clear()
            served.server._ready.clear()
            with pytest.raises(EnvironmentUnavailable, match="404"):
                await session.call("count", {"text": "x"})
            assert WhoDunIt.runs == {}

    within(served.url, body)


def test_the_keep_alive_notices_death_during_a_call(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PING_INTERVAL_S", 0.1)

    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentUnavailable, match="lost the session"):
            async with environment.session(task()) as session:
                pending = asyncio.ensure_future(session.call("hang", {}))
                await asyncio.sleep(0.5)
                assert not pending.done()
                served.server._active_envs.clear()
                await pending

    within(served.url, body)


def test_pings_without_an_answer_are_death(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PING_INTERVAL_S", 0.1)

    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentUnavailable, match="3 keep-alive pings"):
            async with environment.session(task()) as session:
                served.answers["/ping"] = [(500, {})] * 3
                await session.call("hang", {})

    within(served.url, body)


def test_a_server_that_is_gone_ends_the_call_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.05)
    monkeypatch.setattr(leaving, "DELETE_TIMEOUT_S", 1.0)
    with serve(Plain) as running:

        async def body(environment: Environment) -> None:
            began = time.monotonic()
            with pytest.raises(EnvironmentUnavailable):
                async with environment.session(Task("plain", "train", 1)) as session:
                    running.stop()
                    await session.answer("1")
            assert time.monotonic() - began < 10

        within(running.url, body, name="plain")


@pytest.mark.parametrize("told", ["nan", "inf"])
def test_a_reward_that_is_no_number_is_nothing(served: Served, told: str) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            assert (await session.call("pay", {"text": told})).reward is None

    within(served.url, body)


# --- broken tasks and bad input ---------------------------------------------------------------------


@pytest.mark.parametrize(("index", "words"), [(0, "constructor broke"), (1, "setup broke")])
def test_a_task_that_breaks_can_be_tried_again_and_is_not_the_whole_environment(
    served: Served, index: int, words: str
) -> None:
    async def body(environment: Environment) -> None:
        for _ in range(2):
            with pytest.raises(EnvironmentRaised, match=words):
                async with environment.session(task(index, "bad")):
                    pass

    within(served.url, body)
    assert served.sessions == 0
    assert served.calls("/create") < 6  # the second failure is not diagnosed again


class AlwaysRaises(ServedEnvironment):
    """Raises on every task in its constructor, setup or prompt."""

    where = ""

    def __init__(self, task_spec: Any = None, secrets: Any = None) -> None:
        super().__init__(task_spec or {}, secrets or {})
        self._perhaps("constructor")

    def _perhaps(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError("in my own code")

    async def setup(self) -> None:
        self._perhaps("setup")

    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return [{"a": i} for i in range(5)]

    def get_prompt(self) -> list[TextBlock]:
        self._perhaps("prompt")
        return [TextBlock(text="Go.")]

    @tool
    async def go(self) -> ToolOutput:
        """Goes."""
        return ToolOutput(blocks=[TextBlock(text="gone")])


@pytest.mark.parametrize("where", ["constructor", "setup", "prompt"])
def test_an_environment_that_raises_on_every_task_is_the_users_error(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(AlwaysRaises, "where", where)

    async def body(environment: Environment) -> None:
        with pytest.raises(UserCodeError, match=r"ZeroDivisionError: in my own code") as caught:
            async with environment.session(Task("alwaysraises", "train", 3)):
                pass
        assert "\n" not in str(caught.value)
        assert f"{__file__}:" in str(caught.value)
        assert "in _perhaps" in str(caught.value)
        assert "self._perhaps" in caught.value.trace

    with serve(AlwaysRaises, tracebacks=True) as running:
        within(running.url, body, name="alwaysraises")
        assert running.sessions == 0


def test_images_are_left_out_visibly_and_said_once(served: Served) -> None:
    async def body(environment: Environment) -> None:
        for _ in range(2):
            async with environment.session(task(2, "bad")) as session:
                assert session.prompt.splitlines() == [
                    "Look:", "[an image (image/png) was left out: this model is given text only]"
                ]  # fmt: skip
                assert "image/png" in (await session.call("picture", {})).text
        (notice,) = environment.notices.drain()
        assert "'Org/whodunit' sends images (image/png)" in notice

    within(served.url, body)


def test_an_index_that_is_not_there_is_bad(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(BadTask):
            async with environment.session(task(99, "bad")):
                pass

    within(served.url, body)


def test_a_tool_that_raises_is_shown_to_the_model_and_the_session_goes_on(served: Served) -> None:
    async def body(environment: Environment) -> None:
        async with environment.session(task()) as session:
            for _ in range(2):
                result = await session.call("fail", {})
                assert (result.error, result.finished, result.reward) == ("tool_raised", False, None)
                assert "a bug" in result.text
            assert (await session.call("pay", {"text": "1"})).reward == 1.0
        (notice,) = environment.notices.drain()
        assert "'Org/whodunit': tool 'fail' raised" in notice

    within(served.url, body)


def test_a_tool_that_raises_in_a_lost_session_is_tried_again_in_another(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentUnavailable, match=r"'fail' raised .*, and the session is lost"):
            async with environment.session(task()) as session:
                served.answers["/ping"] = [(410, {})]
                await session.call("fail", {})

    within(served.url, body)


def test_an_answer_on_which_the_verifier_raises_fails_the_rollout(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(EnvironmentRaised, match="tool 'submit' raised"):
            async with environment.session(Task("plain", "train", 2)) as session:
                await session.answer("raise")

    within(served.url, body, name="plain")


def test_a_server_error_on_a_call_can_be_tried_again_in_another_session(served: Served) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/whodunit/call"] = [(500, {})]
        with pytest.raises(EnvironmentRaised, match="HTTP 500"):
            async with environment.session(task()) as session:
                await session.call("count", {"text": "x"})
        assert served.calls("/whodunit/call") == 1

    within(served.url, body)


@pytest.mark.parametrize("status", [401, 403])
def test_one_refused_session_is_that_sessions_failure(served: Served, status: int) -> None:
    async def body(environment: Environment) -> None:
        served.answers["/create"] = [(status, {})]
        with pytest.raises(EnvironmentUnavailable, match=r"refused access .* no key was sent") as caught:
            async with environment.session(task()):
                pass
        assert "Org/whodunit" in str(caught.value)
        assert "OPENREWARD_API_KEY" not in str(caught.value)
        async with environment.session(task()) as session:
            assert session.prompt

    within(served.url, body)


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/whodunit/task_tools", {"tools": None}),
        ("/whodunit/task_tools", {"tools": [{"name": "a", "description": "", "input_schema": "text"}]}),
        ("/whodunit/task_tools", {"tools": [{"name": "a", "description": ""}] * 2}),
        ("/whodunit/task_tools", []),
        ("/whodunit/task_tools", {"tools": [], "terminal_tool": {"arg": "x"}}),
        ("/whodunit/prompt", {"text": "?"}),
        ("/whodunit/prompt", None),
        ("/whodunit/prompt", [{"type": "text"}]),
        ("/whodunit/prompt", [{"type": "sound", "data": "?"}]),
        ("/whodunit/prompt", "Do it."),
    ],
)
def test_a_malformed_answer_is_the_rollouts_failure(served: Served, path: str, document: Any) -> None:
    async def body(environment: Environment) -> None:
        served.documents[path] = document
        with pytest.raises(BadAnswer, match="Org/whodunit/train/0"):
            async with environment.session(task()):
                pass

    within(served.url, body)
    assert served.sessions == 0


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"ok": True}, {"ok": True, "output": None}, {"ok": True, "output": {"blocks": None}},
     {"ok": False}, {"ok": False, "error": 3}],
)  # fmt: skip
def test_a_malformed_result_is_a_bad_answer(answer: Any) -> None:
    with pytest.raises(BadAnswer, match="tool 'x'"):
        tool_result(answer, "tool 'x'", lambda kind: None)


def test_deadlines_of_calls_are_learned(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_history, "MIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(call_history, "TIMEOUT_FACTOR", 1.0)

    async def body(environment: Environment) -> None:
        environment._history._longest["hang"] = 0.1
        environment._history._count["hang"] = call_history.CALLS_NEEDED
        began = time.monotonic()
        with pytest.raises(ToolTimeout, match=r"the longest of 20 earlier calls took 0\.1 s"):
            async with environment.session(task()) as session:
                await session.call("hang", {})
        assert time.monotonic() - began < 5
        (notice,) = environment.notices.drain()
        assert "'hang' did not answer in time" in notice

    within(served.url, body, tool_timeout_s=60)


@given(st.lists(st.floats(0.01, 500), max_size=60), st.floats(1, 1000))
def test_a_learned_deadline_lies_between_its_bounds(seconds: list[float], limit: float) -> None:
    history = call_history.CallHistory(limit)
    for each in seconds:
        history.note("a", each)
    deadline = history.deadline_s("a")
    assert deadline <= limit
    assert history.deadline_s("never called") == limit
    if len(seconds) < call_history.CALLS_NEEDED:
        assert deadline == limit
    else:
        assert deadline >= min(limit, call_history.MIN_TIMEOUT_S, max(seconds))
        assert deadline >= min(limit, call_history.TIMEOUT_FACTOR * max(seconds))


def test_only_so_many_sessions_are_opened_at_a_time(served: Served) -> None:
    most = 0

    async def body(environment: Environment) -> None:
        nonlocal most
        opening = 0
        enter = environment._enter

        async def counted(of: Task) -> Any:
            nonlocal opening, most
            opening += 1
            most = max(most, opening)
            try:
                return await enter(of)
            finally:
                opening -= 1

        environment._enter = counted  # type: ignore[method-assign]

        async def rollout() -> None:
            async with environment.session(task()):
                pass

        await asyncio.gather(*(rollout() for _ in range(12)))

    within(served.url, body, settings={"max_opening": 3})
    assert most == 3


def test_a_toolset_is_asked_for_by_its_name(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(BadTask, match="unknown toolset 'none-such'; valid options are"):
            async with environment.session(task()):
                pass

    within(served.url, body, settings={"toolset": "none-such"})


def test_a_missing_split_names_those_there_are(served: Served) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(ConfigError, match="no split 'validation'; it has train, test, bad, empty"):
            await environment.num_tasks("validation")

    within(served.url, body)


@pytest.mark.parametrize("status", [200, 404])
def test_a_web_page_is_told_from_a_server_that_starts(status: int) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            page = b"<html>hello</html>"
            head = f"HTTP/1.1 {status} X\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n\r\n"
            writer.write(head.encode() + page)

    async def ask(configured: bool) -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match="OpenReward server"):
            async with opened(f"http://127.0.0.1:{port}", configured=configured):
                pass
        server.close()

    for configured in (False, True):
        asyncio.run(asyncio.wait_for(ask(configured), 30))


def test_a_name_that_cannot_be_resolved_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)

    async def body(environment: Environment) -> None:
        raise AssertionError

    began = time.monotonic()
    with pytest.raises(PreflightError, match=r"'no-such-host\.invalid' cannot be resolved"):
        within("http://no-such-host.invalid:80", body, configured=True, environment_start_timeout_s=50)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("split", ["validation", "empty"])
def test_a_split_without_tasks_is_a_config_error(served: Served, split: str) -> None:
    async def body(environment: Environment) -> None:
        with pytest.raises(ConfigError):
            await environment.num_tasks(split)

    within(served.url, body)


@pytest.mark.parametrize("variant", ["whodunit", "WhoDunit", "WhoDunIt", None])
def test_the_variant_is_found_as_the_server_spells_it(served: Served, variant: str | None) -> None:
    async def body(environment: Environment) -> None:
        assert environment.path("/x") == "/whodunit/x"

    within(served.url, body, settings={"variant": variant})


def test_an_unknown_variant_names_those_there_are(served: Served) -> None:
    async def body(environment: Environment) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"did you mean 'whodunit'.*whodunit, plain, dialogue"):
        within(served.url, body, settings={"variant": "whodunnit"})


def test_without_a_wish_the_servers_default_is_taken() -> None:
    assert choose_variant("Org/Other", None, ["first", "second"]) == "first"
    assert choose_variant("Org/Second", None, ["first", "second"]) == "second"
    assert choose_variant("Org/Second", None, []) is None
    assert choose_variant("Org/Second", "ANY", []) == "any"


def test_a_server_that_comes_up_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)
    monkeypatch.setattr(environment_module, "RETRY_START_S", 0.1)
    with serve(Plain) as first:
        port = int(first.url.rsplit(":", 1)[1])

    async def late() -> None:
        opening = asyncio.ensure_future(
            Environment.open(
                "plain",
                EnvironmentSettings(),
                secrets={},
                rollout=RolloutSettings(environment_start_timeout_s=20),
                url=f"http://127.0.0.1:{port}",
            )
        )
        await asyncio.sleep(0.5)
        assert not opening.done()
        with serve(Plain, port=port):
            environment = await opening
            assert await environment.num_tasks("train") == 3
            await environment.close()

    asyncio.run(late())


def test_a_server_that_never_comes_up_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.01)
    monkeypatch.setattr(environment_module, "RETRY_START_S", 0.1)

    async def body(environment: Environment) -> None:
        raise AssertionError

    with pytest.raises(EnvironmentUnavailable, match=r"did not start within 0\.5 s"):
        within("http://127.0.0.1:9", body, environment_start_timeout_s=0.5)


@pytest.mark.parametrize(
    "url", ["not a url", "ftp://host", "http://", "http://host:port", "http://h/path", "http://u:p@h"]
)
def test_a_bad_url_is_a_config_error(url: str) -> None:
    async def body(environment: Environment) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match="url"):
        within(url, body)


def test_the_service_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    monkeypatch.delenv("OPENREWARD_SESSION_URL", raising=False)

    async def open_hosted() -> None:
        await Environment.open("Org/X", EnvironmentSettings(), secrets={}, rollout=RolloutSettings())

    with pytest.raises(PreflightError, match="OPENREWARD_API_KEY"):
        asyncio.run(open_hosted())


def test_the_service_gets_its_key_and_what_it_says_is_needed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_module, "is_openreward", lambda host: True)
    monkeypatch.setenv("OPENREWARD_SESSION_URL", served.url)
    monkeypatch.setenv("OPENREWARD_API_URL", served.url)
    monkeypatch.setenv("OPENREWARD_API_KEY", "key-of-the-service")
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    served.documents["/v1/environments/Org/whodunit/required-secrets"] = {"secrets": ["tavily_api_key"]}

    async def hosted() -> str:
        async with opened(None) as environment, environment.session(task()) as session:
            return (await session.call("secret", {})).text

    with pytest.raises(PreflightError, match="TAVILY_API_KEY"):
        asyncio.run(hosted())
    monkeypatch.setenv("TAVILY_API_KEY", "needed")
    told = asyncio.run(hosted())
    # It is redacted, so the session had the secret's current value.
    assert "('tavily_api_key', '[secret]')" in told
    assert "('api_key', '[secret]')" in told
    assert served.requests[-1][1]["x-api-key"] == "key-of-the-service"
    assert {headers.get("x-deployment") for path, headers in served.requests if path == "/create"} == {
        "Org/whodunit"
    }


def test_a_refused_key_is_said_so(served: Served) -> None:
    async def body(environment: Environment) -> None:
        raise AssertionError

    served.answers["/create_session"] = [(401, {})]
    with pytest.raises(PreflightError, match=r"HTTP 401: injected.*no key was sent"):
        within(served.url, body, configured=True)


@pytest.mark.parametrize(
    ("host", "private"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("node17", True),
        ("8.8.8.8", False),
        ("api.example.org", False),
    ],
)
def test_private_hosts_are_known(host: str, private: bool) -> None:
    assert is_private(host) == private


def test_retry_after_is_read_in_both_forms() -> None:
    from email.utils import formatdate

    assert receiving.retry_after_s("7") == 7.0
    assert receiving.retry_after_s("99999") == receiving.MAX_RETRY_AFTER_S
    in_ten = receiving.retry_after_s(formatdate(time.time() + 10, usegmt=True))
    assert in_ten is not None
    assert math.isclose(in_ten, 10, abs_tol=1.5)
    assert receiving.retry_after_s(formatdate(time.time() - 10, usegmt=True)) == 0.0
    assert receiving.retry_after_s("") is None
    assert receiving.retry_after_s("soon") is None
