"""One rank of the trainer, as the driver holds it: a plain class that Ray makes an actor of.

Every method that says *collective* must be called on all ranks; the others concern one rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.config import Config
from orhpc.errors import CheckpointError, StopRequested, WeightSyncFailed
from orhpc.train.backend import Role, TrainingBatch, Update
from orhpc.train.batch import PackedBatch
from orhpc.train.checkpoint import BackgroundSave, CheckpointReader, Snapshot, rng_state, set_rng_state
from orhpc.train.export import FILE_BYTES, write_hf_folder
from orhpc.train.fetch import load_batch, prefetched
from orhpc.train.fsdp import FsdpBackend
from orhpc.train.groups import join_default_group, typed_failures
from orhpc.train.step_report import StepReport
from orhpc.train.weights import BUCKET_BYTES, BucketSpec, WeightSender, plan_buckets
from orhpc.types import MiniBatch


class TrainerRank:
    """One rank: its model, its optimiser state, its end of weight sync and of checkpoints.

    Call order: ``connect``, ``build``, ``restore``, then steps, saves and syncs.  One method at a
    time, but for :meth:`save_poll` and :meth:`request_stop`, which may be called at any time.
    """

    def __init__(self, config: Config, model_dir: str, rank: int, world_size: int, threads: int) -> None:
        self.config = config
        self.model_dir = model_dir
        self.rank = rank
        self.world_size = world_size
        self.threads = threads
        self.device = torch.device(config.placement.device)
        self.backend = FsdpBackend(config, model_dir, rank, world_size)
        self.load_batch: Callable[..., PackedBatch] = load_batch
        self._snapshot = Snapshot()
        self._save: BackgroundSave | None = None
        self._sender: WeightSender | None = None
        self._buckets: list[BucketSpec] | None = None
        self._stop = threading.Event()

    # --- starting -----------------------------------------------------------------------------

    def connect(self, address: str, port: int, timeout_s: float) -> None:
        """Join the ranks' process group (collective); rank 0 hosts its store on ``address:port``.

        ``timeout_s`` is also the deadline of every later collective.  Raises InfraError past it.
        """
        torch.set_num_threads(self.threads)
        join_default_group(self.device, address, port, self.rank, self.world_size, timeout_s)

    def build(self) -> dict[str, Any]:
        """Load the model (collective); return ``parameters``, ``seconds`` and ``world_size``."""
        started = time.perf_counter()
        torch.manual_seed(self.config.run.seed)
        with typed_failures("the model could not be built"):
            info = self.backend.build()
        return {**info, "world_size": self.world_size, "seconds": time.perf_counter() - started}

    def restore(self, folder: str | None) -> None:
        """Continue from a checkpoint that any number of ranks wrote; None: from the model folder.

        Raises CheckpointError for anything torn, corrupt or of another model.
        """
        if folder is None:
            return
        reader = CheckpointReader(folder)
        with torch.no_grad():
            reader.load(self.backend.shards())
        self.backend.set_progress(reader.progress)
        set_rng_state(reader.progress["rng"])

    # --- training -----------------------------------------------------------------------------

    def step(self, minibatches: Sequence[MiniBatch], *, step: int) -> dict[str, float]:
        """Train on this rank's micro-batches of all mini-batches (collective).

        First the log-probabilities that must come from the parameters at the start of the step,
        then one optimiser step a mini-batch.  Returns metrics over all ranks and mini-batches:
        ``loss``, ``grad_norm``, ``lr``, ``clip_fraction``, ``entropy``, ``kl``,
        ``logprob_diff_mean`` and ``_max`` (train against rollout), ``tokens``, ``seconds_*`` (the
        slowest rank's).  Raises NonFinite, OutOfMemory, StopRequested, InfraError, DataError.
        """
        report = StepReport()
        with typed_failures(f"step {step}"):
            prepared = self._prepare(minibatches, report)
            for index, minibatch in enumerate(minibatches):
                # Past the first optimiser step the state belongs to no version: finish the step.
                between = self._check_stop if index == 0 else _nothing
                update = self._update(minibatch, prepared[index], between, report)
                report.add_update(update, packed_tokens=sum(m.tokens for m in minibatch.ranks[self.rank]))
            return report.reduced()

    def _prepare(
        self, minibatches: Sequence[MiniBatch], report: StepReport
    ) -> list[list[TrainingBatch] | None]:
        """Compute old and reference log-probabilities; None for a mini-batch that needs neither."""
        algorithm = self.config.algorithm
        old = algorithm.old_logprobs == "always" or len(minibatches) > 1
        if not old and not algorithm.use_kl_loss:
            return [None] * len(minibatches)
        prepared: list[list[TrainingBatch] | None] = []
        for minibatch in minibatches:
            batches: list[TrainingBatch] = []
            for batch in self._loaded(minibatch, report):
                old_P = reference_P = None
                if old:
                    with report.timed("old_logprobs"):
                        old_P = self.backend.logprobs(batch, Role.POLICY)
                if algorithm.use_kl_loss:
                    with report.timed("reference"):
                        reference_P = self.backend.logprobs(batch, Role.REFERENCE)
                batches.append(TrainingBatch(batch, old_P, reference_P))
            prepared.append(batches)
        return prepared

    def _loaded(self, minibatch: MiniBatch, report: StepReport) -> Iterator[PackedBatch]:
        """This rank's packed micro-batches; ``fetch`` counts only the time waited for them."""
        batches = prefetched(self.load_batch, minibatch.ranks[self.rank])
        while True:
            with report.timed("fetch"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _update(
        self,
        minibatch: MiniBatch,
        prepared: list[TrainingBatch] | None,
        between: Callable[[], None],
        report: StepReport,
    ) -> Update:
        batches: Iterable[TrainingBatch] = prepared or (
            TrainingBatch(batch) for batch in self._loaded(minibatch, report)
        )
        with report.timed("update"):
            return self.backend.update(
                batches, n_samples=minibatch.n_samples, n_tokens=minibatch.n_tokens, between=between
            )

    def request_stop(self) -> None:
        """Abandon the step under way at the next micro-batch, if no optimiser step was taken yet.

        One rank is enough; all agree, and all raise StopRequested.
        """
        self._stop.set()

    def _check_stop(self) -> None:
        stop = torch.tensor([float(self._stop.is_set())])
        if self.world_size > 1:
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            self._stop.clear()
            raise StopRequested("stopped between micro-batches; the parameters are the last step's")

    # --- weights ------------------------------------------------------------------------------

    def weight_buckets(self) -> list[BucketSpec]:
        """What a weight sync sends, bucket by bucket; the same on all ranks."""
        if self._buckets is None:
            self._buckets = self._plan(BUCKET_BYTES)
        return self._buckets

    def _plan(self, limit: int) -> list[BucketSpec]:
        backend = self.backend
        return plan_buckets(backend.parameter_shapes(), backend.hf_names().split, backend.dtype, limit)

    def join_weight_group(
        self, address: str, port: int, world_size: int, group_name: str, timeout_s: float
    ) -> None:
        """Form the group that engines receive weights through; only rank 0 takes part in it.

        Returns when ``world_size - 1`` engine ranks are there.  Raises WeightSyncFailed past the
        deadline, which every later transfer has too.
        """
        self.leave_weight_group()
        if self.rank == 0:
            self._sender = WeightSender(
                device=self.device,
                address=address,
                port=port,
                world_size=world_size,
                group_name=group_name,
                timeout_s=timeout_s,
            )

    def send_bucket(self, index: int) -> None:
        """Gather one bucket (collective) and, on rank 0, broadcast its tensors to the engines.

        Raises WeightSyncFailed when any engine may not have received all of it.
        """
        spec = self.weight_buckets()[index]
        tensors = self.backend.export(spec.parameters)
        try:
            if self.rank == 0:
                if self._sender is None:
                    raise WeightSyncFailed("weights sent before the weight-sync group was joined")
                self._sender.send(tensors, spec)
        finally:
            # The other ranks' gathering must not wait for a broadcast that failed here.
            for _ in tensors:
                pass

    def leave_weight_group(self) -> None:
        """Leave the engines' group; harmless when repeated."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    # --- state --------------------------------------------------------------------------------

    def export_hf(self, folder: str) -> list[dict[str, Any]]:
        """Write a Hugging Face folder of the current weights (collective); rank 0 writes it.

        Returns the weight files' names, sizes and hashes on rank 0.  Raises CheckpointError.
        """
        buckets = self._plan(FILE_BYTES)
        tensors = self._all_tensors(buckets)
        if self.rank == 0:
            return write_hf_folder(folder, self.model_dir, buckets, tensors)
        for _ in tensors:
            pass
        return []

    def _all_tensors(self, buckets: Sequence[BucketSpec]) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets:
            yield from self.backend.export(bucket.parameters)

    def save_begin(self, folder: str) -> None:
        """Copy this rank's state, then write it to ``folder`` in the background.

        Training may go on as soon as this returns.  Raises CheckpointError while a save is under way.
        """
        if self._save is not None and self._save.running:
            raise CheckpointError("a checkpoint is still being written")
        self._snapshot.take(self.backend.shards())
        progress = {**self.backend.progress(), "rng": rng_state()}
        target = Path(folder)

        def write() -> list[dict[str, Any]]:
            return [self._snapshot.write(target, self.rank, self.world_size, progress)]

        self._save = BackgroundSave(write)

    def save_poll(self) -> list[dict[str, Any]] | None:
        """Return ``{"name", "size", "sha256"}`` of this rank's files once they are durable, else None.

        The answer stays the same until the next :meth:`save_begin`.  Raises CheckpointError when the
        files could not be written; training is not harmed.
        """
        if self._save is None:
            raise CheckpointError("no checkpoint is being written")
        return self._save.poll()

    def sleep(self) -> int:
        """Move everything to host memory; return the device bytes freed, 0 on a CPU."""
        return self.backend.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.backend.wake()

    def close(self) -> None:
        """Finish the save under way, leave all groups, drop all memory."""
        if self._save is not None:
            self._save.wait()
        try:
            self.leave_weight_group()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            self.backend.close()


def _nothing() -> None:
    """Between micro-batches of an update that must not be abandoned."""
