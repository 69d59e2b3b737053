"""The compute thread: runs steps of the batch, and control calls between two steps."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import torch

from orhpc.rollout.engines.cpu.batcher import Batcher
from orhpc.rollout.engines.cpu.protocol import BadRequest, EngineRequest, NotServing
from orhpc.rollout.engines.cpu.weights import WeightStore
from orhpc.wire.weights import NamedTensor

log = logging.getLogger(__name__)
T = TypeVar("T")

TAGS = ("kv_cache", "weights", "cuda_graph")


class Scheduler:
    """Owns model, batch and weights, which are accessed only on its thread.

    The event loop submits work with :meth:`generate` and :meth:`call` and waits for futures, so it stays
    responsive while the model computes.
    """

    def __init__(
        self,
        batcher: Batcher,
        weights: WeightStore,
        *,
        version: str,
        threads: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.batcher = batcher
        self.weights = weights
        self.version = version
        self.paused = False
        self.failure: str | None = None
        self._released: set[str] = set()
        self._threads = threads
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        """Start the compute thread."""
        self._thread.start()

    # --- for the event loop -----------------------------------------------------------------------

    @property
    def not_serving(self) -> str | None:
        """Why requests cannot be served now; None if they can (a pause only delays them)."""
        if self.failure is not None:
            return self.failure
        if not self._thread.is_alive():
            return "the compute thread has ended"
        if self._released:
            return f"released: {', '.join(sorted(self._released))}; resume before generating"
        return self.weights.not_servable

    @property
    def unhealthy(self) -> str | None:
        """Why the engine is unhealthy: as :attr:`not_serving`, but a sleeping engine is healthy."""
        return None if self._released and self.failure is None else self.not_serving

    async def generate(self, requests: list[EngineRequest]) -> None:
        """Queue requests and wait for all of them; cancelling the wait aborts them.

        Raises NotServing when the engine cannot serve.
        """
        reason = self.not_serving
        if reason is not None:
            raise NotServing(reason)

        def submit() -> None:
            for request in requests:
                self.batcher.submit(request)
            if self.failure is not None:  # since the check above; no further step would answer them
                self._fail_all(self.failure)

        self._calls.put(submit)
        try:
            await asyncio.gather(*(r.done for r in requests))
            for request in requests:
                if request.error is not None:
                    raise request.error
        except asyncio.CancelledError:
            gone = {id(r) for r in requests}

            def abort() -> None:
                self._abort(lambda r: id(r) in gone, "the client disconnected")

            self._calls.put(abort)
            raise

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on the compute thread between two steps, unless the call is cancelled before."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the client has disconnected, and a cancelled future takes no result
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)

        self._calls.put(run)
        return asyncio.wrap_future(future, loop=self._loop)

    # --- control calls, on the compute thread -----------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stop stepping.  ``abort`` ends all requests, ``retract`` requeues the running ones,
        ``in_place`` leaves them as they are."""
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest(f"mode {mode!r}: choose abort, retract or in_place")
        self.paused = True
        if mode == "abort":
            self._abort(lambda _r: True, "generation was paused")
        elif mode == "retract":
            self.batcher.retract()

    def resume_stepping(self) -> None:
        """Continue after a pause."""
        self.paused = False

    def abort(self, rid: str, *, everything: bool) -> int:
        """End requests whose id starts with ``rid`` (as in SGLang), or all; returns how many."""
        if not everything and not rid:
            raise BadRequest("abort_request needs rid or abort_all")
        return self._abort(lambda r: everything or r.rid.startswith(rid), "aborted by request")

    def _abort(self, wanted: Callable[[EngineRequest], bool], why: str) -> int:
        ended = self.batcher.abort(wanted, why)
        self._answer(ended)
        return len(ended)

    def release(self, tags: Iterable[str]) -> None:
        """Free memory.  Raises BadRequest while requests are running."""
        chosen = _checked_tags(tags)
        if self.batcher.running:
            raise BadRequest(
                f"{len(self.batcher.running)} requests are running: pause before releasing memory"
            )
        if chosen & {"kv_cache", "weights"}:
            self.batcher.flush()
        if "kv_cache" in chosen:
            self.batcher.model.cache.free()
        if "weights" in chosen and not self.weights.released:
            self.weights.release()
        self._released |= chosen

    def resume(self, tags: Iterable[str]) -> None:
        """Allocate memory again; released weights need a complete update before they are served."""
        chosen = _checked_tags(tags)
        if "weights" in chosen and self.weights.released:
            self.weights.resume()
        self._released -= chosen

    def update_weights(
        self,
        named: list[NamedTensor] | str,
        *,
        flush: bool,
        abort_all: bool,
        version: str | None,
    ) -> int:
        """Write tensors, or a whole folder, into the model; returns how many tensors.

        Raises BadRequest before anything is written if a flush is requested while requests run.
        """
        if abort_all:
            self._abort(lambda _r: True, "weights are being updated")
        if flush and not self.batcher.flush():
            raise BadRequest(
                f"cannot flush the cache: {len(self.batcher.running)} requests are running; pause with mode "
                "abort or retract, or update with flush_cache false"
            )
        if isinstance(named, str):
            count = self.weights.load_folder(named)
        else:
            count = self.weights.apply(named, last=version is not None)
        if version is not None:
            self.version = version
        return count

    def fail_update(self, why: str) -> None:
        """Mark the weights as partial, and abort all requests."""
        self.weights.fail(why)
        self._abort(lambda _r: True, "a weight update failed")

    def set_version(self, version: str, *, abort_all: bool) -> None:
        """Set the version of the weights, which completes an open update."""
        if abort_all:
            self._abort(lambda _r: True, "the weight version changes")
        self.weights.finish_update()
        self.version = version

    # --- the compute thread -----------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            if (call := self._next_call(wait=not self._can_step())) is not None:
                call()
                continue
            try:
                self._answer(self.batcher.step())
            except Exception as error:
                log.exception("a step failed")
                self.failure = f"the engine failed: {type(error).__name__}: {error}"
                self._fail_all(self.failure)

    def _fail_all(self, why: str) -> None:
        for request in (*self.batcher.running.values(), *self.batcher.waiting):
            request.error = NotServing(why)
        self._abort(lambda _r: True, why)

    def _next_call(self, *, wait: bool) -> Callable[[], None] | None:
        try:
            return self._calls.get(block=wait)
        except queue.Empty:
            return None

    def _can_step(self) -> bool:
        return self.batcher.busy and not self.paused and self.not_serving is None

    def _answer(self, finished: list[EngineRequest]) -> None:
        if finished:
            for request in finished:
                request.weight_version = self.version
            self._loop.call_soon_threadsafe(_resolve, finished)


def _resolve(finished: list[EngineRequest]) -> None:
    for request in finished:
        if not request.done.done():
            request.done.set_result(None)


def _checked_tags(tags: Iterable[str]) -> set[str]:
    chosen = set(tags)
    unknown = chosen - set(TAGS)
    if unknown:
        raise BadRequest(f"unknown tag {sorted(unknown)[0]!r}: choose from {', '.join(TAGS)}")
    return chosen
