"""Models, training text, trainers and engines for measuring how their log-probabilities differ.

Shared by ``benchmarks/gpu/moe_mismatch.py`` and ``tests/gpu/exact_mode.py``.  Tokens are bytes: no tokenizer
is needed, and a few million of them suffice to train beyond the random initialization.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from orhpc.config import Config
from orhpc.driver.fleet.weight_sync import WeightSync
from orhpc.process.ports import free_ports
from orhpc.rollout.client import EngineClient, EnginePool
from orhpc.rollout.engines.process import EngineProcess
from orhpc.rollout.engines.sglang_command import EnginePart
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role
from orhpc.train.batch import PackedBatch, plan_batches
from orhpc.train.weights.fp8 import make_quantizer, unchanged
from orhpc.train.weights.rank_sync import RankSync
from orhpc.train.weights.update_requests import SyncPlan, SyncReport
from orhpc.types import Location, MiniBatch, Sample, Sampling
from orhpc.wire.routes import RouteShape
from tests.gpu.sglang_check import KERNELS

WORK = Path("/tmp/mismatch")
KEY = "key-of-a-measurement"
HELD_OUT = 16
"""One of this many files of the text is reserved for prompts and the held-out loss."""

# --- models ---------------------------------------------------------------------------------------------


def write_config(folder: Path, content: Mapping[str, Any]) -> Path:
    """A model folder without weights, which suffices for an engine with ``load_format: dummy``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(**content)
    model: Any = AutoModelForCausalLM._model_mapping[type(config)]  # pyright: ignore
    config.architectures = [model.__name__]
    config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 4096}))
    return folder


def write_weights(folder: Path, device: str, spread: float = 0.02) -> None:
    """Random weights of a folder's config in bf16: norms 1, everything else normal."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from orhpc.train.hf_model import HfNames

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names, weights = HfNames(model), {}
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(std=spread)
        if name.endswith("norm.weight"):
            whole.fill_(1.0)
        weights |= {n: t.cpu().contiguous() for n, t in names.split(name, whole).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# --- text -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """uint8: Python source files of this machine, in a fixed shuffled order."""

    train_N: np.ndarray
    held_N: np.ndarray


def read_text(limit: int = 24 << 20) -> Text:
    """The standard library's and torch's source, up to ``limit`` bytes."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent]
    files = sorted({path for root in roots for path in root.rglob("*.py")})
    np.random.default_rng(0).shuffle(files)  # type: ignore[arg-type]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(files):
        content = path.read_bytes()
        parts[number % HELD_OUT == 0].append(content)
        size += len(content)
        if size > limit:
            break
    train, held = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return Text(train, held)


def pieces(data: np.ndarray, rng: np.random.Generator, count: int, length: int) -> Iterator[np.ndarray]:
    """Int32 prompts, each from the beginning of a line."""
    starts = np.nonzero(data[: -length - 1] == ord("\n"))[0] + 1
    for start in rng.choice(starts, count, replace=False):
        yield data[start : start + length].astype(np.int32)


def plain_samples(tokens: Sequence[np.ndarray]) -> list[Sample]:
    """All tokens except each sample's first count as sampled, with probability 1 and advantage 1.

    The gradient of GRPO's loss is then that of the next-token loss, and ``rollout_kl_k1`` is its value.
    """
    found: list[Sample] = []
    for number, tokens_T in enumerate(tokens):
        length = len(tokens_T)
        arrays = {
            "tokens_T": tokens_T,
            "loss_mask_T": np.arange(length) > 0,
            "logprobs_T": np.zeros(length, np.float32),
        }
        found.append(Sample(f"0.{number}", length, length - 1, 1.0, Location(arrays=arrays)))
    return found


# --- trainers -------------------------------------------------------------------------------------------


