"""What one flag of slime, miles or OpenReward's ``run.sh`` means here, and the flags of a command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from orhpc.config import Config
from orhpc.errors import ConfigError

Arity = Literal["none", "one", "many"]
"""How many values follow a flag: none (a switch), one, or one and more."""
Settings = Mapping[str, Any]
"""Settings by their names with dots; a value is plain YAML data."""


class Kind(Enum):
    """What a flag does here."""

    SETS = "sets settings"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Given:
    """The flags of a command line, by name, and the settings below them."""

    def __init__(
        self,
        values: Mapping[str, str | list[str] | bool],
        current: Callable[[str], Any],
        overridden: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        values: text of a flag with one value, texts of one with several, true or false for a switch.
        current: returns a setting of the config file, or its default.
        overridden: the ``section.key=value`` arguments, by setting.
        """
        self.values = values
        self.current = current
        self.overridden = overridden or {}

    def on(self, name: str) -> bool:
        """Whether a switch is given, and not with ``=false``."""
        return bool(self.values.get(name, False))

    def text(self, *names: str) -> str | None:
        """The value of a flag, or of one of its synonyms; None if it is not given.

        Raises:
            ConfigError: synonyms have different values.
        """
        found = {name: str(self.values[name]) for name in names if name in self.values}
        if len(set(found.values())) > 1:
            shown = " and ".join(f"{name} {value}" for name, value in found.items())
            raise ConfigError(f"{shown} contradict each other")
        return next(iter(found.values()), None)

    def texts(self, name: str) -> list[str]:
        """The values of a flag with several; empty if it is not given."""
        value = self.values.get(name, [])
        return value if isinstance(value, list) else [str(value)]

    def integer(self, *names: str) -> int | None:
        """Like :meth:`text`, as an integer."""
        text = self.text(*names)
        return None if text is None else _number(self.name_of(*names), text, int, "an integer")

    def number(self, *names: str) -> float | None:
        """Like :meth:`text`, as a number."""
        text = self.text(*names)
        return None if text is None else _number(self.name_of(*names), text, float, "a number")

    def count(self, setting: str) -> int:
        """A setting below the flags that is a positive integer.

        Raises:
            ConfigError: it is none; the schema sees the config only after the flags are converted.
        """
        value = self.current(setting)
        try:
            found = 0 if isinstance(value, bool) else int(value)
        except (TypeError, ValueError, OverflowError):
            found = 0
        if found < 1:
            raise ConfigError(f"{setting}: {str(value)[:100]!r} is not a positive integer")
        return found

    def name_of(self, *names: str) -> str:
        """The synonym that is given; the first if none is."""
        return next((name for name in names if name in self.values), names[0])


def _number(name: str, text: str, kind: Callable[[str], Any], what: str) -> Any:
    try:
        value = kind(text)
        int(value)  # refuses infinity and NaN
    except (ValueError, OverflowError):
        raise ConfigError(f"{name}: {text[:100]!r} is not {what}") from None
    return value


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table."""

    name: str
    """With two hyphens."""
    kind: Kind
    arity: Arity
    settings: tuple[str, ...] = ()
    """The settings that it may set."""
    note: str = ""
    """How the value is converted; why the flag has no effect; or what to write instead of it."""
    convert: Callable[[Given], Settings] | None = field(default=None, compare=False)
    """Returns the settings of this flag, or of all flags that it belongs with; raises ConfigError.  Flags
    with the same function are converted together, once."""
    read: Callable[[Config], Any] | None = field(default=None, compare=False)
    """Returns the flag's value from a config, for functions written for slime; None: it is off."""

    @property
    def attribute(self) -> str:
        """The name of its value in slime's ``args``."""
        return self.name.removeprefix("--").replace("-", "_")

    def off(self) -> Any:
        """The value in ``args`` of a feature that orhpc does not have."""
        return False if self.arity == "none" else None


def _reader(setting: str, back: Mapping[Any, str] | None = None) -> Callable[[Config], Any]:
    def read(config: Config) -> Any:
        value: Any = config
        for key in setting.split("."):
            value = getattr(value, key)
        return back.get(value, value) if back and isinstance(value, str | bool) else value

    return read


def sets(
    name: str,
    setting: str,
    kind: Literal["integer", "number", "text"] | Mapping[str, str] | Mapping[str, bool],
    note: str = "",
) -> Flag:
    """A flag whose value is that of one setting; ``kind``: its type, or their words mapped to ours."""
    words = kind if isinstance(kind, Mapping) else None

    def convert(given: Given) -> Settings:
        if words is not None:
            text = given.text(name) or ""
            if text not in words:
                raise ConfigError(f"{name}: {text!r} is not one of {', '.join(words)}")
            return {setting: words[text]}
        if kind == "integer":
            return {setting: given.integer(name)}
        return {setting: given.number(name) if kind == "number" else given.text(name)}

    back = {ours: theirs for theirs, ours in reversed([*words.items()])} if words else None
    return Flag(name, Kind.SETS, "one", (setting,), note, convert, _reader(setting, back))


def switch(name: str, values: Settings, note: str = "") -> Flag:
    """A flag without a value that sets settings; with ``=false`` it sets nothing."""

    def convert(given: Given) -> Settings:
        return values if given.on(name) else {}

    def read(config: Config) -> bool:
        return all(_reader(setting)(config) == value for setting, value in values.items())

    return Flag(name, Kind.SETS, "none", tuple(values), note, convert, read)


def joint(
    name: str,
    settings: Sequence[str],
    convert: Callable[[Given], Settings],
    note: str,
    *,
    arity: Arity = "one",
    read: Callable[[Config], Any] | None = None,
) -> Flag:
    """A flag that is converted together with others, or into several settings."""
    return Flag(name, Kind.SETS, arity, tuple(settings), note, convert, read)


def no_effect(*names: str, why: str, arity: Arity = "one") -> tuple[Flag, ...]:
    """Flags that change nothing here, because it is so already or because there is nothing to change."""
    return tuple(Flag(name, Kind.NO_EFFECT, arity, note=why) for name in names)


def only(name: str, allowed: Sequence[str], why: str, instead: str) -> Flag:
    """A flag of which some values change nothing here, and the others are refused.

    Numbers are compared as numbers.  ``why`` explains the first, ``instead`` says what to do about others.
    """

    def convert(given: Given) -> Settings:
        text = given.text(name) or ""
        if not any(_same(text, value) for value in allowed):
            raise ConfigError(f"{name} {text[:100]}: {instead}")
        return {}

    note = f"Only {' or '.join(allowed)}: {why}. Else: {instead}."
    return Flag(name, Kind.NO_EFFECT, "one", note=note, convert=convert, read=lambda _: _plain(allowed[0]))


def _same(text: str, value: str) -> bool:
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value


def _plain(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def refused(*names: str, instead: str, arity: Arity = "one") -> tuple[Flag, ...]:
    """Flags of which orhpc has no equivalent; ``instead`` says what to write."""
    return tuple(Flag(name, Kind.REFUSED, arity, note=instead) for name in names)
