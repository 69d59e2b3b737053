"""Models by hub name: one process downloads a snapshot into the hub's cache, from which every node reads.

    orhpc fetch Qwen/Qwen3-0.6B                # or: orhpc fetch CONFIG
    python -m orhpc.models.hub Qwen/Qwen3-0.6B [--revision main] [--config-only]

The program prints one JSON object: ``{"folder": ...}``, or ``{"error": ..., "kind": ...}``.  Downloads use
``huggingface_hub``: interrupted ones resume, and two processes that request the same
file wait for each other.  ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` have the same
meaning as in that library.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

from orhpc.errors import EXIT_OK, HubUnreachable, ModelError, OrhpcError, PreflightError, policy_of
from orhpc.models.folders import WEIGHTS, has_hub_token, hub_cache, problem_of

T = TypeVar("T")
_TRIES = 4
_TRIES_TO_REACH = 2
"""Tries when no connection to the hub can be made: most likely there is no internet."""
_FIRST_WAIT_S = 1.0
_REPORT_S = 30.0
_WANTED = (
    "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py", "chat_templates/*",
)  # fmt: skip
"""Configurations, tokenizers, chat templates and code; :func:`chosen_files` selects weights."""
_WEIGHT_FILES = tuple(f".{stem.rsplit('.', 1)[1]}" for stem in WEIGHTS)
_NOT_WANTED = ("*.index.json", "original/*", "metal/*", "onnx/*", "*.onnx.json", "coreml/*")


def offline_variable() -> str | None:
    """Name of the variable that sets the hub's client to offline mode; None: none does."""
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return name if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") else None


def fetch(name: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """Download a model's snapshot, or only its ``config.json``, and return its folder.

    Args:
        name: ``Organisation/Name``.
        revision: branch, tag or commit; None: ``main``.
        config_only: skip tokenizer and weights; enough for :mod:`orhpc.models`.

    Raises:
        ModelError: the hub has no such model or revision, denies access, or has no readable weights.
        PreflightError: the hub cannot be reached or keeps failing, or the cache's filesystem is too full.
    """
    if (variable := offline_variable()) is not None:
        raise PreflightError(
            f"model.path: {name} is not complete in {hub_cache()}, and {variable} forbids downloads; "
            "unset it, or copy the snapshot there"
        )
    from huggingface_hub import HfApi, snapshot_download

    source = Source(name, revision)
    info = _ask(source, lambda: HfApi().model_info(name, revision=revision, files_metadata=True))
    sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
    if "config.json" not in sizes:
        raise ModelError(f"model.path: {name} has no config.json: it is not a transformers model")
    files = ["config.json"] if config_only else chosen_files(name, list(sizes))
    total = sum(sizes[f] for f in files)
    _check_room(name, total)
    if not config_only:
        print(f"orhpc: fetching {name} at {(info.sha or '?')[:7]}: {len(files)} files, {_size(total)}, "
              f"into {hub_cache()}", file=sys.stderr, flush=True)  # fmt: skip
    # The weights come last: a snapshot that has them is whole, whatever has interrupted an earlier download.
    weights = [f for f in files if f.endswith(_WEIGHT_FILES)]
    folder = ""
    for part in ([f for f in files if f not in weights], weights):
        patterns = [_literal(f) for f in part]
        if patterns:
            download = functools.partial(snapshot_download, name, revision=revision, allow_patterns=patterns)
            folder = _ask(source, download)
    return Path(folder)


def fetch_dataset(name: str, revision: str | None, setting: str) -> Path:
    """Download a dataset's snapshot and return its folder; ``setting``: name of the setting, for errors.

    Raises:
        ModelError: the hub has no such dataset or revision, or denies access.
        PreflightError: the hub cannot be reached or keeps failing, or the disk is full.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = functools.partial(snapshot_download, name, repo_type="dataset", revision=revision)
    if (variable := offline_variable()) is not None:
        try:
            return Path(download(local_files_only=True))
        except LocalEntryNotFoundError:
            raise PreflightError(
                f"{setting}: {name} is not in {hub_cache()}, and {variable} is set"
            ) from None
    return Path(_ask(Source(name, revision, "dataset", setting), download))


def chosen_files(name: str, files: Sequence[str]) -> list[str]:
    """Return the files of a repository that training needs: one format of the weights, all small files.

    Raises:
        ModelError: it has neither safetensors nor PyTorch weights.
    """
    for stem in WEIGHTS:
        kind = stem.rsplit(".", 1)[1]
        index, prefix = f"{stem}.index.json", stem.split(".", 1)[0]
        if index in files or stem in files:
            weights = [f for f in files if "/" not in f and f.endswith(f".{kind}") and f.startswith(prefix)]
            weights += [index] if index in files else []
            break
    else:
        raise ModelError(f"model.path: {name} has no weights in safetensors on the hub")
    small = [f for f in files if any(fnmatchcase(f, p) for p in _WANTED)]
    return sorted({*weights, *(f for f in small if not any(fnmatchcase(f, p) for p in _NOT_WANTED))})


def _literal(file: str) -> str:
    """Return a glob pattern that matches only this file name."""
    return "".join(f"[{c}]" if c in "[]*?" else c for c in file)


def _check_room(name: str, size: int) -> None:
    """Raise PreflightError if the cache's filesystem has less space than the missing files need."""
    there = _bytes_here(name)
    existing = next(p for p in [hub_cache(), *hub_cache().absolute().parents] if p.exists())
    free, missing = shutil.disk_usage(existing).free, max(0, size - there)
    if free < missing:
        raise PreflightError(
            f"model.path: {name} needs {missing / 1e9:.1f} GB more in {hub_cache()}, but {free / 1e9:.1f} GB "
            "are free: free some space, or set HF_HOME to a larger filesystem that all nodes see"
        )


def _bytes_here(name: str) -> int:
    """Return the bytes of a model in the cache, unfinished files included."""
    blobs = hub_cache() / f"models--{name.replace('/', '--')}" / "blobs"
    found = 0
    for file in blobs.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # a finished download is renamed
            found += file.stat().st_size
    return found


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _report(name: str) -> None:
    """Print the progress of a download without a progress bar; runs in a thread until the program ends."""
    while True:
        time.sleep(_REPORT_S)
        print(f"orhpc: {name}: {_size(_bytes_here(name))} downloaded", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Source:
    """A repository of the hub."""

    name: str
    revision: str | None
    kind: Literal["model", "dataset"] = "model"
    setting: str = "model.path"
    """The setting that names it, for errors."""

    @property
    def path(self) -> str:
        """Path of its page on the hub."""
        return self.name if self.kind == "model" else f"datasets/{self.name}"


def _ask(source: Source, work: Callable[[], T]) -> T:
    """Call the hub, retry temporary failures, and convert errors to orhpc's."""
    from huggingface_hub.errors import HfHubHTTPError

    # Releases of the client use different HTTP libraries, whose error is a base class of the client's.
    roots = (c for c in HfHubHTTPError.__mro__ if c.__name__ == "HTTPError" and issubclass(c, Exception))
    http_error: type[Exception] = next(roots, HfHubHTTPError)
    wait_s = _FIRST_WAIT_S
    for left in range(_TRIES - 1, -1, -1):
        try:
            return work()
        except (http_error, OSError, ValueError) as error:
            failure = _failure(source, error)
            tries = _TRIES - left
            enough = tries == _TRIES or (isinstance(failure, HubUnreachable) and tries >= _TRIES_TO_REACH)
            if enough or not _may_pass(error):
                raise failure from None
            print(f"orhpc: {failure}; trying again in {wait_s:.0f} s", file=sys.stderr, flush=True)
        time.sleep(wait_s)
        wait_s *= 2
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 429)
    if isinstance(error, ValueError):
        return False
    return not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES))


