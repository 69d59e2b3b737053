"""A policy that says what a test wrote down, an environment in this process, and small tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from orhpc.config import EnvironmentSettings, ModelSettings, RolloutSettings
from orhpc.rollout.agent import AgentContext, run_rollout
from orhpc.rollout.chat import ChatFormat, chat_format
from orhpc.rollout.environment.environment import Environment
from orhpc.rollout.environment.tools import ToolResult, ToolSpec
from orhpc.rollout.transcript import RolloutRequest
from orhpc.types import FinishReason, Generation, PlacedImage, Rollout, Sampling, Task

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
)
GLM4 = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM = (
    *GLM4,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
    "/nothink",
)
MERGES = ("l l", "ll o", "h e", "he llo", "Ġ w", "o r", "i n", "Ċ Ċ", "Ġ Ġ", "t o")


def tokenizer(controls: Sequence[str] = CHATML, template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges; the first half of the control tokens is marked special.

    A merge of two line ends, and of two spaces, shows where pieces are encoded apart that should not be.
    """
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [tuple(merge.split()) for merge in MERGES]
    for left, right in pairs:
        vocabulary.setdefault(left + right, len(vocabulary))
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    half = (len(controls) + 1) // 2
    inner.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in controls[:half]])
    inner.add_tokens([AddedToken(c, special=False, normalized=False) for c in controls[half:]])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=controls[0])
    made.chat_template = template
    return made


def chat(controls: Sequence[str] = CHATML, template: str | None = None) -> ChatFormat:
    return chat_format(ModelSettings(), tokenizer(controls, template))


OWN = ("sampling", "stopping", "record_routes", "reward", "images")
"""Options of :func:`context` that are fields of it."""


class Policy:
    """Answers each request with the next of its lines, as ids of a chat format.

    A line is text, or (text, finish reason), or (text, finish reason, version), or an exception.
    ``{end}`` in a text is the chat format's end-of-turn token, which plain text gets by itself.
    """

    def __init__(self, chat: ChatFormat, lines: Sequence[Any]) -> None:
        self._chat, self._lines = chat, list(lines)
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.rids: list[str] = []
        self.outputs: list[list[int]] = []
        self.routes: Callable[[int, int], Any] | None = None

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        affinity: str,
        routes_start: int | None,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.rids.append(rid)
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        text, finish, version = (*((line,) if isinstance(line, str) else line), None, None)[:3]
        finish = finish or FinishReason.STOP
        if finish is FinishReason.STOP and "{end}" not in text:
            text += "{end}"
        ids = self._chat.codec.encode([text.replace("{end}", self._chat.stops[0])])
        if len(ids) > sampling.max_new_tokens:
            ids, finish = ids[: sampling.max_new_tokens], FinishReason.LENGTH
        self.outputs.append(ids)
        rows = None
        if routes_start is not None and self.routes is not None:
            rows = self.routes(routes_start, len(prompt_ids) + len(ids) - 1)
        return Generation(
            tokens_N=np.array(ids, np.int32),
            logprobs_N=np.array([-0.001 * (i + 1) for i in ids], np.float32),
            finish_reason=finish,
            version=version or 0,
            prompt_tokens=len(prompt_ids),
            routes=rows,
            routes_start=routes_start or 0,
        )


class Room:
    """An environment in this process; ``answers`` maps a tool's name to its results, in order."""

    def __init__(
        self,
        prompt: str = "Do it.",
        answers: Mapping[str, Sequence[Any]] | None = None,
        *,
        terminal: Sequence[Any] | None = None,
        schema: dict[str, Any] | None = None,
    ) -> None:
        self.prompt = prompt
        self.answers = {name: list(results) for name, results in (answers or {}).items()}
        self._terminal = None if terminal is None else list(terminal)
        self.tools = [ToolSpec(n, f"Tool {n}.", schema or {"type": "object"}) for n in self.answers]
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.submitted: list[str] = []
        self.open = 0

    @property
    def terminal(self) -> bool:
        return self._terminal is not None

    @contextlib.asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[Room]:
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self.calls.append((name, dict(arguments)))
        if not self.answers.get(name):
            return ToolResult(f"{name!r} is not a valid tool", error="not_found")
        return self._next(self.answers[name])

    async def answer(self, text: str) -> ToolResult:
        self.submitted.append(text)
        assert self._terminal is not None
        return self._next(self._terminal)

    @staticmethod
    def _next(results: list[Any]) -> ToolResult:
        result = results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result if isinstance(result, ToolResult) else ToolResult(str(result))


def context(
    room: Any, policy: Any, chat: ChatFormat, *, settings: dict[str, Any] | None = None, **options: Any
) -> AgentContext:
    """An agent's context; options of :class:`RolloutSettings`, ``sampling`` and other fields of it."""
    own = {k: options.pop(k) for k in OWN if k in options}
    own.setdefault("sampling", Sampling(max_new_tokens=options.get("max_response_tokens", 1000)))
    options.setdefault("max_total_tokens", 100_000)
    options.setdefault("max_response_tokens", min(1000, options["max_total_tokens"] - 1))
    return AgentContext(
        environment=room,
        settings=EnvironmentSettings(**(settings or {})),
        rollout=RolloutSettings(**options),
        chat=chat,
        generate=policy,
        **own,
    )


def request(seed: int = 7) -> RolloutRequest:
    return RolloutRequest(id="3.1", group_id=3, sample=1, task=Task("room", "train", 0), seed=seed)


def play(
    url: str,
    name: str,
    policy: Any,
    chat: ChatFormat,
    *,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Rollout:
    """Run one rollout with an environment of the server at ``url``; options are those of :func:`context`."""

    async def run() -> Rollout:
        prepared = context(None, policy, chat, settings=settings, **options)
        environment = await Environment.open(
            name, prepared.settings, secrets={}, rollout=prepared.rollout, url=url
        )
        try:
            return await run_rollout(replace(prepared, environment=environment), request())
        finally:
            await environment.close()

    return asyncio.run(asyncio.wait_for(run(), 60))
