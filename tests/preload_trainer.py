"""Imported once by the server of :mod:`tests.preloaded`."""

import tests.trainer_kit  # noqa: F401
from tests.frozen import freeze_libraries

freeze_libraries()
