"""Generate ``configs/base.yaml`` from the schema: every setting with its default and description.

python -m orhpc.config.reference > configs/base.yaml
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from orhpc.config import Config, EnvironmentSettings

_WIDTH = 108
_HEAD = """\
# Every setting with its default and description. This file is generated from the schema; do not edit it, run
# `python -m orhpc.config.reference > configs/base.yaml`. Other configs start with `extends: base.yaml` and
# set only what differs.
"""
_ENVIRONMENTS = """
environments: {}  # Environments by name; at least one is required. Each has these settings:
"""


def reference() -> str:
    """Return the text of ``configs/base.yaml``."""
    parts = [_HEAD]
    about = descriptions(Config)
    for name, field in Config.model_fields.items():
        default = default_of(field)
        if name == "environments":
            example = "".join(
                f"#{line}\n" for line in ["  Organisation/Name:", *_lines(EnvironmentSettings, 4)]
            )
            parts.append(_ENVIRONMENTS + example)
        elif isinstance(default, BaseModel):
            parts.append(f"\n{name}:  # {_one_paragraph(type(default).__doc__)}\n")
            parts.append("".join(f"{line}\n" for line in _lines(type(default), 2)))
        else:
            parts.append("\n" + "".join(f"{line}\n" for line in _setting(name, default, about.get(name), 0)))
    return "".join(parts)


def _lines(section: type[BaseModel], indent: int) -> Iterator[str]:
    about = descriptions(section)
    for name, field in section.model_fields.items():
        default = default_of(field)
        if isinstance(default, BaseModel):
            yield f"{' ' * indent}{name}:  # {_one_paragraph(about.get(name) or type(default).__doc__)}"
            yield from _lines(type(default), indent + 2)
        else:
            yield from _setting(name, default, about.get(name), indent)


def _setting(name: str, default: Any, about: str | None, indent: int) -> Iterator[str]:
    prefix = " " * indent + "# "
    if about is not None:
        for paragraph in about.split("\n\n"):
            yield from textwrap.wrap(
                " ".join(paragraph.split()), _WIDTH, initial_indent=prefix, subsequent_indent=prefix,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    yield f"{' ' * indent}{name}: {_value(default)}"


def _value(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return text.removesuffix("\n...").strip()


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a section's fields, by field.

    pydantic can read them as well (``use_attribute_docstrings``), but does so whenever a class is made: it
    took a fifth of the import of the config in each of a run's processes.
    """
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            found |= _docstrings_of_fields(definition)
    return found


def _docstrings_of_fields(definition: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, text in itertools.pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                found[name] = inspect.cleandoc(about)
    return found


def default_of(field: Any) -> Any:
    """The default of a pydantic field; None for a field without one."""
    default = field.get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def _one_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


if __name__ == "__main__":
    sys.stdout.write(reference())
