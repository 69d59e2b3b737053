"""Build megatron-core models of one model folder and load their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from orhpc.models import read_shape
from orhpc.plan.layout import check_layout, trainer_layout
from orhpc.train.backend import VALUE_HEAD
from orhpc.train.dtypes import DTYPES
from orhpc.train.hf_model import load_model_config, logit_scaling_of
from orhpc.train.loss.head import VocabularyPart
from orhpc.train.megatron.hf_mapping import CriticMapping, HfMapping, Piece, Source
from orhpc.train.megatron.hf_stream import HfFolder
from orhpc.train.megatron.model import (
    Chunk,
    build_chunks,
    load_chunks,
    naming_of,
    padded_vocabulary,
    transformer_config,
)
from orhpc.train.megatron.model_config import build_of
from orhpc.train.megatron.routing_replay import StageReplay
from orhpc.train.megatron.schedule import LogprobHead, Pipeline

if TYPE_CHECKING:
    from orhpc.config import Config


class ModelLoader:
    """Builds this rank's part of the roles of one trainer."""

    def __init__(self, config: Config, model_dir: str) -> None:
        """Raises ModelError for folders, families and layouts that cannot be trained."""
        m = config.megatron
        self.config = config
        self.device = torch.device(config.placement.device)
        self.dtype = DTYPES[config.model.dtype]
        self._hf_config = load_model_config(model_dir, config.model, quantized=True)
        self._folder = HfFolder(model_dir)
        self.shape = self._folder.language_part(read_shape(model_dir))
        self._folder.check(self.shape)
        per_node = config.placement.devices_per_node
        check_layout(self.shape, trainer_layout(config), per_node, fp8=config.precision == "fp8")
        divided = {"tp": m.tp, "etp": m.etp, "vocabulary": padded_vocabulary(self.shape, m)}
        self.mapping = HfMapping(self.shape, naming_of(config), **divided)
        self.critic_mapping = CriticMapping(self.shape, naming_of(config), **divided)

    def chunks(self, *, trained: bool) -> list[Chunk]:
        """Return the model chunks of the policy or the reference on this rank's pipeline stage, with their
        weights."""
        return self._loaded(self.mapping, self._folder, trained=trained, critic=False)

    def critic_chunks(self) -> list[Chunk]:
        """Return the critic's model chunks on this rank's pipeline stage: the policy's weights, and a head of
        zeros."""
        source = _WithValueHead(self._folder, self.shape.hidden)
        return self._loaded(self.critic_mapping, source, trained=True, critic=True)

    def _loaded(self, mapping: HfMapping, source: Source, *, trained: bool, critic: bool) -> list[Chunk]:
        build = build_of(self._hf_config, self.shape)
        mcore = transformer_config(build, self.shape, self.config, self.dtype)
        chunks = build_chunks(build, mcore, self.shape, self.config.megatron, self.device, critic=critic)
        load_chunks(chunks, mapping, source)
        for chunk in chunks:
            # Always in training mode, without dropout: every pass of a step computes the same.
            chunk.model.train().requires_grad_(trained)
        return chunks

    def pipeline(self, models: Iterable[nn.Module], routers: StageReplay | None = None) -> Pipeline:
        """Return the schedule that computes with these chunks."""
        train, m, shape = self.config.train, self.config.megatron, self.shape
        rows = padded_vocabulary(shape, m) // m.tp
        start = parallel_state.get_tensor_model_parallel_rank() * rows
        group = parallel_state.get_tensor_model_parallel_group() if m.tp > 1 else None
        part = VocabularyPart(start, max(0, min(rows, shape.vocabulary - start)), group)
        scaling = logit_scaling_of(self._hf_config, self.config.rollout.temperature)
        entropy = self.config.algorithm.entropy_coef != 0
        head = LogprobHead(part, scaling, train.logprob_chunk_tokens, entropy)
        return Pipeline(list(models), head, self.device, routers)


@dataclass(frozen=True, slots=True)
class _WithValueHead:
    """A model folder, and zeros for the critic's head, which no folder has."""

    folder: HfFolder
    width: int
    """Of the hidden states."""

    def read(self, piece: Piece, dim: int, start: int, stop: int) -> Tensor:
        if piece.name != VALUE_HEAD:
            return self.folder.read(piece, dim, start, stop)
        return torch.zeros(stop - start, self.width)
