"""One OpenReward session, with fixes for weaknesses of the SDK.

The SDK (0.1.167) provides the client, the headers and the session lifecycle.  This module replaces the
following parts, using the same protocol:

* The SDK's event parser strips white space at the boundaries of 4096-character chunks; :func:`sse_events`
  follows the HTML standard and strips one leading space only.
* The SDK repeats a tool call when the connection breaks before the call's task id arrives, so the call can
  run twice; :meth:`GuardedSession.invoke` repeats only calls that certainly did not run.
* The SDK's keep-alive needs minutes to detect a dead session; here ``PING_FAILURES`` failed pings suffice.
* The SDK does not read some answers to the end, which closes the connection after each call and each
  deletion; here all answers are read.
* The SDK reads answers of any size and follows redirects to other servers, sending keys and secrets along;
  here answers are bounded (:mod:`orhpc.rollout.environment.receiving`) and only redirects within the same
  server are followed.

Infrastructure failures raise :class:`~orhpc.errors.EnvironmentUnavailable`; errors reported by the server
raise :class:`Refused` or :class:`ToolRaised`, which callers convert into errors of :mod:`orhpc.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import orhpc.process.lean_openreward  # noqa: F401 - before openreward

# isort: split
import aiohttp
from openreward._version import USER_AGENT
from openreward.api._session.http import SessionResponseError
from openreward.api.environments.client import AsyncEnvironment, AsyncSession
from pydantic import TypeAdapter
from yarl import URL

from orhpc.errors import BadAnswer, EnvironmentUnavailable
from orhpc.process.secrets import redact
from orhpc.rollout.environment.answers import read, session_id
from orhpc.rollout.environment.deadline import Deadline
from orhpc.rollout.environment.receiving import (
    Refused,
    Rejected,
    drain,
    parse_json,
    raise_if_rejected,
    read_body,
    sse_events,
)

log = logging.getLogger(__name__)

PING_INTERVAL_S = 20.0
PING_FAILURES = 3
"""Consecutive pings without an answer after which the session is considered dead."""
HEARTBEAT_S = 60.0
"""Read timeout of a call: the server sends a comment every 10 s during a call."""
ATTEMPTS = 4
"""Attempts of a request that certainly had no effect, or whose repetition has none."""
BACKOFF_S = 0.5
END_S = 30.0
"""Timeout of deleting a session."""
REDIRECTS = 5
"""Maximum number of redirects followed for one request."""
_MAX_ID_CHARACTERS = 512
_NAMES = TypeAdapter(list[str])
_RETRYABLE = frozenset({429, 502, 503, 504})


class ToolRaised(Exception):
    """The environment's code raised during a call."""


@dataclass(slots=True)
class _Progress:
    """State of one request across attempts."""

    repeatable: bool
    """Whether repeating the request cannot run anything twice."""
    attempts: int = 0
    task_id: str | None = None


