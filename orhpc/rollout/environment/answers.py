"""Validation of an environment server's answers: an invalid answer raises BadAnswer.

Each kind of answer has one strict schema; field names are those of OpenReward's protocol (openreward
0.1.167, ``environments/types.py``).  Unknown fields of newer servers are ignored.  The size limit of an
answer is a setting (``environments.NAME.max_answer_mb``); the limits here are far above any real answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
)

from orhpc.errors import BadAnswer
from orhpc.rollout.environment.tools import IMAGE_MARK, ToolResult, ToolSpec

IMAGE_PLACEHOLDER = "[an image ({kind}) was left out: this model is given text only]"
"""Placeholder text for an image block."""
MAX_REWARD = 1e15
"""Maximum absolute value of a reward: sums and squares of rewards have to stay finite in float32."""
MAX_TOOLS = 1000
MAX_TOOL_CHARACTERS = 1 << 20
"""Maximum size of a tool list as JSON: it is part of every prompt."""
MAX_TASKS = 10_000_000
"""Maximum number of tasks in one split: their order is kept in memory."""

T = TypeVar("T")


def _reward(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        shown = repr(value)[:40]
        raise ValueError(f"a reward must be a finite number of magnitude {MAX_REWARD:g} or less, not {shown}")
    return float(value)


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("a tool's schema must describe an object")
    return schema


def _unique(tools: list[Tool]) -> list[Tool]:
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError(f"two tools have the same name, among {', '.join(names)[:200]}")
    size = sum(len(json.dumps(tool.model_dump(), ensure_ascii=False)) for tool in tools)
    if size > MAX_TOOL_CHARACTERS:
        raise ValueError(f"the tools have {size} characters; the maximum is {MAX_TOOL_CHARACTERS}")
    return tools


def _kind_of_block(block: Any) -> str | None:
    return str(block.get("type", "text")) if isinstance(block, Mapping) else None


def _null_to(default: Any) -> BeforeValidator:
    """Replace null by the default."""
    return BeforeValidator(lambda value: default if value is None else value)


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextBlock(_Answer):
    type: Literal["text"] = "text"
    text: str


class ImageBlock(_Answer):
    type: Literal["image"]
    data: Annotated[str, _null_to("")] = ""
    """Base64."""
    media: Annotated[str, _null_to("unknown type"), Field(alias="mimeType")] = "unknown type"


class ReasoningBlock(_Answer):
    type: Literal["reasoning"]


class ToolCallBlock(_Answer):
    type: Literal["tool_call"]
    name: str
    input: Any = None


_ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[ImageBlock, Tag("image")], Discriminator(_kind_of_block)
]
Blocks = Annotated[list[_ContentBlock], FailFast()]


class ToolResultBlock(_Answer):
    type: Literal["tool_result"]
    blocks: Blocks
    is_error: bool = False


_MessageBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ReasoningBlock, Tag("reasoning")]
    | Annotated[ToolCallBlock, Tag("tool_call")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind_of_block),
]


class Message(_Answer):
    role: Literal["system", "user", "assistant"]
    blocks: Annotated[list[_MessageBlock], FailFast()]


class Tool(_Answer):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Annotated[str, _null_to("")] = ""
    input_schema: Annotated[dict[str, Any], _null_to({}), AfterValidator(_object_schema)] = {}


class TerminalTool(_Answer):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arg: str | None = None


class Tools(_Answer):
    """The tools of an environment or of one task."""

    tools: Annotated[list[Tool], FailFast(), Field(max_length=MAX_TOOLS), AfterValidator(_unique)]
    terminal_tool: TerminalTool | None = None
    supports_score_group: bool | None = None
    message_block_types: list[str] | None = None

    @property
    def terminal(self) -> tuple[str, str | None] | None:
        """The tool that receives the plain answer, and the name of its argument if it has one."""
        return None if self.terminal_tool is None else (self.terminal_tool.name, self.terminal_tool.arg)

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools; one without arguments has the schema of an empty object."""
        nothing = {"type": "object", "properties": {}}
        return [ToolSpec(t.name, t.description, t.input_schema or nothing) for t in self.tools]


