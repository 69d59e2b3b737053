"""The commit protocol of checkpoints, torch-free: begin, finalise, verify, choose, sweep.

Trainer ranks write their shards into a hidden folder and report name, size and SHA-256 of each.
:func:`finalise` then writes ``manifest.json`` beside them and renames the folder, in the order
shards, fsync, manifest, fsync, rename, fsync of the parent: a folder with a commit's name is
always whole, and whatever else a crash left is recognised and swept.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from orhpc.errors import CheckpointError, StopRequested, StorageRefused
from orhpc.rundir import MANIFEST, CommitName, RunDir, sync_folder
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed
from orhpc.rundir.storage import is_refusal

FORMAT = 1
_READ_BYTES = 16 << 20
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a checkpoint, as the rank that wrote it saw it."""

    name: str
    size: int
    """Bytes."""
    sha256: str
    """Of the content, computed while it was written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``manifest.json`` holds: everything about a commit but its tensors."""

    step: int
    """Steps completed."""
    attempt: int
    parent: str | None
    """Name of the commit before it in the lineage."""
    files: tuple[ShardFile, ...]
    state: dict[str, Any] = field(default_factory=dict)
    """The driver's own state: data position, buffer index, W&B run id, what recovery learned."""
    format: int = FORMAT


def begin(rundir: RunDir, name: CommitName) -> Path:
    """Make the hidden folder that ranks write the commit's shards into.

    What crashed saves of older attempts left behind is removed: the commit may need the room.

    Raises:
        CheckpointError: the filesystem refused.
    """
    folder = rundir.checkpoints / f".{name}.partial"
    try:
        if rundir.newest_attempt() == name.attempt:
            _sweep_torn(rundir, name.attempt)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be begun: {error}") from error
    return folder


def discard(rundir: RunDir, name: CommitName) -> None:
    """Remove what there is of a commit that failed; nobody may still write into it."""
    shutil.rmtree(rundir.checkpoints / f".{name}.partial", ignore_errors=True)


def finalise(folder: Path, manifest: Manifest) -> Path:
    """Turn a folder of durable shards into a commit.

    Raises:
        CheckpointError: a shard is missing or has another size than its rank reported, or the
            filesystem refused; the earlier commits are untouched.
    """
    name = CommitName(manifest.step, manifest.attempt)
    target = folder.parent / str(name)
    try:
        for shard in manifest.files:
            size = (folder / shard.name).stat().st_size
            if size != shard.size:
                raise CheckpointError(f"{name}: {shard.name} has {size} bytes, {shard.size} were written")
        write_sealed(folder / MANIFEST, asdict(manifest))
        if target.exists():  # a damaged one, which this attempt has passed over and done again
            shutil.rmtree(target.rename(target.with_name(f".{name}.doomed")))
        folder.rename(target)
        sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be committed: {error}") from error
    return target


def read_manifest(folder: Path) -> Manifest:
    """Read a commit's manifest.

    Raises:
        CheckpointError: it is missing, torn or of another format.
        StorageRefused: the filesystem does not let it be read.
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
    """Read a commit's manifest and compare every file with it, bit for bit.

    Raises:
        CheckpointError: names the first file that is missing, short or changed.
        StorageRefused: the filesystem does not let it be read.
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


def newest_good(
    rundir: RunDir,
    stop: Callable[[], bool] = _never,
    wait_s: float = 0.0,
    tell: Callable[[str], None] = lambda problem: None,
) -> tuple[CommitName | None, Manifest | None, list[str]]:
    """Choose the commit to resume from; all of it is read, which takes minutes for a large one.

    ``wait_s``: how long one that the filesystem does not let be read is tried again, of which ``tell`` is
    told once; then it is passed over like a damaged one.

    Returns:
        Its name and manifest (None, None before the first commit), and one line about each newer
        commit that had to be passed over.

    Raises:
        CheckpointError: there are commits and not one of them is whole; starting over in silence
            would throw the run away.
        StopRequested: ``stop`` became true.
    """
    passed_over: list[str] = []
    for name in rundir.lineage():
        try:
            return name, _when_readable(rundir.checkpoints / str(name), stop, wait_s, tell), passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    if passed_over:
        raise CheckpointError(f"no commit of {rundir.path} is whole: {passed_over[0]}")
    return None, None, []


def _when_readable(
    folder: Path, stop: Callable[[], bool], wait_s: float, tell: Callable[[str], None]
) -> Manifest:
    end, told = time.monotonic() + wait_s, False
    while True:
        try:
            return verify(folder, stop)
        except StorageRefused as error:
            if time.monotonic() >= end:
                raise CheckpointError(str(error)) from None
            if not told:
                tell(f"{error}; waiting for up to {wait_s:.0f} s")
                told = True
        if stop():
            raise StopRequested("asked to stop while a commit could not be read")
        time.sleep(_AGAIN_S)


def source(path: Path) -> Path:
    """The commit folder that ``checkpoint.load`` means: one by itself, or a run's newest good one.

    Raises:
        CheckpointError: there is no whole commit.
    """
    if not (path / "attempts").is_dir():
        verify(path)
        return path
    rundir = RunDir(path)
    name, _, _ = newest_good(rundir)
    if name is None:
        raise CheckpointError(f"checkpoint.load: {path} has not committed anything")
    return rundir.checkpoints / str(name)


def sweep(
    rundir: RunDir, attempt: int, *, keep: int, keep_every: int | None, pinned: Sequence[CommitName] = ()
) -> list[str]:
    """Remove old commits and what crashed saves of older attempts left behind.

    Only the newest attempt may: from a stale one's view the run's real commits are strangers.

    Keeps the newest ``keep`` of the lineage, those of steps divisible by ``keep_every``, and the
    ``pinned`` ones.  Commits outside the lineage go too.

    Returns:
        Names of the folders removed.
    """
    newest = rundir.newest_attempt()
    if attempt != newest:
        return []
    lineage = rundir.lineage()
    kept = {*lineage[:keep], *pinned, *(c for c in lineage if keep_every and c.step % keep_every == 0)}
    removed = _sweep_torn(rundir, newest)
    for path in rundir.checkpoints.iterdir():
        name = CommitName.parse(path.name)
        if name is not None and name not in kept:
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.doomed")))
            removed.append(path.name)
    return removed


def _sweep_torn(rundir: RunDir, newest: int) -> list[str]:
    """Remove what saves of attempts before ``newest`` left, and removals that were cut short."""
    removed: list[str] = []
    for path in rundir.checkpoints.glob(".*"):
        partial = CommitName.parse(path.name.removeprefix(".").removesuffix(".partial"))
        torn = partial is not None and partial.attempt < newest
        if torn or path.name.endswith(".doomed"):
            shutil.rmtree(path)
        if torn:
            removed.append(path.name)
    return removed
