"""An open session: prompt, tools, calls and their results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orhpc.errors import BadTask, EnvironmentRaised, EnvironmentUnavailable, PreflightError, ToolTimeout
from orhpc.process.user_code import error_of_metadata
from orhpc.rollout.environment.answers import AnswerImages, tool_result
from orhpc.rollout.environment.call_history import CallHistory
from orhpc.rollout.environment.deadline import Deadline
from orhpc.rollout.environment.notices import Notices
from orhpc.rollout.environment.openreward_session import GuardedSession, ToolRaised
from orhpc.rollout.environment.receiving import Refused
from orhpc.rollout.environment.tools import ToolResult, ToolSpec

_ALIVE_S = 20.0
"""Timeout of checking whether a session still exists after a tool raised."""


@dataclass(frozen=True, slots=True)
class Session:
    """One open session on one task; created by :class:`orhpc.rollout.environment.environment.Environment`."""

    prompt: str
    tools: list[ToolSpec]
    terminal: bool
    """Whether a plain answer ends the task; it is passed to :meth:`answer`."""
    _wire: GuardedSession = field(repr=False)
    _environment: str
    """The environment's name in the config, for messages."""
    _call_path: str
    _history: CallHistory
    _notices: Notices
    _terminal_tool: tuple[str, str | None] | None
    conversation: tuple[tuple[str, str], ...] = ()
    """The prompt as (role, text) pairs if it is a conversation of several messages; otherwise empty."""
    images: tuple[str, ...] = ()
    """Images of the prompt or conversation (base64), one for each mark in its texts."""
    judges: bool = False
    """Whether the job's own server judges answers by ``data.verifier``."""
    sees: bool = False
    """Whether the model sees images; otherwise placeholders replace them."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool once; it never runs twice, even if the connection breaks.

        An exception in the tool becomes the call's result (``error`` is ``tool_raised``), as long as the
        server still has the session.

        Raises:
            ToolTimeout: no answer within the timeout of the call history.
            EnvironmentUnavailable: the session is lost.
            EnvironmentRaised: the server answered with an internal error, so it is unknown what ran.
            BadTask: the answer is malformed.
        """
        if self._terminal_tool and name == self._terminal_tool[0]:
            # It is reserved for the plain answer, but the server would run it for any caller.
            return ToolResult(f"{name!r} is not a valid tool", error="not_found")
        try:
            return await self._call(name, dict(arguments))
        except ToolRaised as error:
            await self._require_alive(name, error)
            self._notices.report_once(
                ("raised", name),
                f"environment {self._environment!r}: tool {name!r} raised: {error}; the model sees the "
                "error and continues (counted by the metric tool_errors)",
            )
            return ToolResult(f"The tool {name!r} failed: {error}", error="tool_raised")

    async def answer(self, text: str) -> ToolResult:
        """Pass a plain answer to the terminal tool; requires ``terminal``.

        Raises the same errors as :meth:`call`, and EnvironmentRaised when the tool raises, since any text is
        a valid answer.  Raises UserCodeError when the function ``data.verifier`` raises.
        """
        if self._terminal_tool is None:
            raise RuntimeError(f"{self._wire.label}: the session has no terminal tool for an answer")
        name, argument = self._terminal_tool
        try:
            result = await self._call(name, {} if argument is None else {argument: text})
        except ToolRaised as error:
            raise EnvironmentRaised(f"{self._wire.label}: tool {name!r} raised: {error}") from None
        if self.judges and (raised := error_of_metadata(result.metadata)) is not None:
            raise raised
        return result

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        what, budget = f"{self._wire.label}: tool {name!r}", self._history.deadline_s(name)
        why, began = self._history.why(name), time.monotonic()
        try:
            async with Deadline(what, budget, budget, error=ToolTimeout, limit=why) as deadline:
                payload = {"name": name, "input": arguments}
                answer = await self._wire.invoke(self._call_path, payload, deadline)
        except Refused as refused:
            if refused.status in (400, 413, 422):  # refused while parsing: nothing ran
                return ToolResult(f"The call was refused: {refused.detail}", error="bad_input_shape")
            raise failure(self._wire, refused) from None
        except ToolTimeout:
            self._notices.report_once(
                ("timeout", name),
                f"environment {self._environment!r}: tool {name!r} did not answer in time ({why}); such "
                "rollouts fail, and the step continues without them",
            )
            raise
        self._history.note(name, time.monotonic() - began)
        return tool_result(answer, what, AnswerImages(self.report_image, kept=self.sees))

    def report_image(self, kind: str) -> None:
        """Report that an image of this media type was replaced by a placeholder."""
        self._notices.report_once("image", image_notice(self._environment, kind))

    async def _require_alive(self, name: str, raised: ToolRaised) -> None:
        """Raises EnvironmentUnavailable when the server no longer has the session of a tool that raised."""
        what = f"{self._wire.label}: tool {name!r} raised ({raised}), and the session"
        try:
            async with Deadline(what, _ALIVE_S, _ALIVE_S) as deadline:
                await self._wire.fetch("POST", "/ping", deadline)
        except Refused as refused:
            if refused.detail != "Not Found":  # FastAPI's own message: an older server without keep-alive
                raise EnvironmentUnavailable(f"{what} is lost: {refused}") from None


def image_notice(environment: str, kind: str) -> str:
    """The notice for an environment that sends images."""
    return (
        f"environment {environment!r} sends images ({kind}); the model accepts only text, so a placeholder "
        "replaces each image"
    )


def failure(wire: GuardedSession, refused: Refused, *, lost: bool = True) -> Exception:
    """Convert an HTTP error of the server to an exception of :mod:`orhpc.errors`.

    ``lost``: the error concerns a session.  A restarted server does not know earlier sessions, so 404 means
    that the session is lost; a refused key then fails only this session, since others were accepted.
    """
    label, status = wire.label, refused.status
    if status in (401, 403):
        key = "check OPENREWARD_API_KEY" if wire.api_key else "no key was sent (environments.NAME.secrets)"
        message = f"{label}: the server refused access ({refused}); {key}"
        return EnvironmentUnavailable(message) if lost else PreflightError(message)
    gone = (404, 410) if lost else ()
    if status in (408, 429, 502, 503, 504, *gone) or "already exists" in refused.detail:
        return EnvironmentUnavailable(f"{label}: {refused}")
    if status >= 500:
        raised = EnvironmentRaised(f"{label}: {refused}")
        raised.detail, raised.trace = refused.detail, refused.trace
        return raised
    return BadTask(f"{label}: {refused}")
