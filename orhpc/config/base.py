"""Building blocks of the config's schema."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _safe_name(value: str) -> str:
    """Names become files and scheduler fields, so they cannot hold a separator or a line end."""
    if not NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: use letters, digits, '.', '_' and '-'")
    return value


Name = Annotated[str, AfterValidator(_safe_name)]


def _no_truth(value: object) -> object:
    """YAML's yes and true are no numbers; raises ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"a number is needed, not {value}")
    return value


Number = BeforeValidator(_no_truth)
LARGEST = 2**53
"""Whole numbers up to here are exact everywhere."""
Positive = Annotated[int, Number, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Number, Field(ge=0, le=LARGEST)]
Machines = Annotated[int, Number, Field(gt=0, le=4096)]
"""A count of nodes, devices or processes: all of them are listed in memory."""
Seconds = Annotated[float, Number, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error; the docstring under a field is its description."""

    model_config = ConfigDict(
        # Infinity and NaN are in no setting's range.
        allow_inf_nan=False,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
