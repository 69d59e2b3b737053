"""One OpenReward session on the wire, with the SDK's weak places replaced.

The SDK (0.1.167) makes the client, the headers and the session's life; what it does badly is done
here instead, over the same protocol:

* its event parser strips white space at the borders of 4096-character pieces: :func:`sse_events`
  follows the HTML standard and takes off one space, no more;
* it posts a tool call again when the connection breaks before the call's task id arrives, so the
  call can run twice: :meth:`GuardedSession.invoke` posts again only what certainly did not run;
* its keep-alive gives up after minutes: ours notices a dead session within ``PING_FAILURES`` pings;
* it leaves answers unread, so that each call and each deletion closes its connection: ours are read.

Everything raises :class:`~orhpc.errors.EnvironmentUnavailable` for infrastructure and
:class:`Refused` or :class:`ToolRaised` for what the server said; callers give these their meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from openreward._version import USER_AGENT
from openreward.api.environments.client import AsyncSession

from orhpc.errors import BadAnswer, EnvironmentUnavailable
from orhpc.rollout.patience import Patience
from orhpc.secrets import redact
from orhpc.user_code import last_line

log = logging.getLogger(__name__)

PING_INTERVAL_S = 20.0
PING_FAILURES = 3
"""Pings in a row without an answer after which the session counts as dead."""
HEARTBEAT_S = 60.0
"""The server sends a comment every 10 s during a call; silence of this length is a broken connection."""
ATTEMPTS = 4
"""Tries of a request that certainly had no effect, or has none when repeated."""
BACKOFF_S = 0.5
DRAIN_S = 0.2
"""How long the end of a stream may follow its last event."""
END_S = 30.0
"""Deadline of deleting a session."""
LONGEST_WAIT_S = 30.0
"""Cap on a server's Retry-After."""
_LONGEST_TRACE = 20_000
"""Characters of a traceback that are kept."""
_RETRYABLE = frozenset({429, 502, 503, 504})


class Refused(Exception):
    """The server answered with an HTTP error; it is up, and said no."""

    def __init__(self, status: int, detail: str, trace: str = "") -> None:
        """``trace``: the traceback of the environment's code, where the server sends one."""
        super().__init__(f"HTTP {status}: {detail}")
        self.status = status
        self.detail = detail
        self.trace = trace


class ToolRaised(Exception):
    """Code of the environment raised during a call."""


async def sse_events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, str]]:
    """Yield (event, data) of a server-sent event stream, exactly as sent.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation, less
    ids and reconnection times.  Lines end in CRLF or LF; SSE's lone CR is not used by any server here.
    """
    event, data = "", []
    async for raw in stream:
        line = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        if not line:
            if event or data:
                yield event or "message", "\n".join(data)
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            event = value
        elif field == "data":
            data.append(value)


def retry_after_s(value: str) -> float | None:
    """Seconds that a Retry-After header asks for, in either of its forms; None when it says nothing."""
    value = value.strip()
    if value.isdigit():
        return min(float(value), LONGEST_WAIT_S)
    try:
        at = email.utils.parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError):
        return None
    return min(max(at - time.time(), 0.0), LONGEST_WAIT_S)


