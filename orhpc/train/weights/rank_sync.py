"""A trainer rank's side of weight sync: plan the buckets, gather each, and send it or return its handle."""

from __future__ import annotations

import socket

import torch

from orhpc.config.engine import SYNC_BUCKETS
from orhpc.errors import WeightSyncFailed
from orhpc.train.weights.buckets import BucketSpec, buckets_of, for_wire
from orhpc.train.weights.fp8 import Quantize
from orhpc.train.weights.sender import BucketStage, WeightSender
from orhpc.train.weights.source import WeightSource


class RankSync:
    """Used through :class:`orhpc.train.actor.TrainerRank`, whose methods describe the calls."""

    def __init__(
        self, source: WeightSource, quantize: Quantize, bucket_bytes: int, device: torch.device, rank: int
    ) -> None:
        """``bucket_bytes``: size limit of a bucket before quantization."""
        self._source = source
        self._quantize = quantize
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._rank = rank
        self._buckets: list[BucketSpec] | None = None
        self._stage: BucketStage | None = None
        self._sender: WeightSender | None = None

    def buckets(self) -> list[BucketSpec]:
        """Return all buckets as sent."""
        if self._buckets is None:
            planned = buckets_of(self._source, self._bucket_bytes)
            self._buckets = [for_wire(spec, self._quantize) for spec in planned]
        return self._buckets

    def join_group(
        self,
        address: str,
        port: int,
        world_size: int,
        group_name: str,
        timeout_s: float,
        listener: socket.socket | None,
    ) -> None:
        """``listener``: a socket already bound to ``address:port``; null: bind one."""
        self.leave_group()
        if self._rank == 0:
            self._sender = WeightSender(
                device=self._device,
                address=address,
                port=port,
                world_size=world_size,
                group_name=group_name,
                timeout_s=timeout_s,
                listener=listener,
            )

    def stage(self, index: int, *, handle: bool, broadcast: bool) -> str | None:
        """Gather one bucket into its slot; see :meth:`orhpc.train.actor.TrainerRank.stage_bucket`."""
        specs = self.buckets()
        if self._stage is None:
            self._stage = BucketStage(self._device, specs, self._quantize)
        tensors = self._source.export(specs[index].parameters)
        try:
            if self._sender is not None:
                self._sender.wait(index)
            flat = self._stage.fill(index, tensors)
            if broadcast and self._rank == 0:
                if self._sender is None:
                    raise WeightSyncFailed("weights sent before the weight-sync group was joined")
                self._sender.send(index, flat)
        finally:
            # Finish the gathering of the other ranks even if a broadcast failed here.
            for _ in tensors:
                pass
        return self._stage.handle(index) if handle else None

    def finish(self) -> float:
        """Wait for pending sends and free the slots; return the seconds spent gathering."""
        stage = self._stage
        seconds = stage.seconds if stage is not None else 0.0
        try:
            if self._sender is not None:
                for slot in range(SYNC_BUCKETS):
                    self._sender.wait(slot)
        finally:
            if stage is not None:
                stage.clear()
        return seconds

    def leave_group(self) -> None:
        """Leave the engines' group; safe to call again."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
