"""What an open session offers: prompt, tools, calls and their results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orhpc.errors import BadTask, EnvironmentRaised, EnvironmentUnavailable, PreflightError, ToolTimeout
from orhpc.rollout.environment.answers import tool_result
from orhpc.rollout.environment.call_history import CallHistory
from orhpc.rollout.environment.deadline import Patience
from orhpc.rollout.environment.notices import Notices
from orhpc.rollout.environment.openreward_session import GuardedSession, ToolRaised
from orhpc.rollout.environment.receiving import Refused
from orhpc.rollout.environment.tools import ToolResult, ToolSpec

_ALIVE_S = 20.0
"""Deadline of asking whether a session outlived a tool that raised."""


@dataclass(frozen=True, slots=True)
class Session:
    """One open session on one task; made by :class:`orhpc.rollout.environment.environment.Environment`."""

    prompt: str
    tools: list[ToolSpec]
    terminal: bool
    """A plain answer ends the task: it goes to :meth:`answer`."""
    _wire: GuardedSession = field(repr=False)
    _environment: str
    """Its name in the config, for messages."""
    _call_path: str
    _history: CallHistory
    _notices: Notices
    _terminal_tool: tuple[str, str | None] | None
    conversation: tuple[tuple[str, str], ...] = ()
    """The prompt as (role, text), where it is a conversation of several messages; else empty."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool once; it is never run twice, whatever happens to the connection.

        A tool that raises is shown to the model as the call's result (``error`` is ``tool_raised``), as
        long as the server still has the session.

        Raises:
            ToolTimeout: no answer within the deadline of the call history.
            EnvironmentUnavailable: the session is lost.
            EnvironmentRaised: the server answered with its own error, so that it is not known what ran.
            BadTask: the answer is malformed.
        """
        if self._terminal_tool and name == self._terminal_tool[0]:
            # It takes the plain answer; the server would run it for anyone who guesses its name.
            return ToolResult(f"{name!r} is not a valid tool", error="not_found")
        try:
            return await self._call(name, dict(arguments))
        except ToolRaised as error:
            await self._require_alive(name, error)
            self._notices.say_once(
                ("raised", name),
                f"environment {self._environment!r}: tool {name!r} raised: {error}; the model is shown the "
                "error and goes on (metric tool_errors counts them)",
            )
            return ToolResult(f"The tool {name!r} failed: {error}", error="tool_raised")

    async def answer(self, text: str) -> ToolResult:
        """Give a plain answer to the terminal tool; needs ``terminal``.

        Raises as :meth:`call`, and EnvironmentRaised when the tool raises: any text is a valid answer.
        """
        if self._terminal_tool is None:
            raise RuntimeError(f"{self._wire.label}: there is no terminal tool to take an answer")
        name, argument = self._terminal_tool
        try:
            return await self._call(name, {} if argument is None else {argument: text})
        except ToolRaised as error:
            raise EnvironmentRaised(f"{self._wire.label}: tool {name!r} raised: {error}") from None

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        what, budget = f"{self._wire.label}: tool {name!r}", self._history.deadline_s(name)
        why, began = self._history.why(name), time.monotonic()
        try:
            async with Patience(what, budget, budget, error=ToolTimeout, limit=why) as patience:
                payload = {"name": name, "input": arguments}
                answer = await self._wire.invoke(self._call_path, payload, patience)
        except Refused as refused:
            if refused.status in (400, 413, 422):  # refused while reading it: nothing ran
                return ToolResult(f"The call was refused: {refused.detail}", error="bad_input_shape")
            raise failure(self._wire, refused) from None
        except ToolTimeout:
            self._notices.say_once(
                ("timeout", name),
                f"environment {self._environment!r}: tool {name!r} did not answer in time ({why}); such "
                "rollouts fail, and the step goes on without them",
            )
            raise
        self._history.note(name, time.monotonic() - began)
        return tool_result(answer, what, self.image_left_out)

    def image_left_out(self, kind: str) -> None:
        """Report that an image of this media type was replaced by a placeholder."""
        self._notices.say_once("image", image_notice(self._environment, kind))

    async def _require_alive(self, name: str, raised: ToolRaised) -> None:
        """Raises EnvironmentUnavailable when the server has dropped the session of a tool that raised."""
        what = f"{self._wire.label}: tool {name!r} raised ({raised}), and the session"
        try:
            async with Patience(what, _ALIVE_S, _ALIVE_S) as patience:
                await self._wire.fetch("POST", "/ping", patience)
        except Refused as refused:
            if refused.detail != "Not Found":  # FastAPI's own: an older server without keep-alive
                raise EnvironmentUnavailable(f"{what} is lost: {refused}") from None


def image_notice(environment: str, kind: str) -> str:
    """Return the notice about an environment that sends images."""
    return (
        f"environment {environment!r} sends images ({kind}); this model is given text only, with a "
        "placeholder for each image"
    )


def failure(wire: GuardedSession, refused: Refused, *, lost: bool = True) -> Exception:
    """Give an HTTP error of the server its class.

    ``lost``: it concerns a session.  A server that has restarted knows none of its sessions, so 404 means
    that it is lost; a refused key is then this session's failure alone, for others were let in.
    """
    label, status = wire.label, refused.status
    if status in (401, 403):
        key = "check OPENREWARD_API_KEY" if wire.api_key else "it was sent no key (environments.NAME.secrets)"
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
