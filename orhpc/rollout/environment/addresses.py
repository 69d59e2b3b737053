"""Addresses of environment servers: URLs, proxies and variants."""

from __future__ import annotations

import difflib
import errno
import ipaddress
import os
from collections.abc import Sequence

import aiohttp

from orhpc.config.environment import check_server_url
from orhpc.errors import ConfigError, PreflightError


def choose_variant(name: str, wanted: str | None, available: Sequence[str]) -> str | None:
    """Return the variant to use, in lower case as the server spells it.

    Without ``wanted``: the variant named like the environment, otherwise the server's first, its default.
    Raises ConfigError when ``wanted`` is not available.
    """
    if not available:
        return wanted.lower() if wanted else None
    if wanted is None:
        own = name.rsplit("/", 1)[-1].lower()
        return own if own in available else available[0]
    if wanted.lower() in available:
        return wanted.lower()
    close = difflib.get_close_matches(wanted.lower(), available, n=1, cutoff=0.0)
    raise ConfigError(
        f"environments.{name}.variant: the server has no {wanted!r}; did you mean {close[0]!r}? "
        f"It has {', '.join(available)}"
    )


def checked_host(name: str, url: str) -> str:
    """Return the host of a server's URL; raises ConfigError when the URL is invalid."""
    try:
        return check_server_url(url)
    except ValueError as error:
        raise ConfigError(f"environments.{name}.{error}") from None


def unreachable(name: str, host: str, cause: BaseException | None) -> PreflightError | None:
    """Return the error for a server that cannot be reached by waiting; None if the server may be starting.

    Args:
        name: the environment's name.
        host: the host of its URL.
        cause: why the connection failed.
    """
    if isinstance(cause, aiohttp.ClientConnectorDNSError):
        return PreflightError(
            f"environment {name!r}: the name {host!r} cannot be resolved on this node: check the URL, or "
            "whether compute nodes have internet access (run `orhpc check`); environments that the job "
            "serves itself (environments.NAME.serve) need none"
        )
    if isinstance(cause, aiohttp.ClientSSLError):
        reason = " ".join(str(cause).split())[:200]
        return PreflightError(f"environment {name!r}: no secure connection to {host!r}: {reason}")
    number = cause.os_error.errno if isinstance(cause, aiohttp.ClientConnectorError) else None
    if number in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return PreflightError(
            f"environment {name!r}: this node has no route to {host!r}: {os.strerror(number)}; "
            "it may have no internet access (run `orhpc check`)"
        )
    return None


def is_openreward(host: str) -> bool:
    """Whether a host belongs to OpenReward's own service."""
    return host == "openreward.ai" or host.endswith(".openreward.ai")


def is_private(host: str) -> bool:
    """Whether a host is loopback, private or a single label, so that it is not reached through a proxy."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host


def secrets_in_body(openapi: object) -> bool:
    """Whether a server reads secrets from the body of ``/create``, according to its OpenAPI description.

    Servers of ors-sdk do (its ``CreateSession``) and ignore the header ``X-Secrets``; OpenReward's servers
    read that header and refuse a body with secrets.
    """
    node = openapi
    for key in ("components", "schemas", "CreateSession", "properties"):
        node = node.get(key) if isinstance(node, dict) else None
    return isinstance(node, dict) and "secrets" in node
