"""The critic of one FSDP rank: its model, sharded like the policy's, and its own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from orhpc.train.backend import CRITIC, Batches, Shard, StopCheck, TrainingBatch
from orhpc.train.fsdp.gather_once import GatherOnce
from orhpc.train.fsdp.load import ModelLoader, rows_of
from orhpc.train.fsdp.model import DeviceBatch
from orhpc.train.fsdp.optim import Optimizer
from orhpc.train.loss.critic import packed_value_loss
from orhpc.train.loss.grpo import MetricSums

if TYPE_CHECKING:
    from orhpc.config import Config


class FsdpCritic:
    """Computes its part of the methods of :class:`orhpc.train.fsdp.backend.FsdpBackend`."""

    def __init__(self, config: Config, loader: ModelLoader) -> None:
        """Load the model (collective)."""
        self._clip = config.algorithm.critic.value_clip
        self._gathers_once = config.train.gather_once is True
        self._world_size = loader.world_size
        self._device = loader.device
        self.model, self._shapes = loader.load_critic()
        named = self.model.named()
        self.optimizer = Optimizer(dict(named), config.critic_optimizer)
        # Recorded now, because a step that failed midway may leave parameters gathered.
        self._starts = {
            name: rows_of(p, self._shapes[name], loader.rank, loader.world_size)[0] for name, p in named
        }

    def accumulate(self, batches: Batches[TrainingBatch], *, n_tokens: int, between: StopCheck) -> MetricSums:
        """Add the gradients of all micro-batches; without any after a failure."""
        metrics = MetricSums()
        try:
            with GatherOnce(self.model, len(batches), enabled=self._gathers_once) as gather:
                for training in batches:
                    between()
                    with gather.micro_batch():
                        metrics.add(self._accumulate(training, n_tokens))
        except BaseException:
            self.optimizer.clear()
            raise
        return metrics

    def _accumulate(self, training: TrainingBatch, n_tokens: int) -> MetricSums:
        assert training.estimates is not None, "values come first"
        batch, estimates = DeviceBatch.of(training.batch, self._device), training.estimates
        loss, metrics = packed_value_loss(
            self.model(batch),
            estimates.values_P,
            estimates.returns_P,
            batch.mask_P,
            clip=self._clip,
            n_tokens=n_tokens,
        )
        # The loss is normalized over all ranks, but FSDP averages gradients: undo the average.
        (loss * self._world_size).backward()
        return metrics

    def shards(self, place: Callable[[Tensor], Tensor]) -> list[Shard]:
        """See :meth:`orhpc.train.backend.Backend._shards`."""
        return [
            Shard(f"{CRITIC}{kind}/{name}", place(tensor), self._shapes[name], start)
            for name, start in self._starts.items()
            for kind, tensor in self.optimizer.local_state(name).items()
        ]