class Output(_Answer):
    blocks: Blocks
    metadata: Any = None
    reward: Annotated[float | None, BeforeValidator(lambda v: None if v is None else _reward(v))] = None
    """The server also sends null for NaN."""
    finished: Annotated[bool, _null_to(False)] = False


class Succeeded(_Answer):
    ok: Literal[True]
    output: Output


class Failed(_Answer):
    ok: Literal[False] = False
    error: str
    reason: Annotated[str, _null_to("input_validation")] = "input_validation"


class Score(_Answer):
    reward: Annotated[float, BeforeValidator(_reward)]


class Scores(_Answer):
    scores: list[Score]


class NumTasks(_Answer):
    num_tasks: int


class Created(_Answer):
    sid: str | None = None


class Split(_Answer):
    name: str


VARIANTS = TypeAdapter(list[str])
SPLITS = TypeAdapter(list[str | Split], config=ConfigDict(strict=True))
_RESULT = TypeAdapter(
    Annotated[
        Annotated[Succeeded, Tag("True")] | Annotated[Failed, Tag("False")],
        Discriminator(lambda answer: str(isinstance(answer, Mapping) and answer.get("ok") is True)),
    ]
)
_BLOCKS, _MESSAGES, TOOLS = TypeAdapter(Blocks), TypeAdapter(list[Message]), TypeAdapter(Tools)
_SCORES, NUM_TASKS, _CREATED = TypeAdapter(Scores), TypeAdapter(NumTasks), TypeAdapter(Created | None)


