"""The node's folder, in shared memory, of copies of the trainers' state.

The launcher of a node creates it and names it to all processes under Ray.  Its files outlive them.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ORHPC_STATE_FOLDER"
"""Environment variable with the folder's path."""


def state_folder() -> Path | None:
    """Return the folder; None outside of a run."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None
