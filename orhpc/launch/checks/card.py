"""Which GPU the job's devices are, as far as can be known before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from orhpc.config import Config
from orhpc.launch.checks.fit import KNOWN_DEVICES, gres_type
from orhpc.plan.speeds import CARDS
from orhpc.process.driver_gpus import driver_gpus

_CLOSE = 0.03
"""Share by which a given memory may differ from a card's."""


@dataclass(frozen=True, slots=True)
class FoundCard:
    """A GPU's name, in lower case, and how it was found."""

    name: str | None
    source: str


def card_of(config: Config, device_gib: float, *, given: bool) -> FoundCard:
    """Return the card of a config's devices.

    Args:
        config: of the run.
        device_gib: memory of a device.
        given: whether the user named that memory, so that it decides and not the GPUs of this machine.
    """
    if not given and config.placement.device_memory_gib is None:
        if (name := _driver_name()) is not None:
            return FoundCard(_kind(name) or name.lower(), "nvidia-smi")
        if (kind := gres_type(config.slurm.partition)) is not None:
            return FoundCard(kind, "SLURM's GRES type")
    for name in CARDS:
        if abs(device_gib / KNOWN_DEVICES[name] - 1) < _CLOSE:
            return FoundCard(name, f"by its {device_gib:g} GiB; else --card")
    return FoundCard(None, "")


def _kind(name: str) -> str | None:
    """The type in :data:`KNOWN_DEVICES` of a GPU that a driver names; None if there is none."""
    return max((kind for kind in KNOWN_DEVICES if kind in name.lower()), key=len, default=None)


def _driver_name() -> str | None:
    """Name of this machine's GPUs, from their driver; None without a GPU, or with different ones."""
    names = {gpu.name for gpu in driver_gpus()}
    return names.pop() if len(names) == 1 else None
