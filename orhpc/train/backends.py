"""Select the backend that ``train.backend`` names."""

from __future__ import annotations

from orhpc.config import Config
from orhpc.train.backend import Backend
from orhpc.train.weights.fp8 import choose_scales


def make_backend(config: Config, model_dir: str, rank: int, world_size: int) -> Backend:
    """Return one rank of the backend that ``train.backend`` names; only its libraries are imported."""
    if config.train.backend == "megatron":
        choose_scales(power_of_two=config.engine.power_of_two_scales)
        from orhpc.train.megatron.backend import MegatronBackend

        return MegatronBackend(config, model_dir, rank, world_size)
    from orhpc.train.fsdp.backend import FsdpBackend

    return FsdpBackend(config, model_dir, rank, world_size)
