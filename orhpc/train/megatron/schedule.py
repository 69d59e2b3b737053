"""Run micro-batches through the pipeline: megatron-core's schedules with the trainer's heads and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from orhpc.train.backend import Batches, StopCheck, TrainingBatch
from orhpc.train.batch import PackedBatch, pack
from orhpc.train.loss.head import LogitScaling, VocabularyPart, token_logprobs
from orhpc.train.megatron.attention import PackedParams
from orhpc.train.megatron.packing import RankBatch, rank_batch
from orhpc.train.megatron.routing_replay import StageReplay

FP8_MULTIPLE = 16
"""Rows of an FP8 matrix product must be a multiple of this."""

Loss = Callable[[Tensor, TrainingBatch, RankBatch], Tensor]
"""Maps a head's outputs, ``[K, P]``, to the scalar to differentiate."""


class Head(Protocol):
    """How the last stage computes numbers of tokens from hidden states."""

    @property
    def divided(self) -> bool:
        """Whether tensor-parallel ranks compute parts of the result, whose gradients add up; else each
        computes the whole."""
        ...

    def outputs(self, hidden_RH: Tensor, weight: Tensor, batch: RankBatch) -> Tensor:
        """Return ``[K, R]`` float32 for the rows whose target was sampled."""
        ...


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """Log-probabilities and entropy: ``K`` = 2."""

    part: VocabularyPart
    scaling: LogitScaling
    chunk: int
    entropy_gradient: bool

    @property
    def divided(self) -> bool:
        return True

    def outputs(self, hidden_RH: Tensor, weight: Tensor, batch: RankBatch) -> Tensor:
        values = token_logprobs(
            hidden_RH,
            weight,
            None,
            batch.targets_R,
            part=self.part,
            scaling=self.scaling,
            chunk=self.chunk,
            entropy_gradient=self.entropy_gradient,
        )
        return torch.stack(values)


