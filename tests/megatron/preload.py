"""Imported once by the server of :mod:`tests.preloaded`; prepares its process for megatron-core."""

from tests.megatron import shim

shim.install()

import tests.megatron.kit  # noqa: E402, F401
