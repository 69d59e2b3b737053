"""Environments for the real OpenReward server on loopback, and helpers that open them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from openreward.environments import Environment as ServedEnvironment
from openreward.environments import ImageBlock, TextBlock, ToolOutput, terminal, tool
from openreward.environments.types import Message, ReasoningBlock, ToolCallBlock, ToolResultBlock
from pydantic import BaseModel

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.rollout.environment.environment import Environment
from orhpc.types import Task
from tests.served import TrainSplit

LONG = "".join(
    random.Random(1).choices(["  ", "\n", "\r\n", "\t", " x ", "é", "\u2028", "word", "{", '"'], k=160_000)
)
GOLD = "the gold answer is 42"


class Text(BaseModel):
    text: str


class WhoDunIt(ServedEnvironment):
    """Has one tool for each behavior under test."""

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


class Plain(TrainSplit):
    """A plain answer ends the task; the tasks are listed."""

    TASKS: ClassVar[list[dict[str, Any]]] = [{"a": i} for i in range(3)]

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
    """Open an environment; with ``configured``, its URL is in the config and may be that of a platform."""
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
