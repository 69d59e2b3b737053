"""Packages that a command needs in addition to those of ``pip install orhpc``."""

from __future__ import annotations

import importlib.util
import sys

from orhpc.errors import PreflightError


def need(*modules: str, extra: str = "run") -> None:
    """Raise PreflightError, with the command that installs them, if modules cannot be imported here."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise PreflightError(
            f"{', '.join(missing)}: not installed for {sys.executable}; pip install 'orhpc[{extra}]'"
        )
