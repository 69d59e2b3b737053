"""The trainer's part of :mod:`orhpc.models.forward_check`: a packed forward pass on all ranks.

One rank computes the reference on its host's CPUs: this changes nothing that engines on its device measure
and allocate at the same time, and uses another implementation than the device's.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.models.families import FAMILIES
from orhpc.models.forward_check import (
    BOUNDS,
    Difference,
    Samples,
    plain_logprobs,
    refuse,
    samples_for,
    with_likely_tokens,
)
from orhpc.models.seeing import auto_class, transformers_config
from orhpc.train.backend import Backend, Batches, Role
from orhpc.train.batch import PackedBatch, pack
from orhpc.train.dtypes import DTYPES
from orhpc.train.stopping import agree
from orhpc.types import Location, Sample

if TYPE_CHECKING:
    from orhpc.config import Config

log = logging.getLogger(__name__)

MOST_PARAMETERS = 10_000_000_000
"""Larger models are not compared: loading the reference would take minutes."""
MEMORY_SHARE = 0.5
"""Share of the host's free memory that the float32 reference may use."""
ROUNDING = 4.0
"""Allowed ratio of the trainer's difference to the rounding error of the reference in half precision."""
_MESSAGE_BYTES = 1024


def check_trainer(backend: Backend, config: Config, model_dir: str) -> str:
    """Compare the policy of all ranks with transformers' (collective); return the result or why not compared.

    Raises ModelError on all ranks if the trainer's results differ too much, or if it cannot compute the
    model.
    """
    started = time.perf_counter()
    found = _checked(backend, config, model_dir)
    if backend.reports and backend.data_rank == 0:
        log.info("model check: %s (%.1f s)", found, time.perf_counter() - started)
    return found


def _checked(backend: Backend, config: Config, model_dir: str) -> str:
    if not config.model.check:
        return "not compared with transformers: model.check is false"
    if config.precision == "fp8":
        return "not compared with transformers: the trainer rounds to 8 bits"
    if backend.parameters > MOST_PARAMETERS:
        return (
            f"not compared with transformers: it has more than {MOST_PARAMETERS / 1e9:g} billion parameters"
        )
    settings = config.model
    plain = transformers_config(
        model_dir, trust_remote_code=settings.trust_remote_code, local_files_only=True
    )
    text = ""
    reference: _Reference | None = None
    if backend.reports and backend.data_rank == 0:
        reference, text = _reference(config, plain, model_dir, backend.parameters)
    if text := _shared(text):
        return text
    tokens = _shared_tokens(None if reference is None else reference.samples.tokens)
    ours = _ours(backend, config, plain.model_type, [part.numpy() for part in tokens])
    refusal = ""
    if reference is not None:
        difference = Difference.of(ours, reference.logprobs)
        text = f"within {difference.mean:.2g} nats of transformers on {reference.samples.described}"
        try:
            refuse(
                plain.model_type,
                f"train.backend={config.train.backend} for packed samples",
                difference,
                reference.allowed,
                _advice(config.train.backend, plain.model_type),
            )
        except ModelError as error:
            refusal = str(error)
    if refusal := _shared(refusal):
        raise ModelError(refusal)
    return _shared(text)


def _ours(backend: Backend, config: Config, family: str, samples: list[NDArray[np.int64]]) -> list[Tensor]:
    """Return the trainer's log-probabilities, ``[T - 1]`` per sample; empty if this rank computes none."""
    packed = _packed([(tokens, len(tokens) - 1) for tokens in samples])
    try:
        (ours_P,) = backend.logprobs(Batches([packed], 1), Role.POLICY)
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError) as error:
        raise ModelError(
            f"{family}: train.backend={config.train.backend} cannot compute this model: {_one_line(error)}"
        ) from error
    if ours_P is None:
        return []
    return [part[:-1] for part in ours_P.cpu().split([len(tokens) for tokens in samples])]


def sampled_logprobs(backend: Backend, samples: Sequence[tuple[list[int], int]]) -> list[list[float]] | None:
    """Return the policy's log-probabilities of the last ``n`` tokens of each sample (collective).

    ``samples``: token ids and ``n``.  None on all ranks except the first reporting one.
    """
    packed = _packed([(np.asarray(tokens, np.int64), n) for tokens, n in samples])
    (ours_P,) = backend.logprobs(Batches([packed], 1), Role.POLICY)
    if ours_P is None or not backend.reports or backend.data_rank:
        return None
    parts = ours_P.cpu().split([len(tokens) for tokens, _ in samples])
    return [part[-1 - n : -1].tolist() for part, (_, n) in zip(parts, samples, strict=True)]


