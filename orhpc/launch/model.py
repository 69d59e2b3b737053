"""The models that a run reads: fetched or made once, before they are needed, and pinned for its life.

The launcher calls :func:`ensure_config` (enough to plan) and then :func:`ensure_models` (everything); a
job whose login node has no internet does the same on its first node.  What a branch of the hub pointed to
at the first start is written to ``RUN/model.json``, so that a resume years later reads the same weights.
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
    """Return the folder with the policy's ``config.json``, fetching that one file of a hub model.

    Returns:
        None where it is not here and cannot be fetched from here, but may be from a node.

    Raises:
        ModelError: there is no such model, or the hub denies it.
        PreflightError: the hub keeps failing, or ``HF_HUB_OFFLINE`` forbids to ask it.
    """
    path, revision = config.model.path, config.model.revision
    if not is_hub_name(path):
        return None if is_bundled(path) and not _is_here(path) else find_model(path)
    if _is_here(path, revision):
        return find_model(path, revision)
    try:
        return _make("orhpc.models.hub", [path, *_revision_words(revision), "--config-only"])
    except HubUnreachable:
        return None


def ensure_models(config: Config, rundir: RunDir, stopped: Callable[[], bool] = lambda: False) -> None:
    """Have every model of the run whole on this machine, and pin what hub names stand for.

    Args:
        rundir: where the pins are kept; its folder exists.
        stopped: polled while a download runs.

    Raises:
        ModelError: a model does not exist, is denied, or is not whole.
        HubUnreachable: the hub has to be asked and cannot be reached from here.
        PreflightError: it keeps failing, or there is no room.
        StopRequested: ``stopped`` said so; what has been downloaded is kept.
    """
    path = config.model.path
    if is_bundled(path):
        try:
            _make("orhpc.models.bundled", [path], stopped)
        except ModelError as error:
            raise ModelError(f"{error} (kept in {cache_folder()})") from None
    elif not is_hub_name(path) and (problem := problem_of(find_model(path))) is not None:
        raise damaged(path, problem)
    try:
        fetch_snapshots(config, rundir, stopped)
    except HubUnreachable as error:
        names = " ".join(name for name, _ in hub_models(config))
        raise HubUnreachable(
            f"{error}; where there is internet, with HF_HOME={hub_cache().parent}: orhpc fetch {names}"
        ) from None


def fetch_snapshots(config: Config, rundir: RunDir, stopped: Callable[[], bool] = lambda: False) -> None:
    """Have every hub model of the run whole in the cache: what a login node does for its job.

    Raises:
        OrhpcError: as :func:`ensure_models`.
    """
    for name, revision in hub_models(config):
        _ensure_snapshot(name, revision, rundir, stopped)


def damaged(path: str, problem: str) -> ModelError:
    """The refusal of a local folder that is not whole."""
    return ModelError(f"model.path: {path} has {problem}")


def is_fetched(config: Config) -> bool:
    """Whether the policy is a model that a start fetches or makes where it is not whole."""
    return is_bundled(config.model.path) or is_hub_name(config.model.path)


def model_folder(config: Config, rundir: RunDir) -> Path:
    """Local folder of the policy model, as :func:`ensure_models` left it.

    Raises:
        ModelError: this machine does not see it.
    """
    path, revision = config.model.path, config.model.revision
    return find_model(path, _pins(rundir).get(_pin_name(path, revision), revision))


def check_seen(config: Config, rundir: RunDir) -> None:
    """Raises PreflightError on a node that does not see the model that the first node fetched or made."""
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
    """Return the folder of a hub model's snapshot, downloading what of it is not in the cache.

    Raises:
        OrhpcError: as :func:`ensure_models`.
    """
    if _is_here(name, revision) and problem_of(find_model(name, revision)) is None:
        return find_model(name, revision)
    return _make("orhpc.models.hub", [name, *_revision_words(revision)], stopped)


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


def _make(module: str, words: list[str], stopped: Callable[[], bool] = lambda: False) -> Path:
    """Run a program that makes a folder: this process may load neither torch nor a hub's client.

    Its progress goes to our standard error; its last line of output is JSON: the folder, or what failed.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        try:
            while process.poll() is None:
                if stopped():
                    raise StopRequested(f"stopped while {words[0]} was fetched; what has come is kept")
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            raise StopRequested(f"stopped while {words[0]} was fetched; the same command goes on") from None
        finally:
            if process.poll() is None:
                process.terminate()
        assert process.stdout is not None
        lines = process.stdout.read().strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise PreflightError(f"{module} {words[0]} ended with {process.returncode}; see above") from None
    if "error" in answer:
        raise getattr(errors, answer["kind"])(answer["error"])
    return Path(answer["folder"])


def where_models_are(config: Config) -> list[Path]:
    """Folders that a container has to see for the job's models."""
    path, found = config.model.path, []
    if is_bundled(path):
        found.append(cache_folder())
    elif Path(path).is_dir():
        found.append(Path(path).absolute())
    if hub_models(config):
        found.append(hub_cache().absolute())
    return found
