"""Imported once by the server of :mod:`tests.preloaded`; prepares its process for megatron-core."""

from tests.megatron import shim

shim.install()

import tests.megatron.kit  # noqa: E402, F401
from tests.frozen import freeze_libraries, keep_frozen  # noqa: E402

freeze_libraries()
keep_frozen()  # megatron-core keeps the models and groups of earlier cases in any case