class GuardedSession(AsyncSession):
    """The SDK's session with replaced requests, keep-alive and calls.

    ``label``: names the task in error messages.  ``direct``: the client is connected to an OpenReward server
    itself rather than to a platform that allocates sessions.  Such a server accepts any session id, so the
    two requests that allocate and release one are skipped; they would add a quarter to a short session.
    ``body_secrets``: name to value, for a server that reads secrets from the body of ``/create``.
    ``own_key``: bearer token of the job's own server, sent with every request.
    ``max_answer_bytes``: a larger answer raises BadAnswer.
    """

    def __init__(
        self,
        *args: Any,
        label: str,
        max_answer_bytes: int,
        direct: bool = False,
        own_key: str | None = None,
        body_secrets: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.label = label
        self._limit = max_answer_bytes
        self._body_secrets = body_secrets
        self._direct = direct
        self._own_key = own_key
        self._begun = False
        self._death_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def connect(self, deadline: Deadline) -> None:
        """Get a session id, which suffices to query the environment."""
        if self._direct:
            self.sid = str(uuid.uuid4())
            return
        progress = _Progress(repeatable=True)
        created = await self._stream("/create_session", self._creation_payload, deadline, progress)
        self.sid = session_id(created, progress.task_id, self.label)

    async def begin(self, deadline: Deadline) -> None:
        """Create the task's session on the server and start the keep-alive."""
        await self.connect(deadline)
        task: dict[str, Any] = {"split": self.split, "index": self.index}
        if self.toolset_name is not None:
            task["toolset_name"] = self.toolset_name
        if self.env.variant is not None:
            task["env_name"] = self.env.variant
        if self._body_secrets:
            task["secrets"] = dict(self._body_secrets)
        self._begun = True
        await self.fetch("POST", "/create", deadline, task, repeatable=False)
        self._ping_task = asyncio.create_task(self._keep_alive())

    async def end(self) -> None:
        """Delete the session; failures are only logged, since the server removes idle sessions."""
        if self._ping_task is not None:
            self._ping_task.cancel()
        if self.sid is None:
            return
        self._secrets_headers = None
        paths = ["/delete"] * self._begun + ["/delete_session"] * (not self._direct)
        try:
            async with Deadline(f"{self.label}: deleting the session", END_S, END_S) as deadline:
                for path in paths:
                    await self._delete(path, deadline)
        except EnvironmentUnavailable as error:
            log.info("%s", error)

    async def _delete(self, path: str, deadline: Deadline) -> None:
        async def once() -> None:
            async with self._send("POST", path) as response:
                await read_body(response, self._limit, self.label)  # unread answers close the connection

        try:
            # Not through _guard(): a session that seems dead is deleted too.
            await self._retry(once, path, deadline, _Progress(repeatable=True))
        except Refused as refused:
            log.info("%s: %s", self.label, refused)

    @contextlib.asynccontextmanager
    async def _send(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the successful response; raises Rejected for an error response.

        Redirects to another server are not followed: the headers with keys and secrets would be sent there.
        """
        target = URL(path)
        options = {
            **options,
            "headers": self._headers() | options.get("headers", {}),
            "allow_redirects": False,
        }
        for _ in range(REDIRECTS + 1):
            async with self.client.request(method, target, **options) as response:
                redirect = self._redirect_target(response, path) if 300 <= response.status < 400 else None
                if redirect is None:
                    await raise_if_rejected(response)
                    yield response
                    return
            target = redirect
        raise BadAnswer(f"{self.label}: {path}: more than {REDIRECTS} redirects")

    def _redirect_target(self, response: aiohttp.ClientResponse, path: str) -> URL:
        """Target of a redirect on the same server; raises BadAnswer for any other target."""
        with contextlib.suppress(ValueError):  # not a valid URL
            target = response.url.join(URL(response.headers.get("Location", "")))
            if target.origin() == response.url.origin() and response.status in (307, 308):
                return URL(target.raw_path_qs, encoded=True)
        raise BadAnswer(
            f"{self.label}: {path}: the server answers with a redirect to another address, which is not "
            "followed, because keys and secrets would go there"
        )

    def _headers(self) -> dict[str, str]:
        optional = {
            "X-API-Key": self.api_key,
            "Authorization": f"Bearer {self._own_key}" if self._own_key is not None else None,
            "X-Session-ID": self.sid,
            "X-Deployment": self.deployment,
            # Secrets are only sent until the session has been created.
            **(self._secrets_headers or {} if self._ping_task is None else {}),
        }
        return {"User-Agent": USER_AGENT} | {name: value for name, value in optional.items() if value}

    async def fetch(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        payload: dict[str, Any] | None = None,
        *,
        repeatable: bool = True,
    ) -> Any:
        """Return a JSON answer; waits for a starting server, retries requests that cannot have had an effect.

        Raises Refused for any other HTTP error and EnvironmentUnavailable for a broken connection.
        """

        async def once() -> Any:
            what = f"{self.label}: {path}"
            async with self._send(method, path, json=payload) as response:
                return await parse_json(await read_body(response, self._limit, what), what)

        return await self._guard(self._retry(once, path, deadline, _Progress(repeatable)))

    async def invoke(self, path: str, payload: dict[str, Any], deadline: Deadline) -> Any:
        """Run an operation with side effects exactly once and return its JSON result.

        The server starts it when the request arrives and sends its task id; after that, a broken connection
        is resumed with that id.  Before that, the request is repeated only if the answer shows that nothing
        ran (429, server starting) or no connection was made.

        Raises ToolRaised when the environment's code raised, Refused for an HTTP error, and
        EnvironmentUnavailable when it is unknown what happened.
        """
        return await self._guard(self._stream(path, payload, deadline, _Progress(False)))

    async def _retry(
        self, once: Callable[[], Awaitable[Any]], path: str, deadline: Deadline, progress: _Progress
    ) -> Any:
        while True:
            progress.attempts += 1
            wait = BACKOFF_S * 2**progress.attempts
            try:
                return await once()
            except Rejected as rejected:
                wait = wait if rejected.wait_s is None else rejected.wait_s
                error: Exception = rejected.refused
                if rejected.starting:
                    await deadline.starting(wait, rejected.refused.detail)
                    progress.attempts = 0
                    continue
                status = rejected.refused.status
                again = status == 429 or (status in _RETRYABLE and progress.repeatable)
            except aiohttp.ClientConnectorError as failure:  # nothing was sent
                error, again = self._broken_connection(path, failure), True
                error.__cause__ = failure
            except (aiohttp.ClientError, ValueError) as failure:
                error, again = self._broken_connection(path, failure), progress.repeatable
            if not again or progress.attempts >= ATTEMPTS:
                raise error
            await asyncio.sleep(wait)

    def _broken_connection(self, path: str, failure: Exception) -> EnvironmentUnavailable:
        reason = redact(" ".join(str(failure).split()))[:300] or type(failure).__name__
        return EnvironmentUnavailable(f"{self.label}: {path.rsplit('/', 1)[-1]}: {reason}")

    async def _stream(
        self, path: str, payload: dict[str, Any], deadline: Deadline, progress: _Progress
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=HEARTBEAT_S)

        async def once() -> Any:
            body = payload if progress.task_id is None else {**payload, "task_id": progress.task_id}
            accept = {"Accept": "text/event-stream"}
            async with self._send("POST", path, headers=accept, json=body, timeout=timeout) as response:
                if response.content_type == "text/html":
                    raise BadAnswer(f"{self.label}: {path}: the answer is a web page, not events")
                return await self._result(response, progress)

        return await self._retry(once, path, deadline, progress)

    async def _result(self, response: aiohttp.ClientResponse, progress: _Progress) -> Any:
        """Assemble the result of one event stream from its chunks."""
        chunks: list[str] = []
        async for event, data in sse_events(response.content, self._limit, self.label):
            if event == "task_id":
                # From here on a retry asks for the same task, so repeating is always safe.
                progress.task_id, progress.repeatable, progress.attempts = (
                    data.strip()[:_MAX_ID_CHARACTERS],
                    True,
                    0,
                )
            elif event == "error":
                if data == "unknown task_id":
                    raise EnvironmentUnavailable(f"{self.label}: the server lost a running call")
                raise ToolRaised(redact(" ".join(data.split()))[:500] or "no message")
            elif event in ("chunk", "end"):
                chunks.append(data)
                if event == "end":
                    await drain(response)
                    whole = "".join(chunks)
                    return await parse_json(whole, f"{self.label}: the result of a call") if whole else None
        raise aiohttp.ClientPayloadError("the answer broke off")

    async def _guard(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run until done, or until the keep-alive declares the session dead."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._death_reason}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EnvironmentUnavailable(f"{self.label}: {self._death_reason.result()}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _keep_alive(self) -> None:
        failures = 0
        timeout = aiohttp.ClientTimeout(total=PING_INTERVAL_S)
        while failures < PING_FAILURES:
            await asyncio.sleep(PING_INTERVAL_S)
            try:
                async with self._send("POST", "/ping", timeout=timeout):
                    failures = 0
            except Rejected as rejected:
                # FastAPI's own "Not Found" comes from a server without keep-alive, not for a lost session.
                if rejected.refused.status in (404, 410) and rejected.refused.detail != "Not Found":
                    return self._declare_dead(f"the server has lost the session: {rejected.refused.detail}")
                failures = failures + 1 if rejected.refused.status >= 500 else 0
            except (aiohttp.ClientError, BadAnswer, TimeoutError, ValueError):
                failures += 1
        self._declare_dead(f"{failures} keep-alive pings in a row failed")

    def _declare_dead(self, reason: str) -> None:
        if not self._death_reason.done():
            self._death_reason.set_result(reason)


async def required_secrets(environment: AsyncEnvironment, name: str, timeout_s: float) -> list[str]:
    """Names of the secrets that the OpenReward service lists for an environment; empty for other servers.

    Args:
        environment: the SDK's handle; it has an API key only for OpenReward's service.
        name: the environment's name in the config.
        timeout_s: timeout in seconds.
    """
    if environment.api_key is None:
        return []
    unknown = (SessionResponseError, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError)
    try:
        async with asyncio.timeout(timeout_s):
            return read(_NAMES, await environment.list_required_secrets(), f"environment {name!r}")
    except (*unknown, BadAnswer) as error:
        log.warning("environment %r: required secrets are not known: %s", name, error)
        return []
