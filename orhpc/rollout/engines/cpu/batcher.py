"""Continuous batching: selects the tokens of each forward pass and processes its result.

Each step computes one packed row: the newest token of each decoding request, and pieces of prompts up to a
token budget.  A prompt's last token is never prefilled: it is the first token that the request decodes, so
logits are computed only where a token is sampled.

A slot keeps its contents after its request has finished.  A new request reuses the idle slot whose contents
it continues (turn k+1 of a rollout), or copies the longest common prefix from any slot, including running
ones (the rollouts of one prompt group); only the rest is computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from orhpc.models.seeing import ImageFeatures
from orhpc.rollout.engines.cpu.kv_cache import SlotTable
from orhpc.rollout.engines.cpu.model import SeenRow, SlotModel
from orhpc.rollout.engines.cpu.protocol import EngineRequest, NotServing
from orhpc.rollout.engines.cpu.sampling import sample

PREFILL_TOKENS = 512
"""Prompt tokens per step; limits how long decoding requests wait for prefills."""

_MIN_SAVED_TOKENS = 16
"""A request waits for another request's prefill if that saves more than this number of tokens."""


class Batcher:
    """The requests of one engine.  Not thread-safe: one thread makes all calls."""

    def __init__(self, model: SlotModel) -> None:
        self.model = model
        self.table = SlotTable(model.slots)
        self.waiting: deque[EngineRequest] = deque()
        self.running: dict[int, EngineRequest] = {}
        # The ids of each slot's request, including tokens not computed yet; valid up to table.lengths.
        self._ids = np.zeros((model.slots, model.context), dtype=np.int32)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[EngineRequest]:
        """Run one forward pass and return the requests it finished."""
        self._admit()
        decode: list[EngineRequest] = []
        pieces: list[tuple[EngineRequest, int, int]] = []
        budget = PREFILL_TOKENS
        for slot in sorted(self.running):
            request = self.running[slot]
            missing = request.length - 1 - request.computed
            if missing == 0:
                decode.append(request)
            elif budget:
                end = request.computed + min(missing, budget)
                budget -= end - request.computed
                pieces.append((request, request.computed, end))
        tokens = [r.output[-1] if r.output else r.prompt[-1] for r in decode]
        for request, start, end in pieces:
            tokens.extend(request.context[start:end])
        logits = self.model.forward(
            tokens,
            [(r.slot, r.length - 1) for r in decode],
            [(r.slot, start, end) for r, start, end in pieces],
            self._seen(decode, pieces),
        )
        for request, _, end in pieces:
            self._computed(request, end)
        if not decode:
            return []
        sampled = sample(logits, [r.params for r in decode], [r.length for r in decode])
        return [
            r for r, token, logprob in zip(decode, *sampled, strict=True) if self._extend(r, token, logprob)
        ]

    def _seen(
        self, decode: list[EngineRequest], pieces: list[tuple[EngineRequest, int, int]]
    ) -> SeenRow | None:
        """The images and positions of a packed row; None if no request of it has images."""
        parts = [(r, r.length - 1, r.length) for r in decode] + pieces
        if not any(request.images for request, _, _ in parts):
            return None
        positions = np.concatenate([r.positions(start, end) for r, start, end in parts], axis=1)
        slots: list[np.ndarray] = []
        features: list[ImageFeatures] = []
        row = len(decode)
        for request, start, end in pieces:
            first = 0
            for placed in request.images:
                begin, stop = max(start, placed.start), min(end, placed.end)
                if begin < stop:
                    if request.features is None:
                        request.features = self.model.see([p.image for p in request.images])
                    at = first - placed.start
                    features.append(request.features.rows(begin + at, stop + at))
                    slots.append(np.arange(row + begin - start, row + stop - start))
                first += placed.image.tokens
            row += end - start
        return SeenRow.of(positions, slots, features)

    def _computed(self, request: EngineRequest, end: int) -> None:
        request.computed = end
        self.table.lengths[request.slot] = end

    def _extend(self, request: EngineRequest, token: int, logprob: float) -> bool:
        """Append a sampled token; returns whether the request is then finished."""
        if not math.isfinite(logprob):
            self._fail_request(request)
            return True
        self._computed(request, request.length)
        if request.length < self.model.context:
            self._ids[request.slot, request.length] = token
        request.output.append(token)
        request.logprobs.append(logprob)
        params = request.params
        stops = token in params.stop_token_ids or token in self.model.eos_token_ids
        # As in SGLang, ignore_eos also disables stop_token_ids.
        if stops and not params.ignore_eos:
            self._finish(request, {"type": "stop", "matched": token})
        elif len(request.output) >= params.max_new_tokens:
            self._finish(request, {"type": "length", "length": len(request.output)})
        return request.finish_reason is not None

    def _fail_request(self, request: EngineRequest) -> None:
        """End a request whose logits are not finite, and clear its slot."""
        slot = request.slot
        request.error = NotServing("the model's logits are not finite: its weights are broken")
        self._finish(request, {"type": "abort", "message": str(request.error)})
        self.table.lengths[slot] = 0
        self.model.cache.clear_slot(slot)

    def _finish(self, request: EngineRequest, reason: dict[str, object]) -> None:
        request.finish_reason = reason
        request.routes = self._routes(request)
        if request.slot >= 0:
            del self.running[request.slot]
            self.table.release(request.slot)
            request.slot = -1

    def _routes(self, request: EngineRequest) -> np.ndarray | None:
        """Rows ``routes_start .. length - 2``; None if not requested or nothing was sampled."""
        if request.routes_start is None or not request.output:
            return None
        routes = self._recorded(request, request.length - 1)
        return None if routes is None else routes[request.routes_start :]

    def _recorded(self, request: EngineRequest, rows: int) -> np.ndarray | None:
        """The first ``rows`` route rows: rows kept from before a retraction, then the slot's."""
        recorder = self.model.routes
        if recorder is None:
            return None
        kept = request.kept_routes
        if kept is None:
            return recorder.store[request.slot, :rows].copy()
        if len(kept) >= rows:
            return kept[:rows]
        return np.concatenate([kept, recorder.store[request.slot, len(kept) : rows]])

    def abort(self, wanted: Callable[[EngineRequest], bool], why: str) -> list[EngineRequest]:
        """End the matching requests; they return the tokens sampled so far."""
        ended = [r for r in (*self.running.values(), *self.waiting) if wanted(r)]
        for request in ended:
            self._finish(request, {"type": "abort", "message": why})
        self.waiting = deque(r for r in self.waiting if r.finish_reason is None)
        return ended

    def retract(self) -> None:
        """Return all running requests to the front of the queue, to be recomputed."""
        for slot in sorted(self.running, reverse=True):
            request = self.running.pop(slot)
            if request.routes_start is not None and request.output:
                kept = 0 if request.kept_routes is None else len(request.kept_routes)
                request.kept_routes = self._recorded(request, max(kept, request.computed))
            self.table.release(slot)
            request.slot = -1
            request.computed = 0
            request.features = None  # the weights may change
            self.waiting.appendleft(request)

    def flush(self) -> bool:
        """Drop all idle contents; returns False, without effect, while requests are running."""
        if self.running:
            return False
        self.table.clear()
        return True

    def _admit(self) -> None:
        """Assign slots to waiting requests in order of arrival, except those worth deferring."""
        deferred: deque[EngineRequest] = deque()
        while self.waiting and self.table.idle:
            request = self.waiting.popleft()
            context = request.keys
            donor, common, promised = self._longest_prefix(context)
            if promised > common + _MIN_SAVED_TOKENS:
                deferred.append(request)
            else:
                self._place(request, context, donor, common)
        self.waiting.extendleft(reversed(deferred))

    def _longest_prefix(self, context: np.ndarray) -> tuple[int, int, int]:
        """Find the slot that shares the longest computed prefix, excluding the last token.

        Returns the slot, the length, and the length that will be available after the current prefills.
        """
        limit = len(context) - 1
        donor, common, promised = -1, 0, 0
        for slot in range(self.table.slots):
            owner = self.running.get(slot)
            valid = self.table.lengths[slot]
            held = valid if owner is None else max(valid, owner.length - 1)
            length = min(held, limit)
            if length <= common or self._ids[slot, 0] != context[0]:
                continue
            differing = np.flatnonzero(self._ids[slot, :length] != context[:length])
            shared = int(differing[0]) if len(differing) else length
            promised = max(promised, shared)
            if min(shared, valid) > common:
                donor, common = slot, min(shared, valid)
        return donor, common, promised

    def _place(self, request: EngineRequest, context: np.ndarray, donor: int, common: int) -> None:
        table = self.table
        continues = donor in table.idle and common == table.lengths[donor]
        slot = donor if continues else table.victim()
        table.idle.discard(slot)
        if donor >= 0 and slot != donor:
            self.model.copy_prefix(donor, slot, common)
        table.lengths[slot] = common
        self._ids[slot, : len(context)] = context
        request.slot = slot
        request.computed = common
        if request.cached_tokens is None:
            request.cached_tokens = min(common, len(request.prompt))
        self.running[slot] = request
