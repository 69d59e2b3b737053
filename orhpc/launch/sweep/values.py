"""From ``key=a,b`` on the command line to the values of each element of a sweep, and their names."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence

from orhpc.config.safe_yaml import read_yaml
from orhpc.errors import ConfigError

Values = dict[str, str]
"""The settings in which the elements differ, and one element's values as YAML."""
MOST_ELEMENTS = 1000
"""SLURM's own default for the largest array (MaxArraySize)."""
_LONGEST_NAME = 80
_OPEN, _CLOSED = "[{(", ")}]"
_RESERVED = ("run.name", "run.root")


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the overrides with one value from those with several.

    Returns:
        The overrides with one value, as they are; and by key the values of the others.

    Raises:
        ConfigError: a value is empty, appears twice or has no end; a key appears twice; or the run's name or
            root, which a sweep chooses for its elements, has several values.
    """
    fixed: list[str] = []
    varied: dict[str, list[str]] = {}
    seen: set[str] = set()
    for override in overrides:
        key, _, text = override.partition("=")
        values = split_values(text, key)
        if key in seen:
            raise ConfigError(f"{key}: given twice; write all its values after one '='")
        seen.add(key)
        if len(values) == 1:
            fixed.append(override)
            continue
        if key in _RESERVED:
            raise ConfigError(f"{key}: each element of a sweep gets its own; give it one value")
        read = [read_yaml(value, f"override {key}", or_text=True) for value in values]
        if twice := [value for i, value in enumerate(values) if read[i] in read[:i]]:
            raise ConfigError(f"{key}: the value {twice[0]} appears twice")
        varied[key] = values
    return fixed, varied


def split_values(text: str, key: str) -> list[str]:
    """Split at commas that are neither inside quotes nor inside brackets.

    ``1e-6,1e-5`` are two values; ``[a,b]`` is one, a list; ``[a],[b]`` are two lists; ``"a,b"`` is one text.

    Raises:
        ConfigError: a value is empty, or a quote or a bracket is not closed.
    """
    values, begin, depth, quote = [], 0, 0, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'" and not text[begin:i].strip(" [{(,:"):
            quote = char  # a quote inside a word is a letter, as in YAML
        elif char in "\"'" and depth:
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSED:
            depth = max(0, depth - 1)
        elif char == "," and not depth:
            values.append(text[begin:i].strip())
            begin = i + 1
    values.append(text[begin:].strip())
    if quote or depth:
        raise ConfigError(f"override {key}: a {'quote' if quote else 'bracket'} is not closed")
    if len(values) > 1 and not all(values):
        raise ConfigError(f"override {key}: an empty value between two commas; write null or '' to mean it")
    return values


def combine(
    varied: Mapping[str, Sequence[str]], *, zipped: bool = False, number: int | None = None, seed: int = 0
) -> list[Values]:
    """Return the values of every element.

    Args:
        varied: by key, its values.
        zipped: pair the first values, the second values and so on, instead of all with all.
        number: choose this many different elements at random; null: all.
        seed: of that choice.

    Raises:
        ConfigError: nothing varies, the lists to be paired differ in length, or there are too many elements
            or fewer than ``number``.
    """
    if not varied:
        raise ConfigError("no setting has several values: write key=a,b (for one run: orhpc launch)")
    lengths = {key: len(values) for key, values in varied.items()}
    if zipped and len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise ConfigError(f"--zip: all settings need the same number of values; {counts}")
    total = next(iter(lengths.values())) if zipped else math.prod(lengths.values())
    if number is not None and not 1 <= number <= total:
        raise ConfigError(f"--random: {number} is not between 1 and the {total} combinations that there are")
    if (chosen := total if number is None else number) > MOST_ELEMENTS:
        raise ConfigError(f"{chosen} elements are more than {MOST_ELEMENTS}; --random N chooses some of them")
    if zipped:
        rows = list(zip(*varied.values(), strict=True))
    elif number is None:
        rows = list(itertools.product(*varied.values()))
    else:
        rows = []
    positions = range(total) if number is None else _choose(total, number, seed)
    picked = (rows[i] if rows else _row(list(varied.values()), i) for i in positions)
    return [dict(zip(varied, row, strict=True)) for row in picked]


def _choose(total: int, number: int, seed: int) -> list[int]:
    """Different positions in order; random.sample takes no range of more than 2^63."""
    generator, chosen = random.Random(seed), set[int]()
    while len(chosen) < number:
        chosen.add(generator.randrange(total))
    return sorted(chosen)


def _row(lists: Sequence[Sequence[str]], position: int) -> tuple[str, ...]:
    """The row at a position of the lists' product, without making the product."""
    row: list[str] = []
    for values in reversed(lists):
        position, index = divmod(position, len(values))
        row.append(values[index])
    return tuple(reversed(row))


def name_of(values: Values, taken: Collection[str]) -> str:
    """Return a run name that says the values: ``lr-1e-6_seed-0``.

    ``taken``: names of other elements; if one of them is equal, this one gets a digest of its values.
    """
    last = [key.rpartition(".")[2] for key in values]
    keys = [short if last.count(short) == 1 else key for key, short in zip(values, last, strict=True)]
    name = "_".join(
        f"{_plain(key)}-{_plain(value)}" for key, value in zip(keys, values.values(), strict=True)
    )
    name = name if name[:1].isalnum() else f"x{name}"
    digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}-{digest}"
    return f"{name}-{digest}" if name in taken else name


def _plain(text: str) -> str:
    """A text with only the characters that a run name may have; a path becomes its last part."""
    short = text.strip("\"'").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-.") or "x"