def trainer_config(device: str, *, dtype: str = "bfloat16", precision: str = "bf16", **more: Any) -> Config:
    """A run's config with one trainer rank; ``more``: sections ``train``, ``rollout``, ``megatron``."""
    train = {
        "global_batch_size": 8, "lr_warmup_steps": 10, "adam_beta2": 0.95, "max_tokens_per_gpu": 32768,
        **more.get("train", {}),
    }  # fmt: skip
    return Config.model_validate(
        {
            "model": {"dtype": dtype},
            "precision": precision,
            "placement": {"device": device, "devices_per_node": 1},
            "engine": {"tp": 1, "backend": "sglang" if device == "cuda" else "cpu"},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
            "rollout": {"batch_size": 2, "n_samples": 4, **more.get("rollout", {})},
            "train": train,
            "megatron": more.get("megatron", {}),
            "algorithm": {"normalise_loss": "token"},
        }
    )


def start_trainer(config: Config, folder: Path) -> TrainerRank:
    trainer = TrainerRank(config, str(folder), 0, 1, 4)
    trainer.connect("127.0.0.1", free_ports(1, "127.0.0.1")[0], 60.0)
    trainer.build()
    return trainer


def close_trainer(trainer: TrainerRank) -> None:
    trainer.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def planned(trainer: TrainerRank, samples: Sequence[Sample]) -> MiniBatch:
    budget = trainer.config.train.max_tokens_per_gpu
    return plan_batches(samples, ranks=1, n_minibatches=1, max_tokens=budget).minibatches[0]


