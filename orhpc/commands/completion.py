"""``orhpc completion SHELL``: the script with which bash, zsh or fish completes ``orhpc``.

shtab makes the script from the parsers; what depends on the folder (runs, config files) and on the schema
(settings and their values) is completed by functions of the shell, in ``completion_functions``.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from orhpc.commands.files import packaged
from orhpc.config import Config
from orhpc.errors import EXIT_OK, PreflightError

SHELLS = ("bash", "zsh", "fish")
_FUNCTIONS = Path(__file__).parent / "completion_functions"
_OF_PARAMETER = {"run_dir": "runs", "run_dirs": "runs", "folder": "runs", "arguments": "settings"}
"""Which function completes a positional parameter, by its name."""


def add_completion(parser: argparse.ArgumentParser, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """``whole``: makes the parser of all commands."""
    parser.add_argument("shell", choices=SHELLS, help='bash, zsh: eval "$(orhpc completion SHELL)"')
    parser.epilog = "fish: orhpc completion fish | source"
    parser.set_defaults(run=completion, whole=whole)


def completion(options: argparse.Namespace) -> int:
    """Print the script."""
    print(script(options.whole(), options.shell))
    return EXIT_OK


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of a parser for a shell.

    Raises:
        PreflightError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise PreflightError("shtab: not installed; pip install shtab") from None
    _attach(parser)
    functions = (_FUNCTIONS / f"functions.{shell}").read_text()
    for mark, words in {
        "@KEYS@": [f"{key}=" for key, _ in _settings(Config)],
        "@VALUES@": [f"{key}={value}" for key, values in _settings(Config) for value in values],
        "@CONFIGS@": [name for name in packaged() if name.endswith(".yaml")],
        "@PACKAGED@": list(packaged()),
    }.items():
        functions = functions.replace(mark, " ".join(words))
    head, _, tail = functions.partition("# --- after shtab's script\n")
    text = shtab.complete(parser, shell, preamble=head)
    if shell == "zsh":  # shtab's form of a parameter that takes any number of words completes only the first
        text = text.replace('"(*)::', '"*:').replace('"(*):', '"*:')
    return f"{text}\n{tail}".rstrip()


def _attach(parser: argparse.ArgumentParser) -> None:
    """Tell shtab, through the attribute that it reads, by which function each parameter is completed."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, inner in action.choices.items():
                _attach(inner)
                if command == "files":
                    _complete(inner, "name", "packaged")
        elif not action.option_strings and (function := _OF_PARAMETER.get(action.dest)):
            _complete(parser, action.dest, function)
        elif action.type is Path:
            action.complete = "directory" if action.dest in ("out", "roots") else "file"  # type: ignore[attr-defined]


def _complete(parser: argparse.ArgumentParser, dest: str, function: str) -> None:
    action = next(a for a in parser._actions if a.dest == dest)
    name = f"_orhpc_{function}"
    action.complete = {"bash": name, "zsh": name, "fish": f"({name})"}  # type: ignore[attr-defined]


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every setting, by its dotted name, with its values if they are few; not those of environments."""
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            yield from _settings(inner, f"{prefix}{name}.")
        elif f"{prefix}{name}" != "environments":
            yield f"{prefix}{name}", _values(field.annotation)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field always or sometimes holds."""
    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _values(annotation: Any) -> list[str]:
    """The words that a setting of this type can have; empty if they cannot be listed."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return [str(value) for value in arguments]
    if origin is typing.Annotated:
        return _values(arguments[0])
    if origin in (typing.Union, types.UnionType):
        several = [_values(one) for one in arguments]
        return [value for values in several for value in values] if all(several) else []
    return []
