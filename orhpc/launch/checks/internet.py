"""The external servers that a node needs, whether it reaches them, and the offline modes if it does not.

Compute nodes often have no internet access, or only through a proxy (``https_proxy``).  A run then needs its
model on disk, and Weights & Biases writes to the run directory; an external environment has no offline mode.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from orhpc.config import Config
from orhpc.errors import ModelError, PreflightError
from orhpc.models.folders import find_model, is_hub_name, problem_of
from orhpc.process.secrets import resolve_secrets

_TIMEOUT_S = 5.0
_HUB = "https://huggingface.co"
_WANDB = "https://api.wandb.ai"
_OPENREWARD = "https://openreward.ai"
HUB_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
WANDB_OFFLINE = {"WANDB_MODE": "offline"}


@dataclass(frozen=True, slots=True)
class Outside:
    """One external server that the config names or implies."""

    url: str
    what_for: str
    switches: dict[str, str] = field(default_factory=dict)
    """Environment variables that put its clients in offline mode."""
    without: str = ""
    """What happens without the server, if it has no offline mode; empty for both: it is required."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of :func:`survey`."""

    line: str
    """Text for the user."""
    switches: dict[str, str]
    """Environment variables for every process of the job on this node."""


def wanted(config: Config) -> list[Outside]:
    """Every external server that a run would contact from its nodes.

    Raises:
        PreflightError: the URL of the webhook cannot be read.
    """
    found: list[Outside] = []
    path = config.model.path
    if is_hub_name(path):
        try:
            here = problem_of(find_model(path, config.model.revision)) is None
        except ModelError:
            here = False
        switches = HUB_OFFLINE if here else {}
        found.append(Outside(os.environ.get("HF_ENDPOINT", _HUB), f"model.path: {path}", switches))
    if config.wandb.enabled and os.environ.get("WANDB_API_KEY") and "WANDB_MODE" not in os.environ:
        found.append(Outside(os.environ.get("WANDB_BASE_URL", _WANDB), "wandb", WANDB_OFFLINE))
    uri = config.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if config.mlflow.enabled and uri.startswith("http"):
        later = "its rows wait in events.jsonl for `orhpc sync`"
        found.append(Outside(uri, "mlflow", without=later))
    if config.notify.active:
        url = resolve_secrets({"notify.webhook": config.notify.webhook}, {})["notify.webhook"]
        found.append(Outside(url, "notify.webhook", without="no messages are sent"))
    for name, settings in config.environments.items():
        if not settings.is_served:
            found.append(Outside(settings.url or _OPENREWARD, f"environments.{name}"))
    return found


def survey(config: Config) -> Survey:
    """Open a connection to every server that the run would contact, without sending data.

    Raises:
        PreflightError: a required server is unreachable.
    """
    switches: dict[str, str] = {}
    found: list[str] = []
    for server in wanted(config):
        problem = _problem(server.url)
        host = urlsplit(server.url).hostname
        if problem is None:
            found.append(f"{host} reached")
        elif server.switches:
            switches |= server.switches
            found.append(f"{host} not reached ({problem}), so {', '.join(server.switches)} set")
        elif server.without:
            found.append(f"{host} not reached ({problem}): {server.without}")
        else:
            raise PreflightError(
                f"{server.what_for}: {host} cannot be reached from here: {problem}; nodes without internet "
                "need a proxy (https_proxy), or a local copy"
            )
    return Survey("; ".join(found) or "no external server is needed", switches)


def _problem(url: str) -> str | None:
    """Why no connection to a server, or to its proxy, can be opened; None if it can."""
    host, port = _first_hop(url)
    try:
        with contextlib.closing(socket.create_connection((host, port), _TIMEOUT_S)):
            return None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"{host}:{port}: {reason}"


def _first_hop(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(f"{host}:{port}"):
        return host, port
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return through.hostname or "", through.port or (443 if through.scheme == "https" else 80)
