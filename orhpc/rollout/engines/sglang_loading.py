"""Load buckets of weights into an SGLang model with a few kernels, after SGLang has shown where they go.

SGLang's ``load_weights`` looks up every tensor of a checkpoint by its name and copies it alone, in Python.
For the 18,432 expert matrices of Qwen3-30B-A3B this takes longer than the rest of a weight sync.  But a
bucket is loaded in the same way in every sync.  :class:`RecordedLoading` observes which parts of a bucket
SGLang copies where (it fuses, divides and drops tensors), and from the third time on makes the same copies
itself, many per kernel.

The same copies, made backwards, give the bucket as the model holds it.  So a bucket of which only the changes
arrive (:mod:`orhpc.wire.weight_deltas`) is read from the model, changed, and copied back.

It is installed through SGLang's option ``custom_weight_loader``, in every process of the engine, and needs no
knowledge of models, layouts or parallelism.  A bucket whose loading does anything but copy, as for DeepSeek's
absorbed projections, is always left to SGLang, and must arrive whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orhpc.rollout.engines.recorded_copies import (
    DirectCopies,
    Key,
    Recorder,
    Recording,
    bucket_bytes,
    bucket_key,
    slots_of,
)
from orhpc.wire.weight_deltas import (
    DISTANCES,
    HEADER,
    NEEDS_WHOLE,
    VALUES,
    BucketId,
    apply_delta,
    content_hash,
)

log = logging.getLogger(__name__)
NamedTensor = tuple[str, Tensor]


def install(model: nn.Module, named_tensors: Sequence[NamedTensor]) -> None:
    """Let a model load buckets as :class:`RecordedLoading` does; SGLang calls it, once, without tensors."""
    if named_tensors:
        raise ValueError("this prepares a model and loads nothing")
    loading: Any = model.load_weights
    if not isinstance(loading, RecordedLoading):
        model.load_weights = RecordedLoading(model, loading)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Held:
    """A bucket that the model holds."""

    key: Key
    version: int
    """Of :class:`BucketId`."""
    read: int | None
    """Hash of what :class:`DirectCopies` read from the model after loading; None without them."""


class RecordedLoading:
    """A model's ``load_weights`` that copies buckets directly once it knows how."""

    def __init__(self, model: nn.Module, load_weights: Callable[[Iterable[NamedTensor]], Any]) -> None:
        """``load_weights``: the model's method."""
        self._model = model
        self._load = load_weights
        self._recordings: dict[Key, Recording] = {}
        self._logged: set[str] = set()
        self._direct: dict[Key, DirectCopies] = {}
        self._held: dict[int, _Held] = {}
        """By the buckets' numbers."""
        self._votes: dist.ProcessGroup | None = None
        """The ranks of the engine."""

    def __call__(self, weights: Iterable[NamedTensor], *args: Any, **kwargs: Any) -> Any:
        """Load weights like the model's method; only lists of tensors in one buffer are recorded.

        Raises:
            ValueError: they are changes of a bucket, and a rank of this engine cannot make them.  No rank has
                changed anything; the message contains :data:`NEEDS_WHOLE`.
        """
        if args or kwargs or not isinstance(weights, list) or not weights:
            return self._load(weights, *args, **kwargs)
        if weights[0][0] != HEADER:
            return self._load_whole(weights)
        bucket, content = BucketId.of(weights[0][1]), weights[1:]
        if bucket.base:
            self._change(bucket, dict(content))
        else:
            self._held.pop(bucket.number, None)
            self._load_whole(content)
            self._note(bucket, bucket_key(content), weights[0][1].device)
        return None

    def _load_whole(self, weights: list[NamedTensor]) -> Any:
        key = bucket_key(weights)
        if key is None:
            return self._load(weights)
        first, direct = weights[0][1], self._direct.get(key)
        if direct is not None and direct.valid():
            direct.copy(first)
        else:
            self._observe(key, weights)
        _finish(first.device)
        return None

    def _note(self, bucket: BucketId, key: Key | None, device: torch.device) -> None:
        """Note what the model holds now."""
        if key is None:
            return
        direct = self._direct.get(key)
        try:
            read = None if direct is None else content_hash(direct.read(bucket_bytes(key), device))
        except RuntimeError as error:  # no memory: the bucket is loaded, but its changes will be refused
            self._log_once(f"{key[0][0]} and what is sent with it must be sent whole: {error}")
            return
        self._held[bucket.number] = _Held(key, bucket.version, read)

    def _change(self, bucket: BucketId, delta: dict[str, Tensor]) -> None:
        """Load a bucket of which only the changes have arrived."""
        held, device = self._held.pop(bucket.number, None), delta[VALUES].device
        data: Tensor | None = None
        try:
            data, problem = self._as_held(bucket, held, device)
            if data is not None:
                apply_delta(data, delta[VALUES], delta[DISTANCES])
        except (ValueError, RuntimeError) as error:  # the latter also without memory
            problem = f"its changes cannot be applied: {error}"
        if self._on_any_rank(problem is not None):
            raise ValueError(f"{NEEDS_WHOLE}: {problem or 'another rank of the engine cannot change it'}")
        assert held is not None and data is not None
        self._direct[held.key].copy(data)
        self._note(bucket, held.key, device)
        _finish(device)

    def _as_held(
        self, bucket: BucketId, held: _Held | None, device: torch.device
    ) -> tuple[Tensor | None, str | None]:
        """Read a bucket from the model: uint8 ``[bytes]``; or return why it is not what the changes refer to.

        Bytes that this rank drops are zero.
        """
        if held is None or held.version != bucket.base:
            return None, "the engine has other contents"
        direct = self._direct.get(held.key)
        if direct is None or not direct.valid():
            return None, "its loading does not only copy, or has been observed too rarely"
        if not direct.exact:
            return None, "the model holds its weights in a type that rounds them"
        data = direct.read(bucket_bytes(held.key), device)
        if content_hash(data) != held.read:
            return None, "the model's weights have changed since it was loaded"
        return data, None

    def _on_any_rank(self, here: bool) -> bool:
        """Whether it is so on any rank of the engine (collective): SGLang reports its first rank only."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return here
        if self._votes is None:
            # NCCL's default group would allocate memory for this, which SGLang has given to its cache.
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._votes = group
        flag = torch.tensor([int(here)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._votes)
        return bool(flag)

    def _observe(self, key: Key, weights: list[NamedTensor]) -> None:
        """Let the model load a bucket, and record how."""
        self._direct.pop(key, None)
        recorder = Recorder(weights[0][1], bucket_bytes(key))
        with recorder:
            self._load(weights)
        new, old = recorder.recording(), self._recordings.get(key)
        self._recordings[key] = new
        if not new.pure:
            self._log_once(f"{key[0][0]} and what is sent with it are loaded by SGLang: it does {new.other}")
        elif old is not None and new.same(old):
            try:
                self._direct[key] = DirectCopies(new.copies, slots_of(self._model))
            except LookupError as error:
                self._log_once(f"{key[0][0]} and what is sent with it are loaded by SGLang: {error}")
            else:
                self._log_once("weights whose loading only copies are copied directly from now on")

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            log.info(line)


def _finish(device: torch.device) -> None:
    """Wait until a bucket is copied: its sender writes the next bucket into its memory after the answer."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
