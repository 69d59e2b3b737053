"""The commit protocol of checkpoints: begin, finalize, verify, choose, sweep. Does not import torch.

Trainer ranks write their shards into a hidden folder and report the name, size and SHA-256 of each.
:func:`finalize` then writes ``manifest.json`` into that folder and renames it.  The order is shards, fsync,
manifest, fsync, rename, fsync of the parent, so a folder with a commit's name is always complete, and the
incomplete folders that a crash leaves can be recognized and removed.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from orhpc.errors import CheckpointError, StopRequested, StorageRefused
from orhpc.process.access import folder_mode
from orhpc.rundir import MANIFEST, CommitName, RunDir, sync_folder
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed
from orhpc.rundir.storage import is_refusal

FORMAT = 1
_READ_BYTES = 16 << 20
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a checkpoint, as reported by the rank that wrote it."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """Of the content, computed while it was written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of ``manifest.json``: everything in a commit except its tensors."""

    step: int
    """Steps completed."""
    attempt: int
    parent: str | None
    """Name of the previous commit in the lineage."""
    files: tuple[ShardFile, ...]
    state: dict[str, Any] = field(default_factory=dict)
    """The driver's own state: data position, buffer index, W&B run id, what recovery learned."""
    format: int = FORMAT


def begin(rundir: RunDir, name: CommitName) -> Path:
    """Create the hidden folder for the commit's shards.

    Incomplete saves of older attempts are deleted, because the commit may need their space.

    Raises:
        CheckpointError: the filesystem refused the write.
    """
    folder = rundir.checkpoints / f".{name}.partial"
    try:
        if rundir.newest_attempt() == name.attempt:
            _sweep_torn(rundir, name.attempt)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=folder_mode(), parents=True)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be started: {error}") from error
    return folder


def discard(rundir: RunDir, name: CommitName) -> None:
    """Delete the files of a failed commit; no rank may still be writing to them."""
    shutil.rmtree(rundir.checkpoints / f".{name}.partial", ignore_errors=True)


def discard_all(rundir: RunDir, attempt: int) -> None:
    """Delete the incomplete saves of an attempt whose driver and ranks have ended; never raises."""
    for path in rundir.checkpoints.glob(".*.partial"):
        name = CommitName.parse(path.name.removeprefix(".").removesuffix(".partial"))
        if name is not None and name.attempt == attempt:
            shutil.rmtree(path, ignore_errors=True)


def finalize(folder: Path, manifest: Manifest) -> Path:
    """Turn a folder of shards that are on disk into a commit.

    Raises:
        CheckpointError: a shard is missing or has another size than its rank reported, or the
            filesystem refused the write; earlier commits are unchanged.
    """
    name = CommitName(manifest.step, manifest.attempt)
    target = folder.parent / str(name)
    try:
        for shard in manifest.files:
            size = (folder / shard.name).stat().st_size
            if size != shard.size:
                raise CheckpointError(f"{name}: {shard.name} has {size} bytes, {shard.size} were written")
        write_sealed(folder / MANIFEST, asdict(manifest))
        if target.exists():  # a damaged commit that this attempt skipped and wrote again
            shutil.rmtree(target.rename(target.with_name(f".{name}.doomed")))
        folder.rename(target)
        sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be committed: {error}") from error
    return target


def read_manifest(folder: Path) -> Manifest:
    """Read a commit's manifest.

    Raises:
        CheckpointError: it is missing, incomplete or of another format.
        StorageRefused: the filesystem refused the read.
    """
    try:
        raw = read_sealed(folder / MANIFEST, [f.name for f in fields(Manifest)])
        files = tuple(ShardFile(**f) for f in raw.pop("files"))
        manifest = Manifest(files=files, **raw)
    except (OSError, Damaged, TypeError, KeyError) as error:
        problem = f"{folder}: the manifest cannot be read: {error}"
        if isinstance(error, OSError) and is_refusal(error):
            raise StorageRefused(problem) from None
        raise CheckpointError(problem) from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{folder}: format {manifest.format}, this version reads {FORMAT}")
    return manifest


def _never() -> bool:
    return False


def verify(folder: Path, stop: Callable[[], bool] = _never) -> Manifest:
    """Read a commit's manifest and check the size and SHA-256 of every file.

    Raises:
        CheckpointError: names the first file that is missing, short or changed.
        StorageRefused: the filesystem refused the read.
        StopRequested: ``stop`` became true.
    """
    manifest = read_manifest(folder)
    with ThreadPoolExecutor(max_workers=8) as pool:
        problems = [p for p in pool.map(lambda s: _problem(folder, s, stop), manifest.files) if p]
    if problems:
        raise CheckpointError(problems[0])
    return manifest


