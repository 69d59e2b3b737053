"""``orhpc clean``: what fills a run directory, and removal of what a run does not need to continue."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from orhpc.commands.run_state import RUN_HELP, existing_run
from orhpc.errors import EXIT_OK, ConfigError, RecordError
from orhpc.rundir import RunDir


def add_clean(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--rollouts", type=int, metavar="KEEP", help="remove recorded rollouts but the newest KEEP steps"
    )
    parser.add_argument(
        "--logs", type=int, metavar="KEEP", help="remove the logs of attempts but those of the newest KEEP"
    )
    parser.add_argument("--exports", action="store_true", help="remove exported models")
    parser.add_argument("--profiles", action="store_true", help="remove profiles")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.set_defaults(run=clean)


def clean(options: argparse.Namespace) -> int:
    """Show the size of each part of a run directory, or remove the named ones.

    Commits, the buffer, events and outcomes are never removed: a run needs them to continue.
    """
    run = existing_run(options.run_dir)
    for name in ("rollouts", "logs"):
        if (keep := getattr(options, name)) is not None and keep < 1:
            raise ConfigError(f"--{name}: keep at least 1, not {keep}; the run may be using the newest")
    chosen = list(_chosen(run, options))
    if not (options.rollouts or options.logs or options.exports or options.profiles):
        for name, size in sizes(run).items():
            print(f"{_readable(size):>10}  {name}")
        print("--rollouts KEEP, --logs KEEP, --exports and --profiles remove; commits keep their own number")
        return EXIT_OK
    freed = sum(size_of(path) for path in chosen)
    for path in chosen:
        if not options.dry_run:
            _remove(path)
        print(f"{'would remove' if options.dry_run else 'removed'} {path}")
    print(f"{_readable(freed)} {'would be freed' if options.dry_run else 'freed'}")
    return EXIT_OK


def sizes(run: RunDir) -> dict[str, int]:
    """Bytes of each part of a run directory, the largest first."""
    found = {path.name: size_of(path) for path in run.path.iterdir() if not path.is_symlink()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def size_of(path: Path) -> int:
    """Bytes on disk of a file or a folder; what disappears meanwhile counts as nothing."""
    if not path.is_dir() or path.is_symlink():
        return _blocks(path)
    return sum(_blocks(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _chosen(run: RunDir, options: argparse.Namespace) -> Iterator[Path]:
    """What the options name, the oldest first."""
    if options.rollouts is not None:
        for kind in ("step", "evaluation"):
            numbered = _numbered(run.rollouts, f"{kind}_")
            yield from numbered[: -options.rollouts]
    if options.logs is not None:
        for number in range(1, run.newest_attempt() + 1 - options.logs):
            yield from sorted(run.attempt(number).glob("*.log"))
    if options.exports and run.export.is_dir():
        yield run.export
    if options.profiles and (run.path / "profiles").is_dir():
        yield run.path / "profiles"


def _numbered(folder: Path, prefix: str) -> list[Path]:
    found = [(p.name.removeprefix(prefix), p) for p in folder.glob(f"{prefix}*")]
    return [path for _, path in sorted((int(n), p) for n, p in found if n.isdigit())]


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RecordError(f"{path}: not removed: {error.strerror}") from None


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
