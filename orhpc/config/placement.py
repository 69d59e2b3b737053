"""The ``placement`` section: which devices train and which generate."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orhpc.config.base import Machines, Positive, Section


class PlacementSettings(Section):
    """Nodes, and which devices train and generate. A device is a GPU, or a process with ``device: cpu``."""

    device: Literal["cuda", "cpu"] = "cuda"
    """``cuda`` or ``cpu``; it is never detected."""
    mode: Literal["colocated", "split", "mixed"] = "colocated"
    """``colocated``: engines and trainers share every device and use it alternately. ``split``: they have
    separate devices. ``mixed``: trainers have the first devices and engines the last, and where the two
    overlap they use the devices alternately."""
    nodes: Machines = 1
    """Number of nodes."""
    devices_per_node: Machines = 4
    """Devices (GPUs) per node."""
    device_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of one GPU (GiB): 79.6 for an H100, 139.8 for an H200. Null: detected on the nodes, and on a
    login node from SLURM's GRES type."""
    host_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Host memory per node (GiB) available for offloaded trainer state. Null: detected on the nodes from the
    system or the job's limit."""
    offload: Literal["auto", "always"] = "auto"
    """When trainers on shared GPUs move weights and optimizer state to host memory while engines serve.
    ``auto``: if they do not fit on the GPU together with the engines, whose memory is measured in every step.
    ``always``: in every step."""
    trainer_devices: Positive | None = None
    """Devices for training, over all nodes; only with ``split`` and ``mixed``. Null (``split`` only): those
    that engines do not use."""
    engine_devices: Positive | None = None
    """Devices for engines, over all nodes; only with ``split`` and ``mixed``. Null (``split`` only): those
    that trainers do not use."""

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def trainer_ranks(self) -> int:
        if self.mode == "colocated":
            return self.devices
        return self.trainer_devices or self.devices - (self.engine_devices or 0)

    @property
    def rollout_devices(self) -> int:
        if self.mode == "mixed":
            return self.engine_devices or 0
        return self.devices if self.mode == "colocated" else self.devices - self.trainer_ranks

    @property
    def shared_devices(self) -> int:
        """Number of devices that engines and trainers use alternately."""
        return self.trainer_ranks + self.rollout_devices - self.devices

    @property
    def engine_sizes(self) -> list[int]:
        """Devices of an engine into which those for engines can be divided: inside a node, or whole nodes.

        No engine may be only partly on devices that trainers use too.
        """
        per_node, dedicated = self.devices_per_node, self.devices - self.rollout_devices
        return [
            size
            for size in range(1, self.rollout_devices + 1)
            if self.rollout_devices % size == 0
            and self.shared_devices % size == 0
            and (per_node % size == 0 if size < per_node else size % per_node + dedicated % per_node == 0)
        ]

    @model_validator(mode="after")
    def _devices_add_up(self) -> Self:
        if self.mode == "colocated":
            if self.trainer_devices or self.engine_devices:
                raise ValueError("trainer_devices and engine_devices need mode: split or mixed")
            return self
        if self.mode == "mixed":
            self._check_mixed()
            return self
        if not (self.trainer_devices or self.engine_devices):
            raise ValueError("mode: split needs trainer_devices or engine_devices")
        wanted = (self.trainer_devices or 0) + (self.engine_devices or 0)
        both = self.trainer_devices is not None and self.engine_devices is not None
        if wanted > self.devices or (both and wanted != self.devices):
            raise ValueError(f"trainer and engine devices add up to {wanted}, not {self.devices}")
        if not both and wanted == self.devices:
            raise ValueError(f"no device is left for the {'engines' if self.trainer_devices else 'trainers'}")
        return self

    def _check_mixed(self) -> None:
        trainer, engine = self.trainer_devices, self.engine_devices
        if trainer is None or engine is None:
            raise ValueError("mode: mixed needs trainer_devices and engine_devices")
        if max(trainer, engine) > self.devices:
            raise ValueError(f"there are {self.devices} devices, not {max(trainer, engine)}")
        if trainer + engine <= self.devices:
            raise ValueError(
                f"mode: mixed shares devices, but {trainer} + {engine} are {self.devices} or fewer: "
                "that is mode: split"
            )