def _problem(folder: Path, shard: ShardFile, stop: Callable[[], bool]) -> str | None:
    path = folder / shard.name
    try:
        if path.stat().st_size != shard.size:
            return f"{path}: {path.stat().st_size} bytes, the manifest says {shard.size}"
        digest = _sha256(path, stop)
    except OSError as error:
        if is_refusal(error):
            raise StorageRefused(f"{path}: {error.strerror}") from None
        return f"{path}: {error.strerror}"
    return None if digest == shard.sha256 else f"{path}: its content changed since it was written"


def _sha256(path: Path, stop: Callable[[], bool]) -> str:
    digest, room = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(room):
            digest.update(room[:size])
            if stop():
                raise StopRequested("asked to stop while a commit was compared with its manifest")
    return digest.hexdigest()


def newest_intact(
    rundir: RunDir,
    stop: Callable[[], bool] = _never,
    wait_s: float = 0.0,
    report: Callable[[str], None] = lambda problem: None,
) -> tuple[CommitName | None, Manifest | None, list[str]]:
    """Choose the commit to resume from. It is read completely, which takes minutes for a large one.

    Args:
        rundir: the run.
        stop: whether the run has been asked to stop.
        wait_s: seconds to retry a commit that the filesystem refuses to read; then it is skipped like a
            damaged one.
        report: called once per such commit.

    Returns:
        Its name and manifest (None, None before the first commit), and one line about each newer
        commit that was skipped.

    Raises:
        CheckpointError: there are commits, but none is intact; silently starting from the beginning
            would lose the run.
        StopRequested: ``stop`` became true.
    """
    passed_over: list[str] = []
    for name in rundir.lineage():
        try:
            return name, _when_readable(rundir.checkpoints / str(name), stop, wait_s, report), passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    if passed_over:
        raise CheckpointError(f"no commit of {rundir.path} is intact: {passed_over[0]}")
    return None, None, []


def _when_readable(
    folder: Path, stop: Callable[[], bool], wait_s: float, report: Callable[[str], None]
) -> Manifest:
    end, reported = time.monotonic() + wait_s, False
    while True:
        try:
            return verify(folder, stop)
        except StorageRefused as error:
            if time.monotonic() >= end:
                raise CheckpointError(str(error)) from None
            if not reported:
                report(f"{error}; waiting for up to {wait_s:.0f} s")
                reported = True
        if stop():
            raise StopRequested("asked to stop while a commit could not be read")
        time.sleep(_RETRY_S)


def source(path: Path) -> Path:
    """Return the commit folder of ``checkpoint.load``: that folder, or the newest intact commit of a run.

    Raises:
        CheckpointError: there is no intact commit.
    """
    if not (path / "attempts").is_dir():
        verify(path)
        return path
    rundir = RunDir(path)
    name, _, _ = newest_intact(rundir)
    if name is None:
        raise CheckpointError(f"checkpoint.load: {path} has not committed anything")
    return rundir.checkpoints / str(name)


def sweep(rundir: RunDir, attempt: int, *, keep: int, keep_every: int | None) -> list[str]:
    """Delete old commits and the incomplete saves of older attempts.

    Does nothing unless ``attempt`` is the newest, because an older one does not know the run's later commits.

    Keeps the newest ``keep`` of the lineage and those of steps divisible by ``keep_every``.  Commits outside
    the lineage are deleted, but none of a newer attempt: a node that SLURM considers dead may see its commits
    before its folder.

    Returns:
        Names of the folders removed.
    """
    newest = rundir.newest_attempt()
    if attempt != newest:
        return []
    lineage = rundir.lineage()
    kept = {*lineage[:keep], *(c for c in lineage if keep_every and c.step % keep_every == 0)}
    removed = _sweep_torn(rundir, newest)
    for path in rundir.checkpoints.iterdir():
        name = CommitName.parse(path.name)
        if name is not None and name not in kept and name.attempt <= attempt:
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.doomed")))
            removed.append(path.name)
    return removed


def _sweep_torn(rundir: RunDir, newest: int) -> list[str]:
    """Delete incomplete saves of attempts before ``newest``, and folders whose deletion was interrupted."""
    removed: list[str] = []
    for path in rundir.checkpoints.glob(".*"):
        partial = CommitName.parse(path.name.removeprefix(".").removesuffix(".partial"))
        torn = partial is not None and partial.attempt < newest
        if torn or path.name.endswith(".doomed"):
            shutil.rmtree(path)
        if torn:
            removed.append(path.name)
    return removed
