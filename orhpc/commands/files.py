"""``orhpc files``: list the packaged files that users copy, and their paths."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from orhpc.errors import EXIT_OK, ConfigError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = {
    "configs": "configs: `extends: NAME` and `orhpc launch NAME` find them from any folder",
    "slurm": "batch scripts, to submit by hand",
    "install": "constraint files and container recipes for GPU machines",
}


def packaged() -> dict[str, Path]:
    """Map the name of every packaged file to its path."""
    found = (path for folder in _FOLDERS for path in sorted((_PACKAGE / folder).iterdir()))
    return {path.name: path for path in found if path.is_file()}


def add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print the path of this file only")
    parser.set_defaults(run=files)


def files(options: argparse.Namespace) -> int:
    """Print the path of one file, or all of them."""
    known = packaged()
    if options.name is not None:
        if options.name not in known:
            close = difflib.get_close_matches(options.name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{options.name}: no such file in the package{hint} (orhpc files lists them)")
        print(known[options.name])
        return EXIT_OK
    for folder, about in _FOLDERS.items():
        print(f"{_PACKAGE / folder}  {about}")
        for path in known.values():
            if path.parent.name == folder:
                print(f"  {path.name}")
    return EXIT_OK
