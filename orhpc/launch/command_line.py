"""The command line of the launcher, the batch script and the checks: ``[CONFIG] [key=value ...]``.

It may also contain ``--sglang-...`` and ``--check-weights``.
"""

from __future__ import annotations

from collections.abc import Sequence

from orhpc.errors import ConfigError

DEFAULT_CONFIG = "configs/default.yaml"
_ENGINE_FLAG = "--sglang-"
_CHECK_FLAG = "--check-weights"


def without_flags(arguments: Sequence[str]) -> list[str]:
    """Replace ``--sglang-NAME [VALUE]`` and ``--check-weights`` by the equivalent overrides.

    A value is one argument in YAML (``--sglang-cuda-graph-bs-decode=[1,8]``); without a value it is true.
    """
    result: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument == _CHECK_FLAG:
            result.append("engine.check_weights=true")
        elif argument.startswith(_ENGINE_FLAG):
            name, given, value = argument.removeprefix(_ENGINE_FLAG).partition("=")
            if not given:
                value = left.pop(0) if left and _is_value(left[0]) else "true"
            result.append(f"engine.extra.{name.replace('-', '_')}={value}")
        else:
            result.append(argument)
    return result


def _is_value(argument: str) -> bool:
    return not argument.startswith("--") and "=" not in argument and not argument.endswith((".yaml", ".yml"))


def split_command_line(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split arguments into the config's path and the overrides.

    Raises:
        ConfigError: more than one config file.
    """
    arguments = without_flags(arguments)
    files = [a for a in arguments if "=" not in a]
    if len(files) > 1:
        raise ConfigError(f"one config file at a time, not {' and '.join(files)}")
    return files[0] if files else DEFAULT_CONFIG, [a for a in arguments if "=" in a]
