"""YAML of a config or an override, read within bounds: no alias can make it larger than it looks."""

from __future__ import annotations

import re
from typing import IO, Any

import yaml

from orhpc.errors import ConfigError

MOST_BYTES = 4 << 20
"""Of one file."""
MOST_VALUES = 100_000
"""Keys and values of one file, aliases written out."""
DEEPEST = 50
"""Levels of one file."""
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Control characters and lone surrogates: no file name, address or prompt holds them."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error: the second silently won before."""


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        if not isinstance(key, str):
            raise ConfigError(f"{_place(key_node)}: key {key!r} is not text")
        if key in seen:
            raise ConfigError(f"{_place(key_node)}: {key!r} stands twice")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _place(node: yaml.Node) -> str:
    mark = node.start_mark
    return f"{mark.name}:{mark.line + 1}" if mark else "config"


def _int_or_time(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    """YAML 1.1 reads 4:00:00 as a number to base 60; here it stays the text that was written."""
    text = str(loader.construct_scalar(node))
    return text if ":" in text else loader.construct_yaml_int(node)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)
_Loader.add_constructor("tag:yaml.org,2002:int", _int_or_time)


def read_yaml(source: str | IO[str], where: str, *, or_text: bool = False) -> Any:
    """Parse YAML.

    Args:
        source: text, or an open file.
        where: what it is, for messages.
        or_text: text that is no YAML is returned as it is.

    Raises:
        ConfigError: it is no YAML, too large, nested too deeply, or holds control characters.
    """
    text = source if isinstance(source, str) else source.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{where}: more than {MOST_BYTES >> 20} MB")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except yaml.YAMLError as error:
        if or_text:
            value = text
        else:
            said = " ".join(str(error).replace("<unicode string>", where).split())
            raise ConfigError(f"{where}: not YAML: {said[:300]}") from None
    except (ValueError, OverflowError, LookupError) as error:  # a number or a date that is none
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())[:200]}") from None
    _check_size(value, where)
    return value


def _check_size(value: Any, where: str) -> None:
    """Raises ConfigError for more values or levels than a config has, or for text that is none."""
    level, count = [value], 0
    for _ in range(DEEPEST):
        count += len(level)
        if not level:
            return
        if count > MOST_VALUES:
            raise ConfigError(f"{where}: more than {MOST_VALUES} values, aliases written out")
        for text in level:
            if isinstance(text, str) and _NO_TEXT.search(text):
                raise ConfigError(f"{where}: a text holds control characters")
        level = [inner for node in level for inner in _inside(node)]
    raise ConfigError(f"{where}: nested deeper than {DEEPEST} levels")


def _inside(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    return list(node) if isinstance(node, list | tuple | set) else []
