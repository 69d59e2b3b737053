"""Open an environment of a config outside of a run, for the commands ``try-env`` and ``prepare-tasks``."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from orhpc.config import Config
from orhpc.data.task_file import write_tasks
from orhpc.errors import OrhpcError
from orhpc.process.secrets import resolve_secrets
from orhpc.rollout.environment.environment import Environment
from orhpc.rollout.environment.own_server import OwnServer


@contextlib.asynccontextmanager
async def opened(config: Config, name: str) -> AsyncIterator[tuple[Environment, OwnServer | None]]:
    """Connect to an environment, and serve it for as long if the config says so.

    Raises:
        ConfigError: the config of the environment is wrong.
        OrhpcError: it cannot be opened, or the process that serves it has ended.
    """
    settings = config.environments[name]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orhpc-environment-")))
        if settings.data is not None:
            write_tasks(settings.data, folder, f"environments.{name}.data")
        own = stack.enter_context(OwnServer(name, settings, folder)) if settings.is_served else None
        environment = await _open(config, name, own)
        try:
            yield environment, own
        finally:
            await environment.close()


async def _open(config: Config, name: str, own: OwnServer | None) -> Environment:
    settings = config.environments[name]
    opening = asyncio.ensure_future(
        Environment.open(
            name,
            settings,
            secrets=resolve_secrets(config.secrets, settings.secrets),
            rollout=settings.apply_to(config.rollout),
            url=own.url if own else None,
            key=own.key if own else None,
        )
    )
    while not (await asyncio.wait([opening], timeout=0.2))[0]:
        if own is not None:
            try:
                own.check()
            except OrhpcError:
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
                raise
    return await opening
