"""The trainer's part of :mod:`orhpc.model_check`: its packed forward pass, on all ranks, at the start.

The reference is computed by one rank, on its host's processors: what the engines on its device measure and
allocate meanwhile does not change, and it is another implementation than the device's.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.errors import ModelError
from orhpc.model_check import BOUNDS, Difference, Samples, plain_logprobs, refuse, samples_for
from orhpc.train.backend import Backend, Batches, Role
from orhpc.train.batch import PackedBatch, pack
from orhpc.train.stopping import agree
from orhpc.types import Location, Sample

if TYPE_CHECKING:
    from orhpc.config import Config

log = logging.getLogger(__name__)

MOST_PARAMETERS = 10_000_000_000
"""Larger models are not compared: their reference takes minutes to load."""
MEMORY_SHARE = 0.5
"""Of the host's free memory that the reference may take, in float32."""
ROUNDING = 4.0
"""How many times the rounding of the reference itself in half precision may the trainer's be."""
_MESSAGE_BYTES = 1024
_FAILED, _COMPARED = 1, 2


def check_trainer(backend: Backend, config: Config, model_dir: str, parameters: int) -> str:
    """Compare the policy of all ranks with transformers' (collective); return what was found, or why not.

    ``parameters``: of the whole model.  Raises ModelError on all ranks where the trainer computes another
    model, or cannot compute it.
    """
    started = time.perf_counter()
    found = _checked(backend, config, model_dir, parameters)
    if backend.reports and backend.data_rank == 0:
        log.info("the model is %s (%.1f s)", found, time.perf_counter() - started)
    return found


def _checked(backend: Backend, config: Config, model_dir: str, parameters: int) -> str:
    if not config.model.check:
        return "not compared with transformers: model.check is false"
    if config.precision == "fp8":
        return "not compared with transformers: the trainer rounds to 8 bits"
    if parameters > MOST_PARAMETERS:
        return (
            f"not compared with transformers: it has more than {MOST_PARAMETERS / 1e9:g} billion parameters"
        )
    settings = config.model
    plain = AutoConfig.from_pretrained(
        model_dir, trust_remote_code=settings.trust_remote_code, local_files_only=True
    )
    samples = samples_for(
        plain,
        longest=config.rollout.max_total_tokens,
        parameters=parameters,
        threads=torch.get_num_threads(),
    )
    try:
        (ours_P,) = backend.logprobs(Batches([_packed(samples)], 1), Role.POLICY)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        raise ModelError(
            f"{plain.model_type}: train.backend={config.train.backend} cannot compute it: {_one_line(error)}"
        ) from error
    verdict, text = 0, ""
    if ours_P is not None and backend.reports and backend.data_rank == 0:
        verdict, text = _judge(config, plain, model_dir, samples, ours_P.cpu(), parameters)
    verdict, text = _shared(verdict, text)
    if verdict == _FAILED:
        raise ModelError(text)
    return text


def _packed(samples: Samples) -> PackedBatch:
    planned, arrays = [], []
    for index, tokens in enumerate(samples.tokens):
        mask_T = np.ones(len(tokens), np.bool_)
        mask_T[0] = False
        own = {
            "tokens_T": tokens.numpy(),
            "loss_mask_T": mask_T,
            "logprobs_T": np.zeros(len(tokens), np.float32),
        }
        planned.append(Sample(f"check.{index}", len(tokens), len(tokens) - 1, 0.0, Location(arrays=own)))
        arrays.append(own)
    return pack(planned, arrays)


def _judge(
    config: Config, plain: Any, model_dir: str, samples: Samples, ours_P: Tensor, parameters: int
) -> tuple[int, str]:
    """Verdict and text, on the one rank that computes the reference."""
    free = psutil.virtual_memory().available
    if 4 * parameters > MEMORY_SHARE * free:
        return _COMPARED, (
            f"not compared with transformers: {4 * parameters / 1e9:.1f} GB of weights, "
            f"{free / 1e9:.1f} GB of host memory free"
        )
    lengths = [len(tokens) for tokens in samples.tokens]
    ours = [part[:-1] for part in ours_P.split(lengths)]
    dtype = getattr(torch, config.model.dtype)
    try:
        theirs, rounding = _reference(config, plain, model_dir, samples, dtype)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, ImportError, OSError) as error:
        return _COMPARED, f"not compared with transformers, which cannot compute it here: {_one_line(error)}"
    found = Difference.of(ours, theirs)
    other = "megatron" if config.train.backend == "fsdp" else "fsdp"
    try:
        refuse(
            plain.model_type,
            f"train.backend={config.train.backend} for packed samples",
            found,
            max(BOUNDS[dtype], ROUNDING * rounding),
            f"train.backend: {other} may",
        )
    except ModelError as error:
        return _FAILED, str(error)
    return _COMPARED, f"within {found.mean:.2g} nats of transformers on {samples.described}"


@torch.no_grad()
def _reference(
    config: Config, plain: Any, model_dir: str, samples: Samples, dtype: torch.dtype
) -> tuple[list[Tensor], float]:
    """Log-probabilities by the family's own class, of weights that are rounded to ``dtype`` and computed in
    float32; and how far those of a pass in ``dtype`` are from them."""
    # Some releases of transformers choose for themselves an attention that leaves a soft cap out.
    capped = getattr(plain.get_text_config(), "attn_logit_softcapping", None)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=torch.float32,
        attn_implementation="eager" if capped else None,
        trust_remote_code=config.model.trust_remote_code,
        local_files_only=True,
    ).eval()
    temperature = config.rollout.temperature
    if dtype == torch.float32:
        return plain_logprobs(model, samples, temperature), 0.0
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    theirs = plain_logprobs(model, samples, temperature)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return theirs, Difference.of(plain_logprobs(model, samples, temperature), theirs).mean


def _shared(verdict: int, text: str) -> tuple[int, str]:
    """What the one rank that judged has found, on all ranks (collective)."""
    if dist.get_world_size() == 1:
        return verdict, text
    message = torch.zeros(_MESSAGE_BYTES + 1, dtype=torch.int64)
    said = text.encode()[:_MESSAGE_BYTES]
    message[0] = verdict
    message[1 : 1 + len(said)] = torch.tensor(list(said), dtype=torch.int64)
    agree(message)
    found = bytes(byte for byte in message[1:].tolist() if byte)
    return int(message[0]), found.decode("utf-8", "replace")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
