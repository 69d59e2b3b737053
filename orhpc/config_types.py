"""Building blocks of the config's schema."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _safe_name(value: str) -> str:
    """Names become files and scheduler fields, so they cannot hold a separator or a line end."""
    if not NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: use letters, digits, '.', '_' and '-'")
    return value


Name = Annotated[str, AfterValidator(_safe_name)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
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
