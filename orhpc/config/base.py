"""Building blocks of the config's schema."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _safe_name(value: str) -> str:
    """Names become file names and scheduler fields, so they cannot contain a separator or a line end."""
    if not NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: use letters, digits, '.', '_' and '-'")
    return value


Name = Annotated[str, AfterValidator(_safe_name)]


def _reject_bool(value: object) -> object:
    """Raise ValueError for a boolean (``yes``, ``true``): pydantic would accept it as 1."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {value}")
    return value


Number = BeforeValidator(_reject_bool)
LARGEST = 2**53
"""Largest integer that is exact in float64, and therefore in JSON and YAML."""
Positive = Annotated[int, Number, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Number, Field(ge=0, le=LARGEST)]
Machines = Annotated[int, Number, Field(gt=0, le=4096)]
"""A count of nodes, devices or processes. Bounded, because lists of this length are built in memory."""
Spares = Annotated[int, Number, Field(ge=0, le=4096)]
"""A count of additional nodes, bounded as :data:`Machines`."""
Seconds = Annotated[float, Number, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def nearest(wanted: int, possible: Sequence[int]) -> str:
    """Return the possible numbers next to ``wanted``, the smaller one first, for a message: ``2 or 4``."""
    found = [max((n for n in possible if n <= wanted), default=None)]
    found.append(min((n for n in possible if n >= wanted), default=None))
    return " or ".join(str(n) for n in dict.fromkeys(found) if n is not None)


def one_of_or_function(value: str, names: Sequence[str]) -> str:
    """Return a setting that is one of ``names`` or ``package.module:function``; else raise ValueError."""
    module, colon, function = value.partition(":")
    if value not in names and not (module and colon and function):
        close = difflib.get_close_matches(value, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{value!r} is neither {', '.join(names)} nor package.module:function{hint}")
    return value


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys are errors, and docstrings describe fields."""

    model_config = ConfigDict(
        # No setting may be infinite or NaN.
        allow_inf_nan=False,
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
    )
