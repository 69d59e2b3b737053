"""Turn the flags of a command line into ``section.key=value`` arguments."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orhpc.config.files import default_setting
from orhpc.config.flags.flag import Flag, Given, Kind
from orhpc.config.flags.table import FLAGS
from orhpc.config.safe_yaml import read_yaml
from orhpc.errors import ConfigError

ENGINE_FLAG = "--sglang-"
"""Options of SGLang that are not in the table go to ``engine.extra``, as in slime."""
FILE_FLAG = "--config"
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


def take(
    arguments: Sequence[str], own: Mapping[str, bool] | None = None
) -> tuple[list[str], dict[str, str | list[str] | bool]]:
    """Separate the flags of the table from the rest of a command line.

    A repeated flag counts once, with its last value, as in argparse.  ``--config FILE`` becomes ``FILE``;
    ``--sglang-NAME`` becomes ``engine.extra.NAME=...``; ``--`` is dropped, since what follows it in
    OpenReward's ``run.sh`` are flags too.

    Args:
        arguments: of a command.
        own: the command's own options, which stay, and whether each has a value.

    Returns:
        The arguments that stay, and the flags by name with their values.

    Raises:
        ConfigError: a flag is unknown, or has no value, or one that it does not take.
    """
    own = own or {}
    rest: list[str] = []
    flags: dict[str, str | list[str] | bool] = {}
    left = [argument for argument in arguments if argument != "--"]
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            rest.append(argument)
            if own.get(argument) and left:  # -o FILE, which is no config
                rest[-1] += left.pop(0)
        elif name in own:
            rest.append(f"{name}={_one(name, value if equals else None, left)}" if own[name] else argument)
        elif name in FLAGS:
            flags[name] = _value(FLAGS[name], value if equals else None, left)
        elif name == FILE_FLAG:
            rest.append(_one(name, value if equals else None, left))
        elif name.startswith(ENGINE_FLAG):
            rest.append(engine_option(argument, left))
        else:
            close = difflib.get_close_matches(name, [*FLAGS, *own, FILE_FLAG], n=1)
            raise ConfigError(f"{name}: unknown flag" + (f"; did you mean {close[0]}?" if close else ""))
    return rest, flags


def engine_option(argument: str, left: list[str]) -> str:
    """Return ``--sglang-NAME[=VALUE]`` as ``engine.extra.NAME=VALUE``; takes the value from ``left``, if any.

    A value is one argument in YAML (``--sglang-cuda-graph-bs-decode=[1,8]``); without a value it is true.
    """
    name, equals, value = argument.removeprefix(ENGINE_FLAG).partition("=")
    if not equals:
        value = left.pop(0) if left and _may_be_value(left[0]) else "true"
    return f"engine.extra.{name.replace('-', '_')}={value}"


def _value(flag: Flag, given: str | None, left: list[str]) -> str | list[str] | bool:
    if flag.arity == "none":
        if given is not None and given.lower() not in _SWITCH:
            raise ConfigError(f"{flag.name}={given[:100]}: it takes no value, or true or false")
        return True if given is None else _SWITCH[given.lower()]
    if flag.arity == "one":
        return _one(flag.name, given, left)
    values = [given] if given is not None else []
    while given is None and left and _may_be_value(left[0]):
        values.append(left.pop(0))
    if not values:
        raise ConfigError(f"{flag.name}: a value is missing")
    return values


def _one(name: str, given: str | None, left: list[str]) -> str:
    if given is None and left and not left[0].startswith("--"):
        given = left.pop(0)
    if not given:
        raise ConfigError(f"{name}: a value is missing")
    return given


def _may_be_value(argument: str) -> bool:
    """Whether an argument can be a value of a flag, where the number of values is not known."""
    return not argument.startswith("--") and "=" not in argument and not argument.endswith((".yaml", ".yml"))


def settings_of(
    flags: Mapping[str, str | list[str] | bool],
    overrides: Iterable[str],
    current: Callable[[str], Any],
) -> tuple[list[str], list[str]]:
    """Convert flags.

    Args:
        flags: from :func:`take`.
        overrides: the ``section.key=value`` arguments of the same command line.
        current: returns a setting of the config file with these overrides, or its default.

    Returns:
        Overrides, and lines for the user: which flags have no effect, and what follows from a flag.

    Raises:
        ConfigError: a flag is refused, a value does not fit, or flags and overrides contradict each other.
    """
    _refuse(flags)
    written = dict(override.split("=", 1) for override in overrides if "=" in override)
    given = Given(flags, current, written)
    found: dict[str, tuple[str, Any]] = {}
    done: set[Any] = set()
    for name in flags:
        convert = FLAGS[name].convert
        if convert is None or convert in done:
            continue
        done.add(convert)
        for setting, value in convert(given).items():
            _add(found, setting, name, value)
    notes = _notes(flags)
    load, save = given.text("--load"), given.text("--save")
    if load and Path(load) != Path(save or "") and not Path(load).exists():
        notes.append(f"--load {load}: no such folder, so the weights are those of the model")
    if (parallel := _implied_backend(found, current)) is not None:
        found["train.backend"] = parallel, "megatron"
        notes.append(f"train.backend=megatron, because of {parallel}")
    for setting, (name, value) in found.items():
        if setting in written and not _says(written[setting], value):
            raise ConfigError(f"{name} and {setting}={written[setting]} contradict each other")
    return [f"{setting}={_written(value)}" for setting, (_, value) in found.items()], notes


def _refuse(flags: Iterable[str]) -> None:
    names = [name for name in flags if FLAGS[name].kind is Kind.REFUSED]
    if names:
        also = f" (also refused: {', '.join(names[1:])})" if names[1:] else ""
        raise ConfigError(f"{names[0]} is not there: {FLAGS[names[0]].note}{also}")


def _add(found: dict[str, tuple[str, Any]], setting: str, name: str, value: Any) -> None:
    if setting in found and found[setting][1] != value:
        other, before = found[setting]
        raise ConfigError(f"{other} and {name} contradict each other: {setting} {before} and {value}")
    found.setdefault(setting, (name, value))


def _implied_backend(found: Mapping[str, tuple[str, Any]], current: Callable[[str], Any]) -> str | None:
    """The flag that needs ``train.backend: megatron``, if nothing else says so; None: none does."""
    needed = [
        (setting, name)
        for setting, (name, value) in found.items()
        if setting.startswith("megatron.") and value != default_setting(setting)
    ]
    backend = found.get("train.backend")
    if not needed or (backend is None and current("train.backend") == "megatron"):
        return None
    if backend is not None:
        if backend[1] != "megatron":
            raise ConfigError(f"{needed[0][1]} needs --train-backend megatron")
        return None
    return needed[0][1]


def _notes(flags: Iterable[str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name in flags:
        flag = FLAGS[name]
        if flag.kind is Kind.NO_EFFECT and flag.convert is None:
            reasons.setdefault(flag.note, []).append(name)
    return [f"without effect: {', '.join(names)}. {why.replace('`', '')}" for why, names in reasons.items()]


def _says(text: str, value: Any) -> bool:
    """Whether an override's text is this value; YAML reads 1e-5 as text, the schema as a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return read_yaml(text, "override", or_text=True) == value


def _written(value: Any) -> str:
    """A value as YAML on one line; text as it is where YAML reads it back as the same text."""
    if isinstance(value, str):
        return value if _says(value, value) else json.dumps(value)
    return json.dumps(value)
