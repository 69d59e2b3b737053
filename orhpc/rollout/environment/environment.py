"""OpenReward environments: tasks, sessions and tool calls, with every failure typed.

An infrastructure failure raises :class:`~orhpc.errors.EnvironmentUnavailable`; an error in the
environment's own code raises :class:`~orhpc.errors.EnvironmentRaised`.  In both cases the rollout can be
retried in a new session.  A task that the server refuses raises :class:`~orhpc.errors.BadTask`: the rollout
ends and is counted.  A mistake of the model, including arguments on which a tool raises, returns a
:class:`ToolResult` with ``error`` set, which is shown to the model.  No failure ever becomes a reward.  An
environment that raises on every task ends the run with :class:`~orhpc.errors.UserCodeError`.

Tasks are identified by split and index and resolved by the server, so that a task's specification, which
often contains the gold answer, is never sent to the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from types import EllipsisType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orhpc.process.lean_openreward  # noqa: F401 - before openreward

# isort: split
import aiohttp
from openreward import AsyncOpenReward
from openreward.api.environments.client import AsyncEnvironment
from openreward.api.sandboxes.secrets import WELL_KNOWN_SECRETS
from pydantic import TypeAdapter

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.errors import (
    BadAnswer,
    ConfigError,
    EnvironmentRaised,
    EnvironmentUnavailable,
    PreflightError,
)
from orhpc.process.secrets import remember_secrets, resolve_secrets
from orhpc.process.user_code import server_error
from orhpc.rollout.environment import answers
from orhpc.rollout.environment.addresses import (
    checked_host,
    choose_variant,
    is_openreward,
    is_private,
    secrets_in_body,
    unreachable,
)
from orhpc.rollout.environment.call_history import CallHistory
from orhpc.rollout.environment.deadline import Deadline
from orhpc.rollout.environment.descriptions import describe_task
from orhpc.rollout.environment.diagnosis import Diagnosis
from orhpc.rollout.environment.leaving import SessionDeletions
from orhpc.rollout.environment.notices import Notices
from orhpc.rollout.environment.openreward_session import GuardedSession, required_secrets
from orhpc.rollout.environment.receiving import Refused
from orhpc.rollout.environment.scoring import score_group
from orhpc.rollout.environment.session import Session, failure, image_notice
from orhpc.rollout.environment.tools import ToolResult, ToolSpec
from orhpc.types import Task

__all__ = ["Environment", "Session", "ToolResult", "ToolSpec"]

T = TypeVar("T")
M = TypeVar("M")
_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)
API_KEY = "OPENREWARD_API_KEY"
RETRY_START_S = 1.0
"""Pause between two connection attempts to a server that does not answer yet."""


class Environment:
    """One environment on one server, and its open sessions."""

    def __init__(
        self,
        name: str,
        settings: EnvironmentSettings,
        rollout: RolloutSettings,
        client: AsyncOpenReward,
        handle: AsyncEnvironment,
        *,
        direct: bool = False,
        key: str | None = None,
        images: bool = False,
    ) -> None:
        """``direct``, ``key``: for a server that the job runs; see :class:`GuardedSession`.  ``images``: the
        model sees images."""
        self._sees = images
        self._direct = direct
        self._key = key
        self._own_http: aiohttp.ClientSession | None = None
        self.name = name
        self.settings = settings
        self.rollout = rollout
        self.supports_score_group = self._rich = False
        """Whether the environment compares the rollouts of a group: see :meth:`score_group`."""
        self._client = client
        self._handle = handle
        self._secrets: dict[str, str | tuple[str, list[str]]] = {}
        self._body_secrets: Mapping[str, str] | None = None
        self._deletions = SessionDeletions()
        self.notices = Notices()
        """Lines about this environment for the run's events."""
        self._history = CallHistory(rollout.tool_timeout_s)
        self._gate = asyncio.Semaphore(settings.max_opening)
        self._diagnosis = Diagnosis(name)

    @classmethod
    async def open(
        cls,
        name: str,
        settings: EnvironmentSettings,
        *,
        secrets: Mapping[str, str],
        rollout: RolloutSettings,
        url: str | None = None,
        key: str | None = None,
        images: bool = False,
    ) -> Environment:
        """Connect to a server, wait until it answers, and choose the variant.

        Args:
            name: key in the config's ``environments``; ``Organization/Name`` for OpenReward's service.
            settings: the settings under that key.
            secrets: name to value, as returned by :func:`orhpc.process.secrets.resolve_secrets`.
            rollout: the timeouts.
            url: address of a server that the job runs; default ``settings.url``, then OpenReward's service.
            key: bearer token sent to the server at ``url`` and to no other server.
            images: keep images, for a model that sees; otherwise placeholders replace them.

        Raises:
            EnvironmentUnavailable: no answer within ``rollout.environment_start_timeout_s``.
            ConfigError: there is no such environment or variant, or the URL is not a server's URL.
            PreflightError: the API key or a secret that the environment needs is missing.
        """
        direct = url is not None
        own_key = key if direct else None
        if own_key is not None:
            remember_secrets([own_key])
        url = url or settings.url
        host = checked_host(name, url) if url else None
        key = secrets.get(API_KEY) or secrets.get(API_KEY.lower()) or os.environ.get(API_KEY, "")
        client = AsyncOpenReward(api_key=key or None)
        host = host or urlsplit(client.session_base_url).hostname or ""
        handle = client.environments.get(name, base_url=url)
        if is_openreward(host):
            if not key:
                raise PreflightError(f"environment {name!r} is reached through OpenReward: set {API_KEY}")
            remember_secrets([key])
        else:
            # Do not send OpenReward's key to other servers; one that needs it lists it as a secret.
            handle.api_key = None
        environment = cls(name, settings, rollout, client, handle, direct=direct, key=own_key, images=images)
        if direct or is_private(host):
            environment._connect_directly(url or client.session_base_url)
        try:
            await environment._start(secrets, host)
        except BaseException:
            await environment.close()
            raise
        return environment

    def _connect_directly(self, url: str) -> None:
        """Bypass the proxies that clusters configure.

        The SDK's own connections honor proxies and a netrc file, which aiohttp looks up in a thread before
        each request; with many concurrent sessions, the threads and the event loop block each other.
        """
        no_timeout = aiohttp.ClientTimeout(total=None)
        self._own_http = aiohttp.ClientSession(
            url, connector=aiohttp.TCPConnector(limit=0), timeout=no_timeout
        )
        self._handle.client = self._own_http

    async def _start(self, secrets: Mapping[str, str], host: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.rollout.environment_start_timeout_s
        while True:
            try:
                variants = await self._ask("GET", "/list_environments", answers.VARIANTS, missing=[])
                break
            except EnvironmentUnavailable as error:
                if (permanent := unreachable(self.name, host, error.__cause__)) is not None:
                    raise permanent from None
                if loop.time() + RETRY_START_S > deadline:
                    raise EnvironmentUnavailable(
                        f"environment {self.name!r} did not start within "
                        f"{self.rollout.environment_start_timeout_s:g} s: {error}"
                    ) from None
                await asyncio.sleep(RETRY_START_S)
        self._handle.variant = choose_variant(self.name, self.settings.variant, variants)
        tools = await self._ask("GET", self.path("/tools"), answers.TOOLS, missing=None)
        if not variants and tools is None:
            raise ConfigError(
                f"environments.{self.name}.url: {host} answers, but is not an OpenReward server: it has "
                "neither /list_environments nor /tools"
            )
        if tools is not None:
            self.supports_score_group = bool(tools.supports_score_group)
            self._rich = "tool_call" in (tools.message_block_types or ())
        needed = await required_secrets(self._handle, self.name, self.rollout.session_timeout_s)
        if missing := sorted({n for n in needed if n.lower() not in {s.lower() for s in secrets}}):
            secrets = {**secrets, **resolve_secrets({}, {}, required=missing)}
        if secrets and self._handle.api_key is None:
            described = await self._ask("GET", "/openapi.json", _ANYTHING, missing={})
            self._body_secrets = secrets if secrets_in_body(described) else None
        self._secrets = {n: v if n in WELL_KNOWN_SECRETS else (v, [host]) for n, v in secrets.items()}

    def path(self, suffix: str) -> str:
        """Request path; includes the variant, because each request without it costs a redirect."""
        return suffix if self._handle.variant is None else f"/{self._handle.variant}{suffix}"

    def _wire(self, label: str, split: str = "", index: int = 0) -> GuardedSession:
        return GuardedSession(
            self._handle,
            split=split,
            index=index,
            secrets=self._secrets or None,
            api_key=self._handle.api_key,
            label=label,
            max_answer_bytes=round(self.settings.max_answer_mb * 1e6),
            direct=self._direct,
            own_key=self._key,
            body_secrets=self._body_secrets,
            toolset_name=self.settings.toolset,
        )

    def _deadline(self, what: str) -> Deadline:
        return Deadline(what, self.rollout.session_timeout_s, self.rollout.environment_start_timeout_s)

    async def _ask(
        self,
        method: str,
        path: str,
        schema: TypeAdapter[T],
        payload: dict[str, Any] | None = None,
        *,
        missing: M | EllipsisType = ...,
    ) -> T | M:
        """Query the server; returns ``missing``, or else raises ConfigError, if it has no such endpoint."""
        wire = self._wire(f"environment {self.name!r}")
        try:
            async with self._deadline(wire.label) as deadline:
                await wire.connect(deadline)
                answer = await wire.fetch(method, path, deadline, payload)
            return answers.read(schema, answer, f"{wire.label}: {path.rsplit('/', 1)[-1]}")
        except Refused as refused:
            if refused.status == 404 and wire.sid and not isinstance(missing, EllipsisType):
                return missing
            if refused.status in (400, 404, 405, 501):
                raise ConfigError(f"{wire.label}: {path.rsplit('/', 1)[-1]}: {refused.detail}") from None
            error = failure(wire, refused, lost=False)
            if isinstance(error, EnvironmentRaised):
                what = f"{wire.label}: {path.rsplit('/', 1)[-1]}"
                raise server_error(what, refused.detail, refused.trace) from None
            raise error from None
        except BadAnswer as error:
            raise ConfigError(f"{error}: is its URL that of an OpenReward server?") from None
        finally:
            self._deletions.add(wire)

    async def num_tasks(self, split: str) -> int:
        """Number of tasks of a split, at most ``num_samples``; ConfigError when there is no such split."""
        try:
            answer = await self._ask("POST", self.path("/num_tasks"), answers.NUM_TASKS, {"split": split})
        except ConfigError as error:
            known = await self.splits()
            if split in known or not known:
                raise
            raise ConfigError(
                f"environment {self.name!r} has no split {split!r}; it has {', '.join(known)}"
            ) from error
        count = answer.num_tasks
        if count < 1:
            raise ConfigError(f"environment {self.name!r}: split {split!r} has no tasks")
        count = min(count, self.settings.num_samples or count)
        if count > answers.MAX_TASKS:
            raise ConfigError(
                f"environment {self.name!r}: split {split!r} has {count} tasks; set environments.{self.name}."
                f"num_samples to {answers.MAX_TASKS} or fewer"
            )
        return count

    async def splits(self) -> list[str]:
        """Names of the task splits that the server lists; may be empty."""
        listed = await self._ask("GET", self.path("/splits"), answers.SPLITS, missing=[])
        return [split if isinstance(split, str) else split.name for split in listed]

    @contextlib.asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[Session]:
        """Open a session on a task and delete it at the end.

        A cancellation interrupts neither: an interrupted session and its sandbox would occupy the server for
        15 minutes.  Both continue in the background, and :meth:`close` waits for them.

        Raises:
            EnvironmentUnavailable: the server does not answer in time.
            EnvironmentRaised: the environment raises on this task.
            BadTask: the environment refuses the task.
            UserCodeError: the environment raises on every task.
        """
        async with self._gate:
            opening = asyncio.ensure_future(self._enter(task))
            try:
                session = await asyncio.shield(opening)
            except asyncio.CancelledError:
                self._deletions.add(opening)
                raise
            except EnvironmentRaised as error:
                await self._diagnosis.of(task, error, self.num_tasks, self._try)
                raise
        self._diagnosis.opened = True
        try:
            yield session
        except EnvironmentUnavailable:
            self._deletions.add(session._wire)  # do not wait: the server may be down
            raise
        except BaseException:
            await asyncio.shield(self._deletions.add(session._wire))
            raise
        await asyncio.shield(self._deletions.add(session._wire))

    async def _enter(self, task: Task) -> Session:
        wire = self._wire(task.id, task.split, task.index)
        try:
            async with self._deadline(f"{task.id}: opening the session") as deadline:
                await wire.begin(deadline)
                blocks = await wire.fetch("GET", self.path("/prompt"), deadline)
                images, told = self._images(), self._images()
                conversation = (
                    await self._conversation(wire, deadline, told) if answers.is_conversation(blocks) else ()
                )
                tools = await self._tools(wire, deadline)
            offered = answers.tools_of(tools, f"{task.id}: tools")
            prompt = answers.text_of(blocks, f"{task.id}: the prompt", images)
            return Session(
                prompt=prompt,
                images=tuple((told if conversation else images).data),
                judges=self.settings.data is not None,
                sees=self._sees,
                tools=offered.specs,
                conversation=conversation,
                terminal=offered.terminal is not None,
                _wire=wire,
                _environment=self.name,
                _call_path=self.path("/call"),
                _history=self._history,
                _notices=self.notices,
                _terminal_tool=offered.terminal,
            )
        except Refused as refused:
            self._deletions.add(wire)
            raise failure(wire, refused) from None
        except BaseException:
            self._deletions.add(wire)
            raise

    async def _conversation(
        self, wire: GuardedSession, deadline: Deadline, images: answers.AnswerImages
    ) -> tuple[tuple[str, str], ...]:
        messages = await wire.fetch("GET", self.path("/messages"), deadline)
        return answers.conversation(messages, f"{wire.label}: the conversation", images)

    def _images(self) -> answers.AnswerImages:
        return answers.AnswerImages(self._report_image, kept=self._sees)

    def _report_image(self, kind: str) -> None:
        self.notices.report_once("image", image_notice(self.name, kind))

    async def _try(self, task: Task) -> None:
        """Open a session on a task and delete it; raises the same errors as :meth:`session`."""
        self._deletions.add((await self._enter(task))._wire)

    async def _tools(self, wire: GuardedSession, deadline: Deadline) -> Any:
        try:
            return await wire.fetch("GET", self.path("/task_tools"), deadline)
        except Refused as refused:
            if refused.status != 404 or refused.detail != "Not Found":
                raise
            return await wire.fetch("GET", self.path("/tools"), deadline)  # an older server

    describe_task = describe_task
    score_group = score_group

    async def close(self) -> None:
        """Wait for pending session deletions, then close every connection."""
        await self._deletions.wait()
        if self._own_http is not None:
            await self._own_http.close()
        await self._client.environments.aclose()
