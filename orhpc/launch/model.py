"""The models of a run: fetched or built once, before they are needed, and pinned for the whole run.

The launcher calls :func:`ensure_config` (enough to plan) and then :func:`fetch_snapshots`; the first node, or
a ``--local`` run, calls :func:`ensure_models`.  The commit of a hub branch at the first start is written to
``RUN/model.json``, so that every resume reads the same weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orhpc import errors
from orhpc.config import Config
from orhpc.errors import HubUnreachable, ModelError, PreflightError, StopRequested
from orhpc.models.bundled import cache_folder, is_bundled
from orhpc.models.folders import COMMIT, find_model, hub_cache, is_hub_name, problem_of
from orhpc.rundir import RunDir, write_atomic

_PINS = "model.json"
_POLL_S = 0.1


def ensure_config(config: Config) -> Path | None:
    """Return the folder with the policy's ``config.json``, fetching only that file of a hub model.

    Returns:
        None if it is absent and cannot be fetched from this machine, but possibly from a node.

    Raises:
        ModelError: there is no such model, or the hub denies access.
        PreflightError: the hub keeps failing, or its client's offline mode forbids requests to it.
    """
    path, revision = config.model.path, config.model.revision
    if not is_hub_name(path):
        return None if is_bundled(path) and not _is_here(path) else find_model(path)
    if _is_here(path, revision):
        return find_model(path, revision)
    try:
        return make_folder("orhpc.models.hub", [path, *_revision_words(revision), "--config-only"])
    except HubUnreachable:
        return None


def ensure_models(config: Config, rundir: RunDir, stopped: Callable[[], bool] = lambda: False) -> None:
    """Make every model of the run complete on this machine, and pin hub names to commits.

    Args:
        rundir: the run directory that stores the pins; it exists.
        stopped: polled while a download runs.

    Raises:
        ModelError: a model does not exist, is denied, or is incomplete.
        HubUnreachable: the hub is needed and cannot be reached from this machine.
        PreflightError: the hub keeps failing, or there is no disk space.
        StopRequested: ``stopped`` returned True; partial downloads are kept.
    """
    path = config.model.path
    if is_bundled(path):
        try:
            make_folder("orhpc.models.bundled", [path], stopped)
        except ModelError as error:
            raise ModelError(f"{error} (kept in {cache_folder()})") from None
    elif not is_hub_name(path) and (problem := problem_of(find_model(path))) is not None:
        raise damaged(path, problem)
    try:
        fetch_snapshots(config, rundir, stopped)
    except HubUnreachable as error:
        names, cache = " ".join(name for name, _ in hub_models(config)), hub_cache()
        where = f"HF_HOME={cache.parent}" if cache.name == "hub" else f"HF_HUB_CACHE={cache}"
        raise HubUnreachable(
            f"{error}; on a machine with internet, with {where}: orhpc fetch {names}"
        ) from None


def fetch_snapshots(config: Config, rundir: RunDir, stopped: Callable[[], bool] = lambda: False) -> None:
    """Make every hub model of the run complete in the cache; a login node does this for its job.

    Raises:
        OrhpcError: as :func:`ensure_models`.
    """
    for name, revision in hub_models(config):
        _ensure_snapshot(name, revision, rundir, stopped)


def damaged(path: str, problem: str) -> ModelError:
    """The error for an incomplete local folder."""
    return ModelError(f"model.path: {path} has {problem}")


def is_fetched(config: Config) -> bool:
    """Whether a start fetches or builds the policy's model if it is incomplete."""
    return is_bundled(config.model.path) or is_hub_name(config.model.path)


def model_folder(config: Config, rundir: RunDir) -> Path:
    """Local folder of the policy model, as :func:`ensure_models` left it.

    Raises:
        ModelError: the folder does not exist on this machine.
    """
    path, revision = config.model.path, config.model.revision
    return find_model(path, _pins(rundir).get(_pin_name(path, revision), revision))