def pretrain(
    trainer: TrainerRank, text: Text, *, seconds: float, tokens: int, length: int = 1024
) -> list[float]:
    """Next-token training for some seconds with ``tokens`` per step; returns the losses in nats per byte."""
    rng = np.random.default_rng(1)
    losses: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        samples = plain_samples(list(pieces(text.train_N, rng, tokens // length, length)))
        metrics = trainer.step([planned(trainer, samples)], step=len(losses))
        losses.append(metrics["rollout_kl_k1"])
        if len(losses) % 20 == 1:
            print(f"   step {len(losses)}: {losses[-1]:.3f} nats a byte", flush=True)
    return losses


def batch_logprobs(trainer: TrainerRank, batch: PackedBatch) -> dict[str, np.ndarray]:
    """Log-probabilities of each sample's sampled tokens, by one forward pass."""
    (found,) = trainer.backend.logprobs(Batches([batch], 1), Role.POLICY)
    assert found is not None
    values_P = found.float().cpu().numpy()
    at = {name: batch.loss_mask_P & (batch.segments_P == s) for s, name in enumerate(batch.sample_ids)}
    return {name: values_P[here] for name, here in at.items()}


def logprobs(trainer: TrainerRank, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for micro_batch in planned(trainer, samples).ranks[0]:
        found |= batch_logprobs(trainer, trainer.load_batch(micro_batch))
    return found


# --- engines --------------------------------------------------------------------------------------------


def start_engine(name: str, folder: Path, device: str, **engine: Any) -> EngineProcess:
    """Start SGLang's server, or the CPU engine, for a model folder; SGLang does not need its weights yet."""
    extra = KERNELS | {"weight_version": "0", "load_format": "dummy"} | engine.pop("extra", {})
    record_routes = engine.pop("record_routes", False)
    precision = engine.pop("precision", "bf16")
    context = engine.pop("context", 1024)
    # A high memory fraction tolerates other processes that allocate memory between the engine's two
    # measurements; max_total_tokens limits its own memory.
    section: dict[str, Any] = {"tp": 1, "memory_fraction": 0.95, "extra": extra, **engine}
    if device == "cpu":
        section = {"tp": 1, "backend": "cpu", "dtype": "float32", "max_running": 8}
        precision = "bf16"
    config = Config.model_validate(
        {
            "precision": precision,
            "engine": section,
            "placement": {"device": device, "devices_per_node": 1},
            "rollout": {
                "max_total_tokens": context,
                "max_response_tokens": 1,
                "record_routes": record_routes,
            },
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )
    port, meeting = free_ports(2, "127.0.0.1")
    part = EnginePart(devices=(0,), rendezvous=f"127.0.0.1:{meeting}") if device == "cuda" else None
    log = WORK / f"{name}.log"
    log.unlink(missing_ok=True)
    process = EngineProcess(config, str(folder), "127.0.0.1", port, KEY, str(log), 0, part=part)
    process.start()
    return process


def client_of(process: EngineProcess, folder: Path) -> EngineClient:
    shape = RouteShape.of_config(json.loads((folder / "config.json").read_text()))
    return EngineClient(process.url, key=KEY, request_timeout_s=240.0, route_shape=shape)


class _OneTrainer:
    """The part of a run's trainers that a weight sync uses, for one rank in this process."""

    def __init__(self, rank: TrainerRank) -> None:
        self._rank, self.ranks = rank, [rank]

    async def send_weights(self, plan: SyncPlan) -> list[SyncReport]:
        return await self.all(TrainerRank.send_weights, plan)

    async def all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return await self.all_within(None, method, *args, **kwargs)

    async def all_within(
        self, timeout_s: float | None, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        call = asyncio.to_thread(method, self._rank, *args, **kwargs)
        return [await asyncio.wait_for(call, timeout_s)]


async def give_weights(trainer: TrainerRank, url: str, *, quantized: bool, rounds: int = 1) -> list[float]:
    """Weight syncs through CUDA IPC to one engine, as in a run; returns the seconds of each."""
    inside: Any = trainer
    inside._quantize = make_quantizer(power_of_two=False) if quantized else unchanged
    bucket_bytes = trainer.config.engine.sync_bucket_mb << 20
    inside._sync = RankSync(trainer.backend, inside._quantize, bucket_bytes, trainer.device, trainer.rank)
    trainer.sync.buckets()
    async with EnginePool([url], key=KEY, request_timeout_s=240.0) as pool:
        engines = SimpleNamespace(
            pool=pool, key=KEY, config=trainer.config, by_handle={url: [0]}, by_broadcast={}, group_name=None
        )
        trainers: Any = _OneTrainer(trainer)
        sync = WeightSync(trainers, cast(Any, engines), WORK)
        return [(await sync.send(1))["sync_seconds_total"] for _ in range(rounds)]


@dataclass(frozen=True, slots=True)
class Response:
    """An engine's response to one prompt."""

    name: str
    prompt: np.ndarray
    tokens_N: np.ndarray
    logprobs_N: np.ndarray
    routes: np.ndarray | None

    def sample(self) -> Sample:
        tokens_T = np.concatenate([self.prompt, self.tokens_N]).astype(np.int32)
        mask_T = np.arange(len(tokens_T)) >= len(self.prompt)
        logprobs_T = np.zeros(len(tokens_T), np.float32)
        logprobs_T[mask_T] = self.logprobs_N
        arrays: dict[str, Any] = {"tokens_T": tokens_T, "loss_mask_T": mask_T, "logprobs_T": logprobs_T}
        if self.routes is not None:
            arrays["routes"] = self.routes
        location = Location(arrays=arrays)
        return Sample(self.name, len(tokens_T), len(self.tokens_N), 1.0, location)


async def ask(
    client: EngineClient,
    prompts: Sequence[np.ndarray],
    tokens: int,
    *,
    concurrent: int,
    routes: bool = False,
) -> list[Response]:
    """Sample one response per prompt at temperature 1."""
    gate = asyncio.Semaphore(concurrent)

    async def one(number: int) -> Response:
        sampling = Sampling(max_new_tokens=tokens, seed=number)
        async with gate:
            got = await client.generate(
                prompts[number], sampling, rid=f"r{number}", routes_start=0 if routes else None
            )
        return Response(f"0.{number}", prompts[number], got.tokens_N, got.logprobs_N, got.routes)

    return list(await asyncio.gather(*(one(number) for number in range(len(prompts)))))


# --- results --------------------------------------------------------------------------------------------


class Report:
    """Writes results to disk as they are measured, so that they survive any end of the program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = time.monotonic()
        self.found: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        shown = json.dumps(value)
        print(f"[{time.monotonic() - self.began:6.1f}] {name}: {shown[:400]}", flush=True)

    def failed(self, what: str, error: BaseException) -> None:
        self.put(f"failed: {what}", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")


def log_tail(name: str, out: Path, characters: int = 6000) -> None:
    """Return the end of an engine's log, without progress bars."""
    log = WORK / f"{name}.log"
    text = log.read_text(errors="replace") if log.exists() else "no log"
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip() and "%|" not in line]
    (out / f"{name}.tail.txt").write_text("\n".join(lines)[-characters:] + "\n")
