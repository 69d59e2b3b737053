"""OpenReward environments: tasks, sessions and tool calls, with every failure typed.

An infrastructure failure is :class:`~orhpc.errors.EnvironmentUnavailable`, and a server that answers
with an error of the environment's own code :class:`~orhpc.errors.EnvironmentRaised`: the rollout can be
made again in a new session.  A task that the server refuses is :class:`~orhpc.errors.BadTask`: the
rollout ends and is counted.  What the model did wrong, a tool that raises on its arguments included, is
a :class:`ToolResult` with ``error`` set, which the model is shown.  None of them is ever a reward.  An
environment that raises on every task ends the run with :class:`~orhpc.errors.UserCodeError`.

Tasks are named by split and index and resolved by the server, so that a task's specification,
which often holds the gold answer, never comes to this side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeVar
from urllib.parse import urlsplit

os.environ.setdefault("OPENREWARD_DISABLE_UPDATE_CHECK", "1")

import aiohttp
from openreward import AsyncOpenReward
from openreward.api.environments.client import AsyncEnvironment
from openreward.api.sandboxes.secrets import WELL_KNOWN_SECRETS
from pydantic import TypeAdapter

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.errors import (
    BadAnswer,
    BadTask,
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
from orhpc.rollout.environment.deadline import Patience
from orhpc.rollout.environment.diagnosis import Diagnosis
from orhpc.rollout.environment.leaving import Leaving
from orhpc.rollout.environment.notices import Notices
from orhpc.rollout.environment.openreward_session import GuardedSession, ToolRaised, required_secrets
from orhpc.rollout.environment.receiving import Refused
from orhpc.rollout.environment.session import Session, failure, image_notice
from orhpc.rollout.environment.tools import ToolResult, ToolSpec
from orhpc.types import Task

__all__ = ["Environment", "Session", "ToolResult", "ToolSpec"]

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M")
_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)
API_KEY = "OPENREWARD_API_KEY"
RETRY_START_S = 1.0
"""Pause between two looks at a server that does not answer yet."""


class Environment:
    """One environment on one server, and the sessions open there."""

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
    ) -> None:
        """``direct``, ``key``: the job runs the server; see :class:`GuardedSession`."""
        self._direct = direct
        self._key = key
        self._own_http: aiohttp.ClientSession | None = None
        self.name = name
        self.settings = settings
        self.rollout = rollout
        self.supports_score_group = self._rich = False
        """The environment compares the rollouts of a group: see :meth:`score_group`."""
        self._client = client
        self._handle = handle
        self._secrets: dict[str, str | tuple[str, list[str]]] = {}
        self._body_secrets: Mapping[str, str] | None = None
        self._leaving = Leaving()
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
    ) -> Environment:
        """Connect to a server, wait until it has come up, and find the variant.

        Args:
            name: key in the config's ``environments``, ``Organisation/Name`` for OpenReward's service.
            settings: its settings.
            secrets: name to value, as :func:`orhpc.process.secrets.resolve_secrets` gives them.
            rollout: deadlines.
            url: server that the job runs itself; null: ``settings.url``, then OpenReward's service.
            key: what requests to the server at ``url`` carry; no other server is sent it.

        Raises:
            EnvironmentUnavailable: no answer within ``rollout.environment_start_timeout_s``.
            ConfigError: no such environment or variant, or the URL is no URL of a server.
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
            # The service's key is not for servers of others; one that needs it names it as a secret.
            handle.api_key = None
        environment = cls(name, settings, rollout, client, handle, direct=direct, key=own_key)
        if direct or is_private(host):
            environment._connect_directly(url or client.session_base_url)
        try:
            await environment._start(secrets, host)
        except BaseException:
            await environment.close()
            raise
        return environment

    def _connect_directly(self, url: str) -> None:
        """Reach the server without the proxies that clusters set.

        The SDK's own connections read them, and a netrc file, which aiohttp looks for in a thread before
        each request: with many sessions at once threads and event loop wait for each other.
        """
        everlasting = aiohttp.ClientTimeout(total=None)
        self._own_http = aiohttp.ClientSession(
            url, connector=aiohttp.TCPConnector(limit=0), timeout=everlasting
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
                if (hopeless := unreachable(self.name, host, error.__cause__)) is not None:
                    raise hopeless from None
                if loop.time() + RETRY_START_S > deadline:
                    raise EnvironmentUnavailable(
                        f"environment {self.name!r} did not come up within "
                        f"{self.rollout.environment_start_timeout_s:g} s: {error}"
                    ) from None
                await asyncio.sleep(RETRY_START_S)
        self._handle.variant = choose_variant(self.name, self.settings.variant, variants)
        tools = await self._ask("GET", self.path("/tools"), answers.TOOLS, missing=None)
        if not variants and tools is None:
            raise ConfigError(
                f"environments.{self.name}.url: {host} answers, but is no OpenReward server: it has neither "
                "/list_environments nor /tools"
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
        """Address on the server; without the variant each call would pay a redirect."""
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

    def _patience(self, what: str) -> Patience:
        return Patience(what, self.rollout.session_timeout_s, self.rollout.environment_start_timeout_s)

    async def _ask(
        self,
        method: str,
        path: str,
        schema: TypeAdapter[T],
        payload: dict[str, Any] | None = None,
        *,
        missing: M | EllipsisType = ...,
    ) -> T | M:
        """Ask the server about the environment.

        ``missing`` is returned when it has no such call; without it that is a ConfigError.
        """
        wire = self._wire(f"environment {self.name!r}")
        try:
            async with self._patience(wire.label) as patience:
                await wire.connect(patience)
                answer = await wire.fetch(method, path, patience, payload)
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
            self._leaving.add(wire)

    async def num_tasks(self, split: str) -> int:
        """Tasks of a split, at most ``num_samples``; raises ConfigError when there is no such split."""
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
        if count > answers.MOST_TASKS:
            raise ConfigError(
                f"environment {self.name!r}: split {split!r} has {count} tasks; set environments.{self.name}."
                f"num_samples to {answers.MOST_TASKS} or fewer"
            )
        return count

    async def splits(self) -> list[str]:
        """Names of the task splits, as far as the server says."""
        listed = await self._ask("GET", self.path("/splits"), answers.SPLITS, missing=[])
        return [split if isinstance(split, str) else split.name for split in listed]

    @contextlib.asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[Session]:
        """Open a session on a task and delete it at the end.

        Neither is ever cut short by a cancellation, which would leave the session, and whatever
        sandbox it holds, to the server's reaper for 15 minutes: they go on in the background, and
        :meth:`close` waits for them.

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
                self._leaving.add(opening)
                raise
            except EnvironmentRaised as error:
                await self._diagnosis.of(task, error, self.num_tasks, self._try)
                raise
        self._diagnosis.opened = True
        try:
            yield session
        except EnvironmentUnavailable:
            self._leaving.add(session._wire)  # there may be nobody to answer: not worth waiting for
            raise
        except BaseException:
            await asyncio.shield(self._leaving.add(session._wire))
            raise
        await asyncio.shield(self._leaving.add(session._wire))

    async def _enter(self, task: Task) -> Session:
        wire = self._wire(task.id, task.split, task.index)
        try:
            async with self._patience(f"{task.id}: opening the session") as patience:
                await wire.begin(patience)
                blocks = await wire.fetch("GET", self.path("/prompt"), patience)
                said = await self._conversation(wire, patience) if answers.is_conversation(blocks) else ()
                tools = await self._tools(wire, patience)
            offered = answers.tools_of(tools, f"{task.id}: tools")
            return Session(
                prompt=answers.text_of(blocks, f"{task.id}: the prompt", self._image_left_out),
                tools=offered.specs,
                conversation=said,
                terminal=offered.terminal is not None,
                _wire=wire,
                _environment=self.name,
                _call_path=self.path("/call"),
                _history=self._history,
                _notices=self.notices,
                _terminal_tool=offered.terminal,
            )
        except Refused as refused:
            self._leaving.add(wire)
            raise failure(wire, refused) from None
        except BaseException:
            self._leaving.add(wire)
            raise

    async def _conversation(self, wire: GuardedSession, patience: Patience) -> tuple[tuple[str, str], ...]:
        messages = await wire.fetch("GET", self.path("/messages"), patience)
        return answers.conversation(messages, f"{wire.label}: the conversation", self._image_left_out)

    def _image_left_out(self, kind: str) -> None:
        self.notices.say_once("image", image_notice(self.name, kind))

    async def _try(self, task: Task) -> None:
        """Open a session on a task and delete it again; raises as :meth:`session`."""
        self._leaving.add((await self._enter(task))._wire)

    async def _tools(self, wire: GuardedSession, patience: Patience) -> Any:
        try:
            return await wire.fetch("GET", self.path("/task_tools"), patience)
        except Refused as refused:
            if refused.status != 404 or refused.detail != "Not Found":
                raise
            return await wire.fetch("GET", self.path("/tools"), patience)  # an older server

    async def score_group(self, task: Task, transcripts: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
        """Score the finished rollouts of a group against each other.

        Args:
            task: the group's task.
            transcripts: ``Rollout.messages`` of each.

        Returns one score a transcript, which comes on top of what the rollout was paid.
        Raises BadTask when judging fails, EnvironmentUnavailable when the server does not answer.
        """
        candidates = [
            {"messages": answers.wire_messages(messages, rich=self._rich)} for messages in transcripts
        ]
        budget = self.rollout.tool_timeout_s
        async with self.session(task) as session:
            try:
                async with Patience(f"{task.id}: group scoring", budget, budget) as patience:
                    answer = await session._wire.invoke(
                        self.path("/score_group"), {"candidates": candidates}, patience
                    )
            except ToolRaised as error:
                raise BadTask(f"{task.id}: group scoring failed: {error}") from None
            except Refused as refused:
                raise failure(session._wire, refused) from None
        return answers.group_scores(answer, len(candidates), f"{task.id}: group scoring")

    async def close(self) -> None:
        """Wait for sessions that are being deleted, then close every connection."""
        await self._leaving.wait()
        if self._own_http is not None:
            await self._own_http.close()
        await self._client.environments.aclose()