def check_seen(config: Config, rundir: RunDir) -> None:
    """Raise PreflightError on a node that cannot see the model that the first node fetched or built."""
    try:
        model_folder(config, rundir)
    except ModelError as error:
        variable = "HF_HOME" if is_hub_name(config.model.path) else "ORHPC_CACHE"
        where = f"; set {variable} to a folder that all nodes share" if is_fetched(config) else ""
        raise PreflightError(f"the first node has the model, this one does not: {error}{where}") from None


def hub_models(config: Config) -> list[tuple[str, str | None]]:
    """(name, revision) of every model of the run that comes from the hub: the policy and a drafter."""
    found = [(config.model.path, config.model.revision)]
    if config.engine.draft_model is not None:
        found.append((config.engine.draft_model, None))
    return [(name, revision) for name, revision in found if is_hub_name(name)]


def fetch(name: str, revision: str | None, stopped: Callable[[], bool] = lambda: False) -> Path:
    """Return the folder of a hub model's snapshot, downloading the files that are not in the cache.

    Raises:
        OrhpcError: as :func:`ensure_models`.
    """
    if _is_here(name, revision) and problem_of(find_model(name, revision)) is None:
        return find_model(name, revision)
    return make_folder("orhpc.models.hub", [name, *_revision_words(revision)], stopped)


def _ensure_snapshot(name: str, revision: str | None, rundir: RunDir, stopped: Callable[[], bool]) -> None:
    pins = _pins(rundir)
    folder = fetch(name, pins.get(_pin_name(name, revision), revision), stopped)
    if COMMIT.fullmatch(folder.name) and _pin_name(name, revision) not in pins:
        pins[_pin_name(name, revision)] = folder.name
        write_atomic(rundir.path / _PINS, json.dumps(pins, indent=1) + "\n")


def _pins(rundir: RunDir) -> dict[str, str]:
    path = rundir.path / _PINS
    if not path.is_file():
        return {}
    try:
        pins = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pins = None
    if isinstance(pins, dict) and all(isinstance(v, str) and COMMIT.fullmatch(v) for v in pins.values()):
        return pins
    raise ModelError(f"{path} is damaged: it maps NAME@REVISION to a commit of the hub; restore or remove it")


def _pin_name(name: str, revision: str | None) -> str:
    return f"{name}@{revision or 'main'}"


def _revision_words(revision: str | None) -> list[str]:
    return [] if revision is None else ["--revision", revision]


def _is_here(path: str, revision: str | None = None) -> bool:
    try:
        find_model(path, revision)
    except ModelError:
        return False
    return True


def make_folder(module: str, arguments: list[str], stopped: Callable[[], bool] = lambda: False) -> Path:
    """Run a program that fetches or builds a folder: this process must not load torch or a hub client.

    Its progress goes to our standard error; its last line of output is JSON: the folder or the error.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        try:
            while process.poll() is None:
                if stopped():
                    raise StopRequested(f"stopped while {arguments[0]} was fetched; partial files are kept")
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            raise StopRequested(
                f"stopped while {arguments[0]} was fetched; the same command continues"
            ) from None
        finally:
            if process.poll() is None:
                process.terminate()
        assert process.stdout is not None
        lines = process.stdout.read().strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise PreflightError(f"{module} {arguments[0]} ended with {process.returncode}; see above") from None
    if "error" in answer:
        raise getattr(errors, answer["kind"])(answer["error"])
    return Path(answer["folder"])


def where_models_are(config: Config) -> list[Path]:
    """Folders that must be mounted in a container for the job's models."""
    path, found = config.model.path, []
    if is_bundled(path):
        found.append(cache_folder())
    elif Path(path).is_dir():
        found.append(Path(path).absolute())
    if (draft := config.engine.draft_model) is not None and Path(draft).is_dir():
        found.append(Path(draft).absolute())
    if hub_models(config):
        found.append(hub_cache().absolute())
    return found
