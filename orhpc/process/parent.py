"""Which process started a server, for servers that end with it.

A server that asks the kernel for its parent only once its modules are imported, which takes seconds, would
take whichever process inherited it for its parent if the real one has ended meanwhile, and stay for good.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLE = "ORHPC_SERVER_PARENT"


def naming_parent(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment in which this process is named as its parent."""
    return {**environment, _VARIABLE: str(os.getpid())}


def parent_of_server() -> int:
    """Process id of the process that started this server; if it is not named, of the present parent."""
    return int(os.environ.get(_VARIABLE) or os.getppid())
