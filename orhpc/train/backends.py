"""Select the backend that ``train.backend`` names."""

from __future__ import annotations

from orhpc.config import Config
from orhpc.train.backend import Backend
from orhpc.train.weights.fp8 import choose_scales


def backend_class(config: Config) -> type[Backend]:
    """Return the class of the backend that ``train.backend`` names; only its libraries are imported."""
    if config.train.backend == "megatron":
        choose_scales(power_of_two=config.engine.power_of_two_scales)
        from orhpc.train.megatron.backend import MegatronBackend

        return MegatronBackend
    from orhpc.train.fsdp.backend import FsdpBackend

    return FsdpBackend
