"""``orhpc init FOLDER``: write an example project (environment, reward, configs, batch script, README)."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from orhpc.errors import EXIT_OK, ConfigError

_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = {
    "one_turn": "a question, answered in one turn",
    "tools": "tool calls until a goal is reached",
    "end_state": "tool calls, rewarded by the final state",
}


def add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, help="created if it does not exist; existing files are not changed"
    )
    about = "; ".join(f"{name}: {text}" for name, text in _EXAMPLES.items())
    parser.add_argument("--example", choices=list(_EXAMPLES), default="one_turn", help=about)
    parser.set_defaults(run=init)


def init(options: argparse.Namespace) -> int:
    """Write the project and print the next commands.

    Raises:
        ConfigError: a file of that name exists already, or the folder cannot be written.
    """
    folder: Path = options.folder
    files = project(options.example)
    try:
        if existing := [name for name in files if (folder / name).exists()]:
            raise ConfigError(f"{folder / existing[0]} exists already: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    print(f"{folder}: {', '.join(files)}")
    print(f"  cd {shlex.quote(str(folder))}\n  orhpc try-env train.yaml\n  orhpc launch --local train.yaml")
    return EXIT_OK


def project(example: str) -> dict[str, str]:
    """Map the name of every file of the project to its text."""
    source = (_PACKAGE / "examples" / f"{example}.py").read_text(encoding="utf-8")
    named = re.search(rf"orhpc\.examples\.{example}:(\w+)", source)
    assert named is not None, "an example's docstring shows how a config names it"
    templates = {p.name: p.read_text(encoding="utf-8") for p in sorted((_PACKAGE / "project").iterdir())}
    own = {
        "environment.py": source.replace(f"orhpc.examples.{example}:", "environment:"),
        "reward.py": (_PACKAGE / "examples" / "reward.py")
        .read_text(encoding="utf-8")
        .replace("orhpc.examples.reward:", "reward:"),
        "train.sbatch": (_PACKAGE / "slurm" / "train.sbatch").read_text(encoding="utf-8"),
    }
    return {name: text.replace("@CLASS@", named[1]) for name, text in (templates | own).items()}
