"""Read the YAML of a config or an override, with limits on size and depth that also count aliases."""

from __future__ import annotations

import re
from typing import IO, Any

import yaml

from orhpc.errors import ConfigError

MOST_BYTES = 4 << 20
"""Maximum size of one file, in bytes."""
MOST_VALUES = 100_000
"""Maximum number of keys and values of one file, with aliases expanded."""
DEEPEST = 50
"""Maximum nesting depth of one file."""
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Control characters and lone surrogates, which no file name, address or prompt contains."""


class _Loader(yaml.SafeLoader):
    """Safe YAML loader for which a duplicate key is an error; PyYAML silently uses the last one."""


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        if not isinstance(key, str):
            raise ConfigError(f"{_place(key_node)}: key {key!r} is not text")
        if key in seen:
            raise ConfigError(f"{_place(key_node)}: {key!r} appears twice")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _place(node: yaml.Node) -> str:
    mark = node.start_mark
    return f"{mark.name}:{mark.line + 1}" if mark else "config"


def _int_or_time(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    """YAML 1.1 reads 4:00:00 as a base-60 number; return such a value as text."""
    text = str(loader.construct_scalar(node))
    return text if ":" in text else loader.construct_yaml_int(node)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)
_Loader.add_constructor("tag:yaml.org,2002:int", _int_or_time)


def read_yaml(source: str | IO[str], where: str, *, or_text: bool = False) -> Any:
    """Parse YAML.

    Args:
        source: text, or an open file.
        where: name of the source in messages.
        or_text: return text that is not YAML unchanged.

    Raises:
        ConfigError: it is not YAML, too large, nested too deeply, or contains control characters.
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
            reason = " ".join(str(error).replace("<unicode string>", where).split())
            raise ConfigError(f"{where}: not YAML: {reason[:300]}") from None
    except (ValueError, OverflowError, LookupError) as error:  # an invalid number or date
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())[:200]}") from None
    _check_size(value, where)
    return value


def _check_size(value: Any, where: str) -> None:
    """Raise ConfigError for too many values or levels, or for control characters in a text."""
    level, count = [value], 0
    for _ in range(DEEPEST):
        count += len(level)
        if not level:
            return
        if count > MOST_VALUES:
            raise ConfigError(f"{where}: more than {MOST_VALUES} values with aliases expanded")
        for text in level:
            if isinstance(text, str) and _NO_TEXT.search(text):
                raise ConfigError(f"{where}: a text contains control characters")
        level = [inner for node in level for inner in _inside(node)]
    raise ConfigError(f"{where}: nested deeper than {DEEPEST} levels")


def _inside(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    return list(node) if isinstance(node, list | tuple | set) else []
