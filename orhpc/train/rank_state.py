"""The state of one trainer rank: its model and optimizer, their copies in memory, commits and sleep."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from orhpc.config import Config
from orhpc.errors import CheckpointError, InfraError
from orhpc.process.state_folder import state_folder
from orhpc.train.backend import Backend
from orhpc.train.checkpoint.copy_files import CopyId
from orhpc.train.checkpoint.copy_transfer import Address
from orhpc.train.checkpoint.memory import SendStatus, StateCopies
from orhpc.train.checkpoint.save import RankSaves
from orhpc.train.checkpoint.shards import CheckpointReader, rng_state, set_rng_state
from orhpc.train.process_groups import typed_failures
from orhpc.train.sleep.residence import OffloadManager, OffloadStats, memory
from orhpc.train.sleep.shared_device import SharedDevice
from orhpc.train.weights.fp8 import make_quantizer, unchanged
from orhpc.train.weights.rank_sync import RankSync


class RankState:
    """What a rank holds, where else it is kept, and how it moves; :class:`~orhpc.train.actor.TrainerRank`
    adds what is done with it."""

    def __init__(self, config: Config, model_dir: str, rank: int, world_size: int) -> None:
        self.config = config
        self.model_dir = model_dir
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(config.placement.device)
        self._offload = OffloadManager(self.device)
        self._shared_device = SharedDevice(self.device, config.placement.offload)
        self._backend: Backend | None = None
        self._sync: RankSync | None = None
        self._saves = RankSaves(config.checkpoint, self.device, rank, world_size)
        folder = state_folder()
        self._copies = None if folder is None else StateCopies(folder, rank, self.device)
        plain = config.precision == "bf16"
        self._quantize = (
            unchanged if plain else make_quantizer(power_of_two=config.engine.power_of_two_scales)
        )
        self._whole_at: dict[str, Any] | None = None
        """:meth:`Backend.progress` when the last whole step ended; None: the state is not restored yet."""

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "build comes first"
        return self._backend

    @property
    def sync(self) -> RankSync:
        """This rank's side of weight sync."""
        assert self._sync is not None, "build comes first"
        return self._sync

    # --- commits and copies -------------------------------------------------------------------

    def restore(self, folder: str | None, *, of_another_run: bool = False) -> None:
        """Continue from a commit of either backend and any number of ranks; None: from the model folder that
        :meth:`build` has read.

        The learning rates' schedules of a commit ``of_another_run`` do not go on, they begin.

        Raises CheckpointError if the commit is incomplete, corrupt, of another model, or without the critic
        that ``algorithm.advantage: ppo`` needs; a critic that this run does not have is left out.
        InfraError for the model folder after an update, which only a new process can undo.
        """
        if folder is None:
            if not self.backend.intact() or any(self.backend.progress().values()):
                raise InfraError("this process no longer holds the base model: it has made an update")
            self._whole_at = self.backend.progress()
            return
        from orhpc.train.checkpoint.layouts import Layout, load_shards

        reader = CheckpointReader(folder)
        if self.config.algorithm.has_critic and "critic_steps" not in reader.progress:
            raise CheckpointError(
                f"{folder} has no critic, which algorithm.advantage: ppo needs: it is of a run without one; "
                "export it (orhpc export) and start from the folder (model.path)"
            )
        with torch.no_grad():
            load_shards(reader, self.backend.shards(), partial(Layout.of, self.model_dir, self.config.model))
        self._continue_from(reader.progress)
        if of_another_run:
            self.backend.begin_schedule()
            self._whole_at = self.backend.progress()

    def _continue_from(self, progress: dict[str, Any]) -> None:
        """Set everything but the tensors of the state."""
        self.backend.set_progress(progress)
        set_rng_state(progress["rng"])
        self._whole_at = self.backend.progress()

    def copies(self) -> list[CopyId]:
        """Return the copies in this node's memory from which this rank's state can be restored."""
        return [] if self._copies is None else sorted(self._copies.held())

    def prepare_copies(self) -> None:
        """Start to allocate the memory of this rank's copies; :meth:`copy_state` waits for it."""
        if self._copies is not None:
            self._copies.prepare(self.backend.shards())

    def restore_copy(self, copy: CopyId) -> None:
        """Continue from a copy in the node's memory.

        Raises CheckpointError if it does not exist, or is of another layout.
        """
        if self._copies is None:
            raise CheckpointError("the node has no shared memory for copies of the trainers' state")
        with torch.no_grad():
            progress = self._copies.load(copy, self.backend.shards())
        self._continue_from(progress)

    def _finish_copy(self) -> None:
        """Wait for the copy of the state, before the state changes or moves."""
        if self._copies is not None:
            self._copies.join()

    def export_hf(self, folder: str, *, for_engines: bool = False) -> list[dict[str, Any]]:
        """Write a Hugging Face folder of the current weights (collective); rank 0 writes it.

        ``for_engines``: quantized as in the engines.  Returns the weight files' names, sizes and
        hashes on rank 0.  Raises CheckpointError.
        """
        from orhpc.train.checkpoint.export import export_weights

        quantize = self._quantize if for_engines else unchanged
        return export_weights(self.backend, folder, self.model_dir, quantize, writes=self.rank == 0)

    def copy_state(self, copy: CopyId) -> SendStatus:
        """Start to copy the state after ``copy.step`` to the node's memory, where it outlives this process.

        The next :meth:`sleep` and the next :meth:`step` wait for it.  Returns what became of the last
        :meth:`send_copy`.  Raises CheckpointError if the copy before failed; training can continue.
        """
        assert self._copies is not None, "the node has a state folder"
        progress = {**self.backend.progress(), "rng": rng_state()}
        self._copies.begin(copy, self.backend.shards(), progress)
        return self._copies.send_status()

    def send_copy(self, copy: CopyId, target: Address) -> None:
        """Send the copy of the last :meth:`copy_state` to another node's memory, in the background."""
        assert self._copies is not None, "the node has a state folder"
        self._copies.send(copy, target)

    def save_begin(self, folder: str) -> None:
        """Copy this rank's state, then write it to ``folder`` in the background.

        Training may continue as soon as this returns; with ``checkpoint.spare_host_memory`` the next
        :meth:`release_gradients`, or the next :meth:`sleep` after an update, waits for it.

        Raises:
            CheckpointError: a save is in progress, or host memory does not suffice; training can continue.
        """
        self._saves.begin(self.backend, folder)

    def save_poll(self) -> list[dict[str, Any]] | None:
        """Return ``{"name", "size", "sha256"}`` of this rank's files once they are durable, else None.

        The result stays the same until the next :meth:`save_begin`.  Raises CheckpointError when the
        files could not be written; training can continue.
        """
        return self._saves.poll()

    def save_give_up(self) -> bool:
        """End the current save, in which another rank has failed; return whether it has ended."""
        return self._saves.give_up()

    # --- sleep --------------------------------------------------------------------------------

    def release_gradients(self, all_moves: bool = True) -> float:
        """Free the device memory that only an update needs, until :meth:`wake`; return the seconds taken.

        Engines on the device are asleep.  ``all_moves``: see :meth:`sleep`.
        """
        started = time.perf_counter()
        with typed_failures("release_gradients"):
            self._shared_device.engines_sleep()
            self._release(all_moves)
        return time.perf_counter() - started

    def measure_engines(self) -> None:
        """Measure what the engines use of the device; call it at the end of their work, while all serve."""
        self._shared_device.engines_serve()

    def sleep(self, all_moves: bool = True) -> dict[str, float]:
        """Leave the device to engines; return :func:`orhpc.train.sleep.residence.memory` afterwards.

        All state moves to host memory; unless ``all_moves``, it stays if there is room for it while the
        engines serve.  On a CPU it always stays.  The result also has ``freed_bytes``, ``moved_bytes``,
        ``seconds`` and ``copy_seconds``, the wait for :meth:`copy_state`, before which no state moves.
        """
        began = started = time.perf_counter()
        with typed_failures("sleep"):
            slept = None if self._offload.asleep else self._release(all_moves)
            if slept is None:
                released = time.perf_counter()
                self._finish_copy()
                started += time.perf_counter() - released
                slept = self.backend.sleep()
        times = {"seconds": time.perf_counter() - started, "copy_seconds": started - began}
        return {**memory(self.device), **slept._asdict(), **times}

    def _release(self, all_moves: bool) -> OffloadStats | None:
        """Free what only an update needs; None: the rest has to move, or there is no device."""
        return self.backend.release_gradients(lambda: not all_moves and self._shared_device.has_room())

    def wake(self) -> dict[str, float]:
        """Undo :meth:`release_gradients` and :meth:`sleep`.

        Returns ``seconds`` and the memory in use before it, while the engines are asleep.
        """
        before = memory(self.device)
        self._shared_device.engines_sleep()
        started = time.perf_counter()
        with typed_failures("wake"):
            self.backend.wake()
        return {**before, "seconds": time.perf_counter() - started}