class ValueHead:
    """The critic's value: ``K`` = 1; every tensor-parallel rank holds the whole ``[1, H]`` weight."""

    divided = False

    def outputs(self, hidden_RH: Tensor, weight: Tensor, batch: RankBatch) -> Tensor:
        return nn.functional.linear(hidden_RH.float(), weight.float()).t()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One role's model on this rank, ready to run."""

    models: Sequence[nn.Module]
    """Chunks of this stage, in execution order."""
    head: Head
    device: torch.device
    routers: StageReplay | None = None
    """Set if expert routes were recorded."""

    def outputs(self, batches: Batches[PackedBatch]) -> list[Tensor | None]:
        """Return the head's first output, ``[P]``, for every micro-batch, without gradient.

        These are log-probabilities, or values; None on earlier stages.
        """
        found: list[Tensor] = []

        def keep(outputs_KP: Tensor, *_: Any) -> Tensor:
            found.append(outputs_KP[0])
            return outputs_KP.new_zeros(())

        with torch.no_grad():
            self._run(map(TrainingBatch, batches), len(batches), keep, None, forward_only=True)
        if self.routers is not None:
            self.routers.forget()
        return [*found[: len(batches)]] if found else [None] * len(batches)

    def train(self, batches: Batches[TrainingBatch], loss: Loss, between: StopCheck) -> bool:
        """Accumulate the gradients of every micro-batch; return whether all ranks agreed to stop.

        Without a pipeline ``between`` raises instead, at the micro-batch.
        """
        return self._run(iter(batches), len(batches), loss, between, forward_only=False)

    def _run(
        self,
        batches: Iterator[TrainingBatch],
        count: int,
        loss: Loss,
        between: StopCheck | None,
        *,
        forward_only: bool,
    ) -> bool:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        chunks = len(self.models)
        if chunks > 1:  # the interleaved schedule needs a multiple of the number of stages
            count = -(-count // stages) * stages
        source = Batches(_filled(batches), count)
        gate = _Gate(between, stages, chunks)
        streams: list[Any] = [_Stream(enumerate(source), gate, first=i == 0) for i in range(chunks)]
        step = partial(self._forward, loss=loss)
        run = get_forward_backward_func()
        run(
            forward_step_func=step,
            data_iterator=streams if chunks > 1 else streams[0],
            model=list(self.models) if chunks > 1 else self.models[0],
            num_microbatches=count,
            seq_length=1,  # unused: stages exchange shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return gate.closed

    def _forward(
        self, stream: _Stream, model: Any, return_schedule_plan: bool = False, *, loss: Loss
    ) -> tuple[Any, Any]:
        """Compute the next micro-batch; return the output and its loss function, as megatron-core expects.

        ``return_schedule_plan``: instead of the output return a plan, whose layers megatron-core runs
        together with the backward pass of the micro-batch before.
        """
        training = next(stream)
        cp = parallel_state.get_context_parallel_world_size()
        batch = rank_batch(
            training.batch,
            self.device,
            tp=parallel_state.get_tensor_model_parallel_world_size(),
            cp=cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            multiple=FP8_MULTIPLE if getattr(model.config, "fp8", None) else 1,
        )
        if self.routers is not None:
            self.routers.start(model, training.batch, batch.places_L, self.device)
        compute = model.build_schedule_plan if return_schedule_plan else model
        output = compute(
            input_ids=batch.input_ids_L[None],
            position_ids=batch.position_ids_L[None],
            attention_mask=None,
            packed_seq_params=PackedParams.of(batch.packing, batch.position_ids_L),
            output_processor=self._process,
            output_processor_context=batch,
        )
        return output, partial(_loss, training=training, batch=batch, loss=loss)

    def _process(
        self,
        *,
        hidden_states: Tensor,
        output_layer: nn.Module,
        output_weight: Tensor | None,
        context: RankBatch,
        **_: Any,
    ) -> Tensor:
        """megatron-core's hook after the last layer: maps ``[L, 1, H]`` to the head's ``[K, P]``."""
        tp: Any = parallel_state.get_tensor_model_parallel_group()
        if tp.size() > 1:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=self.head.divided, group=tp
            )
        weight: Any = output_layer.weight if output_weight is None else output_weight
        hidden_RH = hidden_states[:, 0].index_select(0, context.rows_R)
        outputs_KR = self.head.outputs(hidden_RH, weight, context)
        outputs_KP = outputs_KR.new_zeros(len(outputs_KR), context.total)
        outputs_KP = outputs_KP.index_copy(1, context.places_R, outputs_KR)
        if parallel_state.get_context_parallel_world_size() > 1:
            outputs_KP = _JoinedOverSequence.apply(outputs_KP, parallel_state.get_context_parallel_group())
        return outputs_KP


def _loss(
    output_KP: Tensor, *, training: TrainingBatch, batch: RankBatch, loss: Loss
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return what megatron-core expects: the loss, a token count (unused here), a report."""
    # A schedule plan frees the memory of the output after the loss's backward pass, but log-probabilities are
    # kept until the end of the step.
    value = loss(output_KP.clone(), training, batch)
    return value, torch.zeros((), dtype=torch.int, device=output_KP.device), {}


class _JoinedOverSequence(torch.autograd.Function):
    """Sum of the context-parallel ranks' results, each nonzero only at its own slots.

    Every rank then computes the whole loss, so the gradient at a rank's own slots is already complete.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        joined = values.clone()
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _filled(batches: Iterator[TrainingBatch]) -> Iterator[TrainingBatch]:
    """Yield the micro-batches, then empty ones without end."""
    yield from batches
    while True:
        yield _empty()


def _empty() -> TrainingBatch:
    return TrainingBatch(pack((), ()))


class _Gate:
    """Where ranks agree, at each micro-batch, whether to continue.

    Pipeline stages are at different micro-batches at any moment, so they cannot wait for each
    other there.  They use the agreement of as many micro-batches earlier as one stage can be
    ahead of another; from the same micro-batch on, all then run empty ones until the schedule ends.
    """

    def __init__(self, between: StopCheck | None, stages: int, chunks: int) -> None:
        self._between = between
        self._delay = 0 if stages == 1 else stages * (1 if chunks == 1 else 2)
        self._closed_at: int | None = None

    @property
    def closed(self) -> bool:
        return self._closed_at is not None

    def ask(self, index: int) -> None:
        if self._between is None:
            return
        if self._delay == 0:
            self._between()
        elif self._between.ahead(self._delay) and self._closed_at is None:
            self._closed_at = index

    def passes(self, index: int) -> bool:
        return self._closed_at is None or index < self._closed_at


class _Stream:
    """One chunk's view of the micro-batches."""

    def __init__(self, batches: Iterator[tuple[int, TrainingBatch]], gate: _Gate, *, first: bool) -> None:
        self._batches = iter(batches)
        self._gate = gate
        self._first = first

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> TrainingBatch:
        index, batch = next(self._batches)
        if self._first:
            self._gate.ask(index)
        return batch if self._gate.passes(index) else _empty()