def _status(error: Exception) -> int | None:
    """Return the HTTP status of a client exception or of any of its causes."""
    seen: BaseException | None = error
    while seen is not None:
        response: Any = getattr(seen, "response", None)
        if response is not None:
            return int(response.status_code)
        seen = seen.__cause__ or seen.__context__
    return None


def _failure(source: Source, error: Exception) -> OrhpcError:
    """Convert an error to one line for the user."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    what, status = f"{source.setting}: {source.name}", _status(error)
    has_token = has_hub_token()
    if isinstance(error, GatedRepoError) or status == 403:
        then = "use a token of the account that did" if has_token else "set HF_TOKEN (or: hf auth login)"
        return ModelError(f"{what} is gated: accept its terms at {hub}/{source.path}, then {then}")
    if isinstance(error, RevisionNotFoundError):
        return ModelError(
            f"{what} has no revision {source.revision or 'main'!r} ({source.setting[:-4]}revision)"
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        private = "your token may not read it" if has_token else "if it is private, set HF_TOKEN"
        return ModelError(f"{what}: no such folder here, and no such {source.kind} at {hub}; {private}")
    if isinstance(error, HFValidationError):
        return ModelError(f"{what}: {_first_line(error)}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PreflightError(f"{what}: no space left in {hub_cache()}: set HF_HOME to a larger filesystem")
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return PreflightError(f"{what}: {hub_cache()} cannot be written: set HF_HOME to a folder of yours")
    if status is not None:
        return PreflightError(f"{what}: {hub} answers {status}; run the same command later, it resumes")
    return HubUnreachable(f"{what}: {hub} cannot be reached from here ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the model named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m orhpc.models.hub", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--revision")
    parser.add_argument("--config-only", action="store_true")
    options = parser.parse_args(arguments)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        threading.Thread(target=_report, args=(options.name,), daemon=True).start()
    try:
        folder = fetch(options.name, options.revision, config_only=options.config_only)
        if not options.config_only and (problem := problem_of(folder)) is not None:
            raise ModelError(f"model.path: {options.name} was fetched to {folder}, but has {problem}")
    except OrhpcError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}))
        return policy_of(error).exit_code
    print(json.dumps({"folder": str(folder)}))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
