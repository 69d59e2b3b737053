"""What the commands ``try-env`` and ``prepare-tasks`` share: they open environments outside of a run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from orhpc.config import Config
from orhpc.config.files import is_override, load_config
from orhpc.data.task_file import write_tasks
from orhpc.errors import ConfigError, OrhpcError, UserCodeError, policy_of
from orhpc.process.secrets import resolve_secrets
from orhpc.process.terminal import discard_output, guarded_output
from orhpc.rollout.environment.environment import Environment
from orhpc.rollout.environment.own_server import OwnServer


def config_of(arguments: Sequence[str]) -> Config:
    """Load the one config file of a command line, with its overrides; raises ConfigError."""
    paths = [word for word in arguments if not is_override(word)]
    if len(paths) != 1:
        raise ConfigError("pass one config file, and settings as key=value")
    return load_config(paths[0], [word for word in arguments if is_override(word)])


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; print a failure in one line, after the traceback of the user's code."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    with guarded_output():
        try:
            code = command()
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # ``| head``
            discard_output()
            return 128 + signal.SIGPIPE
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 128 + signal.SIGINT
        except OrhpcError as error:
            if isinstance(error, UserCodeError):
                print(error.trace.rstrip(), file=sys.stderr)
            print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
            return policy_of(error).exit_code


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
