"""The command line that launcher, batch script and checks share: ``[CONFIG] [key=value ...]``.

``--sglang-...`` and ``--check-weights`` may stand among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from orhpc.errors import ConfigError

DEFAULT_CONFIG = "configs/default.yaml"
_ENGINE_FLAG = "--sglang-"
_CHECK_FLAG = "--check-weights"


def without_flags(words: Sequence[str]) -> list[str]:
    """Turn ``--sglang-NAME [VALUE]`` and ``--check-weights`` into the overrides that they stand for.

    A value is one word, as YAML (``--sglang-cuda-graph-bs-decode=[1,8]``); without one the option is on.
    """
    result: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == _CHECK_FLAG:
            result.append("engine.check_weights=true")
        elif word.startswith(_ENGINE_FLAG):
            name, given, value = word.removeprefix(_ENGINE_FLAG).partition("=")
            if not given:
                value = left.pop(0) if left and _is_value(left[0]) else "true"
            result.append(f"engine.extra.{name.replace('-', '_')}={value}")
        else:
            result.append(word)
    return result


def _is_value(word: str) -> bool:
    return not word.startswith("--") and "=" not in word and not word.endswith((".yaml", ".yml"))


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """From words to the config's path and the overrides.

    Raises:
        ConfigError: more than one config file.
    """
    words = without_flags(words)
    files = [w for w in words if "=" not in w]
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, not {' and '.join(files)}")
    return files[0] if files else DEFAULT_CONFIG, [w for w in words if "=" in w]
