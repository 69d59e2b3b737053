"""A weight sync by direct calls of SGLang's API against orhpc's, with the same engine and weights."""

from __future__ import annotations

import importlib
import statistics
import time
from typing import Any

import aiohttp
import torch

from tests.gpu import mismatch_kit as kit

ROUNDS = 7
"""Number of syncs per side, alternating; the first is not counted."""
NamedTensor = tuple[str, torch.Tensor]


async def straight_sync(url: str, buckets: list[list[NamedTensor]]) -> float:
    """Post each bucket like SGLang's documentation does; returns seconds.

    Nothing is gathered, paused, versioned or overlapped: each bucket is flattened, posted and answered before
    the next one.
    """
    utils = _sglang("utils")
    flattened = _sglang("weight_sync.tensor_bucket").FlattenedTensorBucket
    headers = {"Authorization": f"Bearer {kit.KEY}"}
    torch.cuda.synchronize()
    began = time.perf_counter()
    async with aiohttp.ClientSession(headers=headers) as session:
        for named in buckets:
            bucket = flattened(named_tensors=named)
            held = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            torch.cuda.synchronize()
            body = {
                "serialized_named_tensors": [
                    utils.MultiprocessingSerializer.serialize(held, output_str=True)
                ],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            async with session.post(f"{url}/update_weights_from_tensor", json=body) as answer:
                output = await answer.json()
                if answer.status != 200 or not output["success"]:
                    raise RuntimeError(f"{answer.status}: {output}")
    return time.perf_counter() - began


def _sglang(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.{name}")


def buckets_of(trainer: Any) -> list[list[NamedTensor]]:
    """Copies of the trainer's weights as they would travel, in its buckets."""
    return [
        [(name, tensor.detach().clone()) for name, tensor in trainer.backend.export(bucket.parameters)]
        for bucket in trainer.sync.buckets()
    ]


async def compare(report: kit.Report, trainer: Any, url: str) -> None:
    """Medians of both sides, and their ratio; the engine holds the same weights before and after."""
    _sglang("utils.patch_torch").monkey_patch_torch_reductions()  # identifies GPUs by UUID
    buckets = buckets_of(trainer)
    ours: list[float] = []
    straight: list[float] = []
    for _ in range(ROUNDS):
        straight.append(await straight_sync(url, buckets))
        ours += await kit.give_weights(trainer, url, quantized=False)
    size = sum(tensor.nbytes for bucket in buckets for _, tensor in bucket) / 1e9
    medians = statistics.median(ours[1:]), statistics.median(straight[1:])
    report.put(
        "sync, ours against straight calls",
        {
            "GB": round(size, 2), "ours_s": medians[0], "straight_s": medians[1],
            "ours_GB/s": size / medians[0], "straight_GB/s": size / medians[1],
            "ratio": medians[1] / medians[0], "ours": ours, "straight": straight,
        },
    )  # fmt: skip