def _packed(samples: Sequence[tuple[NDArray[np.int64], int]]) -> PackedBatch:
    """Pack samples, each given as its token ids and how many of the last ones count as sampled."""
    planned: list[Sample] = []
    arrays: list[dict[str, Any]] = []
    for index, (tokens_T, n) in enumerate(samples):
        length = len(tokens_T)
        own = {
            "tokens_T": tokens_T,
            "loss_mask_T": np.arange(length) >= length - n,
            "logprobs_T": np.zeros(length, np.float32),
        }
        planned.append(Sample(f"check.{index}", length, n, 0.0, Location(arrays=own)))
        arrays.append(own)
    return pack(planned, arrays)


@dataclass(frozen=True, slots=True)
class _Reference:
    """Results of transformers."""

    samples: Samples
    logprobs: list[Tensor]
    """float32 ``[T - 1]`` per sample, computed with weights rounded to the model's type."""
    allowed: float
    """Difference in nats that rounding can explain."""


def _reference(config: Config, plain: Any, model_dir: str, parameters: int) -> tuple[_Reference | None, str]:
    """Compute the reference, on one rank; or return None and the reason."""
    free = free_host_bytes()
    if 4 * parameters > MEMORY_SHARE * free:
        return None, (
            f"not compared with transformers: {4 * parameters / 1e9:.1f} GB of weights, "
            f"{free / 1e9:.1f} GB of host memory free"
        )
    longest, threads = config.rollout.max_total_tokens, torch.get_num_threads()
    try:
        samples = samples_for(plain, longest=longest, parameters=parameters, threads=threads)
        return _computed(config, plain, model_dir, samples), ""
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, ImportError, OSError) as error:
        return None, f"not compared with transformers, which cannot compute it here: {_one_line(error)}"


def free_host_bytes(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the host memory this process may still use: of the machine or its control groups (version 2).

    A job with a memory limit is killed when it exceeds it, however much the machine has free.  Inactive page
    cache counts as free: the kernel reclaims it when memory is needed.
    """
    free = [psutil.virtual_memory().available]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []  # no control groups
    for line in lines:
        path = line.removeprefix("0::/")
        group = root / path
        while path != line and group != root:
            limit, used = group / "memory.max", group / "memory.current"
            if limit.is_file() and (bound := limit.read_text().strip()).isdigit():
                files = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                free.append(int(bound) - int(used.read_text()) + (int(files[1]) if files else 0))
            group = group.parent
    return max(0, min(free))


@torch.no_grad()
def _computed(config: Config, plain: Any, model_dir: str, samples: Samples) -> _Reference:
    """Compute it with the family's class in float32, and measure the rounding error of the model's type."""
    # Some releases of transformers select by default an attention that ignores the soft cap.
    capped = getattr(plain.get_text_config(), "attn_logit_softcapping", None)
    model: Any = (
        auto_class(plain)
        .from_pretrained(
            model_dir,
            config=plain,
            dtype=torch.float32,
            attn_implementation="eager" if capped else None,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=True,
        )
        .eval()
    )
    dtype, temperature = DTYPES[config.model.dtype], config.rollout.temperature
    if dtype == torch.float32:
        return _Reference(samples, plain_logprobs(model, samples, temperature), BOUNDS[dtype])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    samples = with_likely_tokens(model, samples)
    theirs = plain_logprobs(model, samples, temperature)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    rounding = Difference.of(plain_logprobs(model, samples, temperature), theirs).mean
    return _Reference(samples, theirs, max(BOUNDS[dtype], ROUNDING * rounding))


def _advice(backend: str, family: str) -> str:
    if backend == "megatron":
        return "train.backend: fsdp may"
    return "train.backend: megatron may" if family in FAMILIES else "no train.backend does"


def _shared(text: str) -> str:
    """Send the text of the comparing rank to all ranks (collective); the others pass an empty one."""
    if dist.get_world_size() == 1:
        return text
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.int64)
    encoded = text.encode()[:_MESSAGE_BYTES]
    message[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.int64)
    agree(message)
    return bytes(byte for byte in message.tolist() if byte).decode("utf-8", "replace")


def _shared_tokens(tokens: Sequence[Tensor] | None) -> list[Tensor]:
    """Send the comparing rank's samples to all ranks (collective); ``tokens`` is None on the others."""
    lengths = torch.tensor([0, 0] if tokens is None else [len(sample) for sample in tokens])
    agree(lengths)
    ids_P = torch.zeros(int(lengths.sum()), dtype=torch.int64) if tokens is None else torch.cat(list(tokens))
    agree(ids_P)
    return list(ids_P.split(lengths.tolist()))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
