"""A training step of bare megatron-core: its model, loss, schedule and optimizer, with prepared input."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from orhpc.config import Config
from orhpc.models import read_shape
from orhpc.train.batch import PackedBatch
from orhpc.train.hf_model import load_model_config
from orhpc.train.megatron.hf_stream import HfFolder
from orhpc.train.megatron.model import build_chunks, transformer_config
from orhpc.train.megatron.model_config import build_of


class Bare:
    """The same model in the same process groups; cross-entropy by TransformerEngine's fused kernel."""

    def __init__(self, config: Config, folder: Path, batches: Sequence[PackedBatch]) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        shape = HfFolder(folder).language_part(read_shape(folder))
        build = build_of(load_model_config(str(folder), config.model, quantized=True), shape)
        mcore = transformer_config(build, shape, config, torch.bfloat16)
        mcore.cross_entropy_loss_fusion = True
        mcore.cross_entropy_fusion_impl = "te"
        (chunk,) = build_chunks(build, mcore, shape, config.megatron, torch.device("cuda"))
        for parameter in chunk.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        self.model: Any = DistributedDataParallel(mcore, settings, chunk.model.train())
        mcore.finalize_model_grads_func = finalize_model_grads
        mcore.no_sync_func = self.model.no_sync
        self.config = mcore
        options = OptimizerConfig(
            optimizer="adam", lr=1e-6, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        )
        self.optimizer: Any = get_megatron_optimizer(options, [self.model], use_gloo_process_groups=False)
        self.inputs = [_inputs(batch) for batch in batches]

    def step(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(self.inputs),
            model=[self.model],
            num_microbatches=len(self.inputs),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()

    def timed(self, count: int) -> list[float]:
        seconds: list[float] = []
        for _ in range(count):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds


def _inputs(batch: PackedBatch) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    def moved(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).cuda()

    bounds = moved(batch.cu_seqlens)
    longest = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
    )
    return {
        "input_ids": moved(batch.input_ids_P)[None],
        "position_ids": moved(batch.position_ids_P)[None],
        "labels": moved(batch.targets_P)[None],
        "mask": moved(batch.loss_mask_P),
        "packed_seq_params": params,
    }


def _forward(inputs: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = dict(next(inputs))
    mask = batch.pop("mask")
    losses = model(attention_mask=None, **batch)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total = (output.view(-1).float() * mask).sum()
        return total, mask.sum(dtype=torch.int), {}

    return losses, loss