def read(schema: TypeAdapter[T], answer: Any, what: str) -> T:
    """Validate an answer; raises BadAnswer, whose message does not contain the answer."""
    try:
        return schema.validate_python(answer, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"] if part not in _TAGS)[:200]
        message = problem["msg"].removeprefix("Value error, ")[:300]
        raise BadAnswer(f"{what}: {where + ': ' if where else ''}{message}") from None


_TAGS = frozenset(("True", "False"))


class AnswerImages:
    """Takes the images out of one answer's blocks."""

    def __init__(self, report: Callable[[str], None], *, kept: bool) -> None:
        """``kept``: the model sees images; otherwise a placeholder replaces each, and ``report`` is called
        with its media type."""
        self._report = report
        self.kept = kept
        self.data: list[str] = []
        """The images in order, base64, one for each mark in the answer's texts."""

    def join(self, blocks: Sequence[TextBlock | ImageBlock]) -> str:
        """Join texts with line breaks; as in chat templates, there is none next to an image."""
        text, after_text = "", False
        for block in blocks:
            if isinstance(block, ImageBlock) and self.kept:
                self.data.append(block.data)
                text, after_text = text + IMAGE_MARK, False
                continue
            text += "\n" * after_text + self._text(block)
            after_text = True
        return text

    def _text(self, block: TextBlock | ImageBlock) -> str:
        if isinstance(block, ImageBlock):
            self._report(block.media[:60])
            return IMAGE_PLACEHOLDER.format(kind=block.media[:60])
        return block.text.replace(IMAGE_MARK, "\ufffd") if self.kept else block.text


def text_of(blocks: Any, what: str, images: AnswerImages) -> str:
    """Join text blocks with line breaks.

    Args:
        blocks: as the server sent them.
        what: the origin of the blocks, for messages.
        images: takes the images out.

    Raises:
        BadAnswer: the blocks are invalid.
    """
    return images.join(read(_BLOCKS, blocks, what))


def is_conversation(blocks: Any) -> bool:
    """Whether a prompt is a flattened conversation.

    OpenReward's ``flatten_messages`` marks the first block of each message with a ``detail`` that contains
    the role (SDK 0.1.157).
    """
    marked = (b.get("detail") for b in blocks if isinstance(b, Mapping)) if isinstance(blocks, list) else ()
    return any(isinstance(detail, Mapping) and "role" in detail for detail in marked)


def conversation(messages: Any, what: str, images: AnswerImages) -> tuple[tuple[str, str], ...]:
    """Read a conversation as (role, text) pairs; earlier tool calls and their results become text.

    Returns an empty tuple for a conversation that chat templates do not support: a system message after the
    first message, or a last message that is not the user's.  Raises BadAnswer.
    """
    turns: list[tuple[str, str]] = []
    for message in read(_MESSAGES, messages, what):
        plain = [part for block in message.blocks for part in _plain(block)]
        turns.append((message.role, images.join(plain)))
    roles = [role for role, _ in turns]
    return tuple(turns) if roles and "system" not in roles[1:] and roles[-1] == "user" else ()


def _plain(
    block: TextBlock | ImageBlock | ReasoningBlock | ToolCallBlock | ToolResultBlock,
) -> list[TextBlock | ImageBlock]:
    """Convert a block of a conversation to text and image blocks."""
    if isinstance(block, ReasoningBlock):
        return []
    if isinstance(block, ToolCallBlock):
        arguments = json.dumps(block.input, ensure_ascii=False, default=str)
        return [TextBlock(text=f"[tool_call {block.name}] {arguments}")]
    if isinstance(block, ToolResultBlock):
        head = "[tool_result (error)]" if block.is_error else "[tool_result]"
        return [TextBlock(text=head), *block.blocks]
    return [block]


def tools_of(answer: Any, what: str) -> Tools:
    """Read a tool list; raises BadAnswer, e.g. when two tools have the same name."""
    return read(TOOLS, answer, what)


def tool_result(answer: Any, what: str, images: AnswerImages) -> ToolResult:
    """Read the answer to a tool call; raises BadAnswer."""
    result = read(_RESULT, answer, what)
    if isinstance(result, Failed):
        return ToolResult(result.error, finished=result.reason == "episode_finished", error=result.reason)
    output = result.output
    text = images.join(output.blocks)
    return ToolResult(
        text=text,
        images=tuple(images.data),
        reward=output.reward,
        finished=output.finished,
        metadata=output.metadata if isinstance(output.metadata, dict) else None,
    )


def group_scores(answer: Any, wanted: int, what: str) -> list[float]:
    """Read one score per rollout; raises BadAnswer if their number is wrong or one is not a number."""
    scores = read(_SCORES, answer, what).scores
    if len(scores) != wanted:
        raise BadAnswer(f"{what}: the server returned {len(scores)} scores for {wanted} rollouts")
    return [score.reward for score in scores]


def session_id(created: Any, task_id: str | None, what: str) -> str:
    """Read a session id, which is sent in a header; raises BadAnswer."""
    answer = read(_CREATED, created, what)
    sid = (answer.sid if answer is not None else None) or task_id or ""
    if not 0 < len(sid) <= 512 or not sid.isascii() or not sid.isprintable():
        raise BadAnswer(f"{what}: the server returned no valid session id")
    return sid


def wire_messages(messages: Sequence[Mapping[str, Any]], *, rich: bool = False) -> list[dict[str, Any]]:
    """Convert a transcript to OpenReward's message format.

    Args:
        messages: of a rollout, as written by :class:`~orhpc.rollout.transcript.RolloutBuilder`.
        rich: the server accepts reasoning, tool calls and tool results as typed blocks (SDK 0.1.157);
            otherwise reasoning and calls are omitted, and results become text of the user.
    """
    converted: list[dict[str, Any]] = []
    pending: list[str | None] = []
    for number, message in enumerate(messages):
        role, blocks = message["role"], []
        if message["content"]:
            blocks = [{"type": "text", "text": message["content"]}]
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            pending = [None if "error" in call else f"call_{number}_{i}" for i, call in enumerate(calls)]
            if rich:
                blocks = [*_reasoning(message), *blocks, *_calls(calls, pending)]
        elif role == "tool":
            role, call_id = "user", pending.pop(0) if pending else None
            if rich and call_id is not None:
                failed = message.get("error") is not None
                result = {"type": "tool_result", "tool_call_id": call_id, "is_error": failed}
                blocks = [{**result, "blocks": blocks}]
        if blocks:
            converted.append({"role": role, "blocks": blocks})
    return converted


def _reasoning(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "reasoning", "text": message["reasoning"]}] if message.get("reasoning") else []


def _calls(calls: Sequence[Mapping[str, Any]], ids: Sequence[str | None]) -> list[dict[str, Any]]:
    return [
        {"type": "tool_call", "id": call_id, "name": call["name"], "input": call["arguments"]}
        for call, call_id in zip(calls, ids, strict=True)
        if call_id is not None
    ]
