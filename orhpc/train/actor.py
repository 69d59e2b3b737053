"""One rank of the trainer: a plain class that the driver runs as a Ray actor.

Methods marked *collective* must be called on all ranks; the others concern one rank.  The driver imports this
module to name methods, so it does not import transformers, which takes seconds: methods that need it do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orhpc.config import Config
from orhpc.errors import InfraError, NonFinite, OutOfMemory
from orhpc.models.images import image_processor
from orhpc.plan.layout import route_share, trainer_layout
from orhpc.process.cuda_allocator import expandable_segments, use_plain_segments
from orhpc.process.devices import VARIABLE, visible_devices
from orhpc.process.garbage import freeze_garbage, unfreeze_garbage
from orhpc.process.ports import hold_port
from orhpc.process.secrets import remember_secrets
from orhpc.process.stacks import stacks
from orhpc.rundir.trained import TrainedRollout, write_trained
from orhpc.train.backends import backend_class
from orhpc.train.batch import PackedBatch
from orhpc.train.checkpoint.memory import StateCopies
from orhpc.train.checkpoint.shards import rng_state, set_rng_state
from orhpc.train.cpu_affinity import pin_to_local_cpus
from orhpc.train.fetch import load_batch
from orhpc.train.pace import pace_seconds
from orhpc.train.process_groups import join_default_group, meeting_file, typed_failures
from orhpc.train.profile import traced
from orhpc.train.rank_recovery import free_memory, leave_default_group, or_restart
from orhpc.train.rank_state import RankState
from orhpc.train.sleep.residence import asleep_bytes
from orhpc.train.step_passes import StepPasses
from orhpc.train.step_report import StepReport
from orhpc.train.stopping import NeverStop, StopBetween, abandon_collectives
from orhpc.train.trained_tokens import TrainedTokens
from orhpc.train.weights.rank_sync import RankSync
from orhpc.train.weights.update_requests import SyncPlan, SyncReport
from orhpc.types import MiniBatch
from orhpc.wire.weights import start_shared_memory_manager


class TrainerRank(RankState):
    """One rank: its model and optimizer state, and its side of weight sync and checkpoints.

    Call order: ``connect``, optionally ``prepare``, ``build``, ``restore``, then steps, saves and syncs.  One
    method at a time, except :meth:`save_poll`, :meth:`request_stop`, :meth:`stacks`, :meth:`sync_progress`
    and :meth:`abandon_collectives`, which may be called at any time.
    """

    def __init__(
        self,
        config: Config,
        model_dir: str,
        rank: int,
        world_size: int,
        threads: int,
        device_index: int | None = None,
    ) -> None:
        """``device_index``: GPU of this rank on its node; null: on a CPU, or the first visible GPU."""
        self._one_device = device_index is not None
        if device_index is not None:
            # Hide all other GPUs, so that libraries that use the current device use the right one.
            os.environ[VARIABLE] = visible_devices([device_index], os.environ)
        use_plain_segments(torch.device(config.placement.device))
        super().__init__(config, model_dir, rank, world_size)
        self.threads = threads
        self._backend_class = backend_class(config)  # imports its libraries while the engines start
        routes = route_share(config, model_dir, rank, world_size)
        images = image_processor(model_dir)
        self.load_batch: Callable[..., PackedBatch] = partial(load_batch, routes=routes, images=images)
        self._held: socket.socket | None = None
        self._stop = threading.Event()
        self._trained: dict[str, TrainedRollout] = {}
        self._rng: dict[str, Any] | None = None
        """Of torch's random generators when the last step began."""

    def __repr__(self) -> str:
        """Ray begins this process's lines in the driver's log with it."""
        return f"trainer {self.rank}"

    # --- starting -----------------------------------------------------------------------------

    def hold_port(self, address: str) -> int:
        """Reserve a free port of this rank's node for the store that it hosts next; return its number.

        Ranks load their libraries before they use the port; the reservation keeps it free until then.
        """
        self._held = hold_port(address)
        return self._held.getsockname()[1]

    def _pop_held_socket(self) -> socket.socket | None:
        held, self._held = self._held, None
        return held

    def meeting_file(self) -> str:
        """See :func:`orhpc.train.process_groups.meeting_file`."""
        return meeting_file()

    def connect(self, address: str, meeting: int | str, timeout_s: float) -> None:
        """Join the ranks' process group (collective).

        ``meeting``: the port of ``address`` on which rank 0 hosts the store, or :meth:`meeting_file`.
        ``timeout_s`` also limits every later collective.  Raises InfraError when it expires.
        """
        torch.set_num_threads(self.threads)
        if self._one_device:
            torch.cuda.set_device(0)
            pin_to_local_cpus(self.device)
        if self.device.type == "cpu":
            start_shared_memory_manager()
        held = self._pop_held_socket()
        join_default_group(self.device, address, meeting, self.rank, self.world_size, timeout_s, held)
        if self.config.placement.shared_devices:  # while the engines start
            self._offload.prepare(asleep_bytes(self.config, self.model_dir, self.rank, self.world_size))

    def build(self) -> dict[str, Any]:
        """Load the model and compare it with transformers' (collective); :meth:`restore` must follow.

        Returns ``parameters``, ``model_check`` (what the comparison found), ``world_size``,
        ``copy_bytes`` (the size of a copy of this rank's state) and ``copies_problem``: why the state cannot
        be copied to the node's memory, or null.
        """
        torch.manual_seed(self.config.run.seed)
        with typed_failures("the model could not be built"):
            given = (self.config, self.model_dir, self.rank, self.world_size)
            backend = self._backend_class(*given, self._offload)
            self._backend, self._whole_at = backend, None
            from orhpc.train.model_check import check_trainer

            found = check_trainer(backend, self.config, self.model_dir)
        bucket_bytes = self.config.engine.sync_bucket_mb << 20
        self._sync = RankSync(backend, self._quantize, bucket_bytes, self.device, self.rank)
        self._saves.prepare(backend)
        freeze_garbage()
        of_node = min(self.world_size, self.config.placement.devices_per_node)
        problem = "a node has no shared memory"
        if self._copies is not None:
            problem = self._copies.problem(backend.shards(), of_node)
        return {
            "parameters": backend.parameters,
            "model_check": found,
            "world_size": self.world_size,
            "copy_bytes": StateCopies.bytes_of(backend.shards()),
            "copies_problem": problem,
        }

    # --- training -----------------------------------------------------------------------------

    def sampled_logprobs(self, samples: Sequence[tuple[list[int], int]]) -> list[list[float]] | None:
        """See :func:`orhpc.train.model_check.sampled_logprobs` (collective)."""
        from orhpc.train.model_check import sampled_logprobs

        with typed_failures("log-probabilities of what engines sampled"):
            return sampled_logprobs(self.backend, samples)

    def step(
        self, minibatches: Sequence[MiniBatch], *, step: int, traces: str = "", short_of_memory: bool = False
    ) -> dict[str, float]:
        """Train on this rank's micro-batches of all mini-batches (collective).

        First computes what needs the parameters at the start of the step, then takes one optimizer step per
        mini-batch: of the critic, if there is one, and of the policy, after the critic's warm-up.  Returns
        metrics over all ranks and mini-batches: ``loss``, ``grad_norm``, ``lr``, ``clip_fraction``,
        ``entropy``, ``kl``, ``logprob_diff_mean`` and ``_max`` (trainer against rollout), ``tokens``, with a
        critic ``value_loss`` and ``explained_variance``, ``seconds_*`` (the slowest rank's), on GPUs
        ``memory_trainer_peak_gb``.
        ``traces``: folder for profiles of the profiled ranks; empty: no profiling.  ``short_of_memory``:
        use expandable segments (:mod:`orhpc.process.cuda_allocator`).

        Raises NonFinite, after which the step ends; OutOfMemory, StopRequested, InfraError, DataError.
        """
        self._finish_copy()
        report = StepReport(self.device, expert_ranks=trainer_layout(self.config).ep)
        tokens = TrainedTokens()
        self._trained, self._rng = {}, rng_state()
        settings = self.config.algorithm
        moves = step >= settings.critic.warmup_steps
        passes = StepPasses(self.backend, settings, self.load_batch, report, tokens, policy_moves=moves)
        with (
            self._naming_the_sample(passes),
            typed_failures(f"step {step}"),
            self._counting_steps(),
            expandable_segments(self.device) if short_of_memory else contextlib.nullcontext(),
            traced(self.config, traces, self.rank),
        ):
            prepared = passes.prepare(minibatches)
            for index, minibatch in enumerate(minibatches):
                # After the first optimizer step the state belongs to no weight version: finish the step.
                between = StopBetween(self._stop) if index == 0 else NeverStop()
                try:
                    passes.update(minibatch, prepared[index], between)
                except NonFinite as error:
                    error.made = index if moves else 0
                    raise
            self._trained = tokens.rollouts()
            return report.reduced()

    def pace(self) -> float | None:
        """See :func:`orhpc.train.pace.pace_seconds`; all ranks do it at the same time."""
        return pace_seconds(self.device)

    @contextlib.contextmanager
    def _naming_the_sample(self, passes: StepPasses) -> Iterator[None]:
        """Say in OutOfMemory whether a sample was alone; pipelines and overlap compute several at once."""
        try:
            yield
        except OutOfMemory as error:
            m = self.config.megatron
            several = self.config.train.backend == "megatron" and (
                m.pp > 1 or m.overlap_moe_expert_parallel_comm
            )
            error.alone = None if several else passes.alone
            raise

    def take_trained(self) -> dict[str, TrainedRollout]:
        """Return what the last step computed for this rank's rollouts, by id, and forget it."""
        trained, self._trained = self._trained, {}
        return trained

    def write_trained(self, folder: str, *parts: dict[str, TrainedRollout]) -> None:
        """Write :meth:`take_trained` of all ranks to the folder of a step's rollouts.

        Raises:
            StorageRefused: the filesystem refuses writes; the folder is unchanged.
        """
        write_trained(Path(folder), {name: found for part in parts for name, found in part.items()})

    @contextlib.contextmanager
    def _counting_steps(self) -> Iterator[None]:
        """Record the optimizer steps at which the last whole step ended; a skipped step is whole."""
        try:
            yield
        except NonFinite:
            self._whole_at = self.backend.progress()
            raise
        self._whole_at = self.backend.progress()

    def holds_whole_step(self) -> bool:
        """Whether this rank's state is that after its last whole step and may be committed.

        It is not between :meth:`build`, which loads the base model, and the restoration of the run's state.
        """
        return self.backend.intact() and self._whole_at == self.backend.progress()

    def abandon_collectives(self) -> None:
        """Stop waiting for other ranks: one has failed, and the attempt is over."""
        abandon_collectives()

    # --- recovery in place --------------------------------------------------------------------

    def leave_groups(self) -> None:
        """Leave all process groups after a failed step, which frees the ranks that still wait in them.

        It waits for no other rank.  Raises InfraError if this trainer needs a new process instead.
        """
        with or_restart("the process groups could not be left"):
            self.sync.leave_group()
            if not self.backend.leave_groups():
                raise InfraError("this trainer cannot change its process groups")
            leave_default_group()

    def rejoin(self, address: str, meeting: int | str, timeout_s: float) -> None:
        """Form the process group again after :meth:`leave_groups` (collective); see :meth:`connect`."""
        held = self._pop_held_socket()
        join_default_group(self.device, address, meeting, self.rank, self.world_size, timeout_s, held)

    def recover(self) -> bool:
        """Forget a failed step and free its memory (collective if there are several ranks).

        Returns whether this rank still holds the state of before the step.  Raises InfraError if it needs a
        new process instead.
        """
        with or_restart("the trainer could not recover in place"):
            if not self.backend.recover(new_groups=self.world_size > 1):
                raise InfraError("this trainer cannot forget a failed step")
            self._trained = {}
            free_memory(self.device)
            whole = self.holds_whole_step()
            if whole and self._rng is not None:
                set_rng_state(self._rng)
            return whole

    def stacks(self) -> str:
        """See :func:`orhpc.process.stacks.stacks`."""
        return stacks()

    def request_stop(self) -> None:
        """Abandon the current step at the next micro-batch, if it has taken no optimizer step yet.

        Calling it on one rank is enough: all ranks agree, and all raise StopRequested.
        """
        self._stop.set()

    # --- weights ------------------------------------------------------------------------------

    def join_weight_group(
        self, address: str, port: int, world_size: int, group_name: str, timeout_s: float
    ) -> None:
        """Form the group through which engines receive weights; only rank 0 takes part in it.

        Returns when ``world_size - 1`` engine ranks have joined.  Raises WeightSyncFailed after
        ``timeout_s``, which also limits every later transfer.
        """
        held = self._pop_held_socket()
        self.sync.join_group(address, port, world_size, group_name, timeout_s, held)

    def send_weights(self, plan: SyncPlan) -> SyncReport:
        """Send all weights to the engines of a plan, bucket by bucket (collective).

        Each rank gathers the buckets, maps or broadcasts them, and makes the requests of the engines that it
        serves.  Raises WeightSyncFailed when an engine may not have received all weights for a reason that is
        not its own; engines that failed themselves are in the report.  InfraError: another rank has failed.
        """
        if plan.key is not None:
            remember_secrets([plan.key])
        return self.sync.send(plan)

    def sync_progress(self) -> int:
        """Return a number that grows with every bucket of a sync."""
        return 0 if self._sync is None else self._sync.progress

    def leave_weight_group(self) -> None:
        """Leave the engines' group; safe to call again."""
        self.sync.leave_group()

    def close(self) -> None:
        """Finish the current save and copy, leave all groups, release all memory."""
        self._saves.close()
        if self._copies is not None:
            self._copies.close()
        try:
            if self._sync is not None:
                self._sync.leave_group()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            self._release_model()
            unfreeze_garbage()

    def _release_model(self) -> None:
        self._offload.close()
        if self._backend is not None:
            self._backend.close()
        self._backend = self._sync = None  # the last references: this frees the model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
