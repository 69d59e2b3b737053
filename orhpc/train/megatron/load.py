"""Build megatron-core models of one model folder and load their weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from torch import nn

from orhpc.models import read_shape
from orhpc.plan.layout import check_layout, trainer_layout
from orhpc.train.hf_model import DTYPES, load_model_config, logit_scaling_of
from orhpc.train.loss.head import VocabularyPart
from orhpc.train.megatron.hf_mapping import HfMapping
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
from orhpc.train.megatron.schedule import Head, Pipeline

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
        check_layout(self.shape, trainer_layout(config), config.placement.devices_per_node)
        vocabulary = padded_vocabulary(self.shape, m)
        self.mapping = HfMapping(self.shape, naming_of(config), tp=m.tp, etp=m.etp, vocabulary=vocabulary)

    def chunks(self, *, trained: bool) -> list[Chunk]:
        """Return the model chunks of one role on this rank's pipeline stage, with their weights."""
        build = build_of(self._hf_config, self.shape)
        mcore = transformer_config(build, self.shape, self.config, self.dtype)
        chunks = build_chunks(build, mcore, self.shape, self.config.megatron, self.device)
        load_chunks(chunks, self.mapping, self._folder)
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
        head = Head(part, scaling, train.logprob_chunk_tokens, entropy)
        return Pipeline(list(models), head, self.device, routers)
