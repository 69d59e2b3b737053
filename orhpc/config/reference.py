"""Generate ``configs/base.yaml`` from the schema: every setting with its default and description.

python -m orhpc.config.reference > configs/base.yaml
"""

from __future__ import annotations

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
            parts.append(
                "\n" + "".join(f"{line}\n" for line in _setting(name, default, field.description, 0))
            )
    return "".join(parts)


def _lines(section: type[BaseModel], indent: int) -> Iterator[str]:
    for name, field in section.model_fields.items():
        default = default_of(field)
        if isinstance(default, BaseModel):
            about = _one_paragraph(field.description or type(default).__doc__)
            yield f"{' ' * indent}{name}:  # {about}"
            yield from _lines(type(default), indent + 2)
        else:
            yield from _setting(name, default, field.description, indent)


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


def default_of(field: Any) -> Any:
    """The default of a pydantic field; None for a field without one."""
    default = field.get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def _one_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


if __name__ == "__main__":
    sys.stdout.write(reference())
