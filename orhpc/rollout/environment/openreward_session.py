"""One OpenReward session on the wire, with the SDK's weak places replaced.

The SDK (0.1.167) makes the client, the headers and the session's life; what it does badly is done
here instead, over the same protocol:

* its event parser strips white space at the borders of 4096-character pieces: :func:`sse_events`
  follows the HTML standard and takes off one space, no more;
* it posts a tool call again when the connection breaks before the call's task id arrives, so the
  call can run twice: :meth:`GuardedSession.invoke` posts again only what certainly did not run;
* its keep-alive gives up after minutes: ours notices a dead session within ``PING_FAILURES`` pings;
* it leaves answers unread, so that each call and each deletion closes its connection: ours are read;
* it reads answers of any size, and follows redirects with keys and secrets to wherever they lead: ours are
  bounded (:mod:`orhpc.rollout.environment.receiving`) and follow only redirects within the server.

Everything raises :class:`~orhpc.errors.EnvironmentUnavailable` for infrastructure and
:class:`Refused` or :class:`ToolRaised` for what the server said; callers give these their meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from openreward._version import USER_AGENT
from openreward.api._session.http import SessionResponseError
from openreward.api.environments.client import AsyncEnvironment, AsyncSession
from pydantic import TypeAdapter
from yarl import URL

from orhpc.errors import BadAnswer, EnvironmentUnavailable
from orhpc.process.secrets import redact
from orhpc.rollout.environment.answers import read, session_id
from orhpc.rollout.environment.deadline import Patience
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
"""Pings in a row without an answer after which the session counts as dead."""
HEARTBEAT_S = 60.0
"""The server sends a comment every 10 s during a call; silence of this length is a broken connection."""
ATTEMPTS = 4
"""Tries of a request that certainly had no effect, or has none when repeated."""
BACKOFF_S = 0.5
END_S = 30.0
"""Deadline of deleting a session."""
REDIRECTS = 5
"""Redirects of one request that are followed."""
_LONGEST_ID = 512
_NAMES = TypeAdapter(list[str])
_RETRYABLE = frozenset({429, 502, 503, 504})


class ToolRaised(Exception):
    """Code of the environment raised during a call."""


@dataclass(slots=True)
class _Progress:
    """How far one request has come."""

    repeatable: bool
    """Whether sending it again cannot run anything twice."""
    attempts: int = 0
    task_id: str | None = None


class GuardedSession(AsyncSession):
    """The SDK's session with its own requests, keep-alive and calls.

    ``label`` names the task in error messages.  ``direct``: an OpenReward server answers itself, with no
    platform before it that hands out sessions and takes them back.  Such a server takes any session id,
    and its own two calls for that would do nothing but cost a quarter of a short session.
    ``body_secrets``: name to value for a server that reads them in the body of ``/create``.
    ``own_key``: goes to the job's own server with every request.
    ``max_answer_bytes``: a larger answer is a BadAnswer.
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
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def connect(self, patience: Patience) -> None:
        """Get a session id, which is enough to ask about the environment."""
        if self._direct:
            self.sid = str(uuid.uuid4())
            return
        progress = _Progress(repeatable=True)
        created = await self._stream("/create_session", self._creation_payload, patience, progress)
        self.sid = session_id(created, progress.task_id, self.label)

    async def begin(self, patience: Patience) -> None:
        """Create the task's session on the server and start the keep-alive."""
        await self.connect(patience)
        task: dict[str, Any] = {"split": self.split, "index": self.index}
        if self.toolset_name is not None:
            task["toolset_name"] = self.toolset_name
        if self.env.variant is not None:
            task["env_name"] = self.env.variant
        if self._body_secrets:
            task["secrets"] = dict(self._body_secrets)
        self._begun = True
        await self.fetch("POST", "/create", patience, task, repeatable=False)
        self._ping_task = asyncio.create_task(self._keep_alive())

    async def end(self) -> None:
        """Delete the session; what goes wrong there is left to the server's own reaper."""
        if self._ping_task is not None:
            self._ping_task.cancel()
        if self.sid is None:
            return
        self._secrets_headers = None
        paths = ["/delete"] * self._begun + ["/delete_session"] * (not self._direct)
        try:
            async with Patience(f"{self.label}: deleting the session", END_S, END_S) as patience:
                for path in paths:
                    await self._delete(path, patience)
        except EnvironmentUnavailable as error:
            log.info("%s", error)

    async def _delete(self, path: str, patience: Patience) -> None:
        async def once() -> None:
            async with self._send("POST", path) as response:
                await read_body(response, self._limit, self.label)  # else the connection would be closed

        try:
            # Without a look at the keep-alive: a session that seems dead is deleted too.
            await self._retry(once, path, patience, _Progress(repeatable=True))
        except Refused as refused:
            log.info("%s: %s", self.label, refused)

    @contextlib.asynccontextmanager
    async def _send(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and give its answer, which is no error; raises Rejected for an error.

        Redirects to another server are not followed: they would take the headers with them.
        """
        target = URL(path)
        options = {
            **options,
            "headers": self._headers() | options.get("headers", {}),
            "allow_redirects": False,
        }
        for _ in range(REDIRECTS + 1):
            async with self.client.request(method, target, **options) as response:
                onward = self._onward(response, path) if 300 <= response.status < 400 else None
                if onward is None:
                    await raise_if_rejected(response)
                    yield response
                    return
            target = onward
        raise BadAnswer(f"{self.label}: {path}: more than {REDIRECTS} redirects")

    def _onward(self, response: aiohttp.ClientResponse, path: str) -> URL:
        """Where a redirect leads on the same server; raises BadAnswer when it leads elsewhere."""
        with contextlib.suppress(ValueError):  # of what is no URL
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
            # Only what creates the session needs the secrets.
            **(self._secrets_headers or {} if self._ping_task is None else {}),
        }
        return {"User-Agent": USER_AGENT} | {name: value for name, value in optional.items() if value}

    async def fetch(
        self,
        method: str,
        path: str,
        patience: Patience,
        payload: dict[str, Any] | None = None,
        *,
        repeatable: bool = True,
    ) -> Any:
        """Return a JSON answer; waits for a starting server, retries what cannot have had an effect.

        Raises Refused for any other HTTP error and EnvironmentUnavailable for a broken connection.
        """

        async def once() -> Any:
            what = f"{self.label}: {path}"
            async with self._send(method, path, json=payload) as response:
                return await parse_json(await read_body(response, self._limit, what), what)

        return await self._guard(self._retry(once, path, patience, _Progress(repeatable)))

    async def invoke(self, path: str, payload: dict[str, Any], patience: Patience) -> Any:
        """Run something with effects exactly once and return its JSON result.

        The server starts it when the request arrives and tells its task id; from then on a broken
        connection is resumed by that id.  Before that, only an answer that says that nothing ran
        (429, still starting) or a connection that was never made is tried again.

        Raises ToolRaised when the environment's code raised, Refused for an HTTP error, and
        EnvironmentUnavailable when it cannot be known what happened.
        """
        return await self._guard(self._stream(path, payload, patience, _Progress(False)))

    async def _retry(
        self, once: Callable[[], Awaitable[Any]], path: str, patience: Patience, progress: _Progress
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
                    await patience.starting(wait, rejected.refused.detail)
                    progress.attempts = 0
                    continue
                status = rejected.refused.status
                again = status == 429 or (status in _RETRYABLE and progress.repeatable)
            except aiohttp.ClientConnectorError as failure:  # nothing was sent
                error, again = self._broken(path, failure), True
                error.__cause__ = failure
            except (aiohttp.ClientError, ValueError) as failure:
                error, again = self._broken(path, failure), progress.repeatable
            if not again or progress.attempts >= ATTEMPTS:
                raise error
            await asyncio.sleep(wait)

    def _broken(self, path: str, failure: Exception) -> EnvironmentUnavailable:
        reason = redact(" ".join(str(failure).split()))[:300] or type(failure).__name__
        return EnvironmentUnavailable(f"{self.label}: {path.rsplit('/', 1)[-1]}: {reason}")

    async def _stream(
        self, path: str, payload: dict[str, Any], patience: Patience, progress: _Progress
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=HEARTBEAT_S)

        async def once() -> Any:
            body = payload if progress.task_id is None else {**payload, "task_id": progress.task_id}
            accept = {"Accept": "text/event-stream"}
            async with self._send("POST", path, headers=accept, json=body, timeout=timeout) as response:
                if response.content_type == "text/html":
                    raise BadAnswer(f"{self.label}: {path}: the answer is a web page, not events")
                return await self._result(response, progress)

        return await self._retry(once, path, patience, progress)

    async def _result(self, response: aiohttp.ClientResponse, progress: _Progress) -> Any:
        """Put the result of one stream together from its pieces."""
        chunks: list[str] = []
        async for event, data in sse_events(response.content, self._limit, self.label):
            if event == "task_id":
                # From here on trying again means asking for the same task, so it is always safe.
                progress.task_id, progress.repeatable, progress.attempts = data.strip()[:_LONGEST_ID], True, 0
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
        """Run until done, or until the keep-alive finds the session dead."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EnvironmentUnavailable(f"{self.label}: {self._death.result()}")
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
                # FastAPI's own "Not Found" means a server without keep-alive, not a lost session.
                if rejected.refused.status in (404, 410) and rejected.refused.detail != "Not Found":
                    return self._die(f"the server has lost the session: {rejected.refused.detail}")
                failures = failures + 1 if rejected.refused.status >= 500 else 0
            except (aiohttp.ClientError, BadAnswer, TimeoutError, ValueError):
                failures += 1
        self._die(f"{failures} keep-alive pings in a row failed")

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)


async def required_secrets(environment: AsyncEnvironment, name: str, timeout_s: float) -> list[str]:
    """Names that the service says the environment needs; servers of our own have no such list.

    Args:
        environment: the SDK's handle; without a key it is not one of the service.
        name: of the environment in the config.
        timeout_s: deadline, in seconds.
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