async def raise_if_rejected(response: aiohttp.ClientResponse) -> None:
    """Raise _Rejected for an error or a redirect; FastAPI's ``detail`` is its message if there is one."""
    if response.status < 300:
        return
    text = (await response.read()).decode("utf-8", "replace")
    try:
        detail = orjson.loads(text)["detail"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        detail = text
    if response.content_type == "text/html":
        detail = "the answer is a web page: is its URL that of an OpenReward server?"
    if not isinstance(detail, str):
        detail = orjson.dumps(detail).decode()
    trace = redact(detail[-_LONGEST_TRACE:]) if detail.startswith("Traceback ") else ""
    detail = last_line(detail) if trace else detail
    # An environment may repeat its secrets in what it raises.
    detail = redact(" ".join(detail.split()))[:500] or response.reason or "no reason given"
    # A proxy's word that the environment has not come up yet, so that nothing ran.
    starting = response.status == 503 and response.headers.get("X-Backend-State") == "starting"
    wait_s = retry_after_s(response.headers.get("Retry-After", ""))
    raise _Rejected(Refused(response.status, detail, trace), wait_s, starting)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a stream whose result is here, without which its connection would be closed.

    A stream that goes on, or breaks, costs no more than that.
    """
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(DRAIN_S):
            await response.content.read()


class _Rejected(Exception):
    """An error answer, before it is known whether to try again."""

    def __init__(self, refused: Refused, wait_s: float | None, starting: bool) -> None:
        super().__init__(str(refused))
        self.refused = refused
        self.wait_s = wait_s
        self.starting = starting


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
    ``own_key``: goes to the job's own server with every request; such a server's redirects are not followed.
    """

    def __init__(
        self,
        *args: Any,
        label: str,
        direct: bool = False,
        own_key: str | None = None,
        body_secrets: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.label = label
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
        self.sid = (created or {}).get("sid") or progress.task_id
        if not self.sid:
            raise EnvironmentUnavailable(f"{self.label}: the server gave no session id")

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
            async with self._request("POST", path) as response:
                await raise_if_rejected(response)
                await response.read()  # else the connection would be closed

        try:
            # Without a look at the keep-alive: a session that seems dead is deleted too.
            await self._retry(once, path, patience, _Progress(repeatable=True))
        except Refused as refused:
            log.info("%s: %s", self.label, refused)

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

    def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Every request of the session is made here."""
        options["headers"] = self._headers() | dict(headers or {})
        return self.client.request(method, path, allow_redirects=self._own_key is None, **options)

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
            async with self._request(method, path, json=payload) as response:
                await raise_if_rejected(response)
                body = await response.read()
                try:
                    return orjson.loads(body)
                except orjson.JSONDecodeError:
                    raise BadAnswer(
                        f"{self.label}: {path}: the answer is {response.content_type}, not JSON"
                    ) from None

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
            except _Rejected as rejected:
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
        reason = str(failure) or type(failure).__name__
        return EnvironmentUnavailable(f"{self.label}: {path.rsplit('/', 1)[-1]}: {reason}")

    async def _stream(
        self, path: str, payload: dict[str, Any], patience: Patience, progress: _Progress
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=HEARTBEAT_S)

        async def once() -> Any:
            body = payload if progress.task_id is None else {**payload, "task_id": progress.task_id}
            accept = {"Accept": "text/event-stream"}
            async with self._request("POST", path, headers=accept, json=body, timeout=timeout) as response:
                await raise_if_rejected(response)
                if response.content_type == "text/html":
                    raise BadAnswer(f"{self.label}: {path}: the answer is a web page, not events")
                return await self._result(response, progress)

        return await self._retry(once, path, patience, progress)

    async def _result(self, response: aiohttp.ClientResponse, progress: _Progress) -> Any:
        """Put the result of one stream together from its pieces."""
        chunks: list[str] = []
        async for event, data in sse_events(response.content):
            if event == "task_id":
                # From here on trying again means asking for the same task, so it is always safe.
                progress.task_id, progress.repeatable, progress.attempts = data.strip(), True, 0
            elif event == "error":
                if data == "unknown task_id":
                    raise EnvironmentUnavailable(f"{self.label}: the server lost a running call")
                raise ToolRaised(redact(" ".join(data.split()))[:500] or "no message")
            elif event in ("chunk", "end"):
                chunks.append(data)
                if event == "end":
                    await _drain(response)
                    whole = "".join(chunks)
                    try:
                        return orjson.loads(whole) if whole else None
                    except orjson.JSONDecodeError:
                        raise BadAnswer(f"{self.label}: the result of a call is not JSON") from None
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
                async with self._request("POST", "/ping", timeout=timeout) as response:
                    await raise_if_rejected(response)
                    failures = 0
            except _Rejected as rejected:
                # FastAPI's own "Not Found" means a server without keep-alive, not a lost session.
                if rejected.refused.status in (404, 410) and rejected.refused.detail != "Not Found":
                    return self._die(f"the server has lost the session: {rejected.refused.detail}")
                failures = failures + 1 if rejected.refused.status >= 500 else 0
            except (aiohttp.ClientError, TimeoutError):
                failures += 1
        self._die(f"{failures} keep-alive pings in a row failed")

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)
