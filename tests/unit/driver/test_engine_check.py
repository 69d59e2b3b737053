"""An engine that does not sample from the trainer's policy is refused (real CPU engine and trainer rank)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orhpc.config import Config
from orhpc.driver import engine_check
from orhpc.driver.fleet import Workers
from orhpc.driver.runtime import Runtime
from orhpc.errors import EngineUnavailable, ModelError
from orhpc.rollout.client import EnginePool
from orhpc.rollout.engines.process import EngineProcess
from orhpc.rundir import RunDir
from orhpc.train.actor import TrainerRank
from tests.trainer_kit import VOCABULARY, free_port, make_config, save_tiny_model

pytestmark = pytest.mark.slow

KEY = "key-of-the-engine-check"


def config_of(temperature: float = 1.0, dtype: str = "float32") -> Config:
    raw = make_config(temperature=temperature, dtype=dtype).model_dump(mode="json")
    raw["rollout"] |= {"max_total_tokens": 64, "max_response_tokens": 32}
    return Config.model_validate(raw)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def engine(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an engine that serves the model, started for the test."""
    log = str(tmp_path_factory.mktemp("logs") / "engine.log")
    process = EngineProcess(config_of(), folder, "127.0.0.1", free_port(), KEY, log, 0, threads=1)
    process.start()
    try:
        asyncio.run(process.wait_ready(240.0))
        yield process.url
    finally:
        process.stop()


class Rank:
    """The trainers of a run with one rank, in this process."""

    def __init__(self, config: Config, folder: str) -> None:
        self.rank = TrainerRank(config, folder, 0, 1, 1)
        self.rank.connect("127.0.0.1", free_port(), 30)
        self.rank.build()

    async def all(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [None, method(self.rank, *arguments)]  # as if another rank shared the micro-batches


@pytest.fixture
def trainers(request: pytest.FixtureRequest, folder: str) -> Iterator[Rank]:
    made = Rank(getattr(request, "param", None) or config_of(), folder)
    yield made
    made.rank.close()


async def compared(url: str, trainers: Rank, config: Config, folder: str) -> tuple[Any, float]:
    async with EnginePool([url], key=KEY, request_timeout_s=60.0) as pool:
        engines: Any = SimpleNamespace(urls=[url], pool=pool)
        answers = await engine_check.ask(engines, config, folder)
        return answers, await engine_check.compare(trainers, answers, config)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainers", [config_of(0.7), config_of(1.0)], indirect=True, ids=["temperature 0.7", "temperature 1"]
)
def test_an_engine_with_the_trainers_weights_is_accepted(engine: str, trainers: Rank, folder: str) -> None:
    (answers, difference) = asyncio.run(compared(engine, trainers, trainers.rank.config, folder))
    assert difference < 1e-4
    (answer,) = answers
    assert len(answer.tokens) == engine_check.PROMPT_TOKENS + len(answer.logprobs)
    assert 1 <= len(answer.logprobs) <= engine_check.SAMPLED_TOKENS
    assert max(answer.tokens) < VOCABULARY


def _perturbed(trainers: Rank, std: float) -> None:
    generator = torch.Generator().manual_seed(0)
    policy: Any = trainers.rank.backend
    with torch.no_grad():
        for parameter in policy.policy.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))


def test_an_engine_with_other_weights_is_refused_by_name(engine: str, trainers: Rank, folder: str) -> None:
    """In float32 even a small difference is too large; rounding to bfloat16 explains a larger one."""
    _perturbed(trainers, 0.008)
    with pytest.raises(ModelError, match=f"engine {engine} does not sample from the trainer's policy"):
        asyncio.run(compared(engine, trainers, config_of(), folder))
    _, difference = asyncio.run(compared(engine, trainers, config_of(dtype="bfloat16"), folder))
    assert 0.02 < difference < 0.5
    _perturbed(trainers, 1.0)
    with pytest.raises(
        ModelError, match=r"rounding explains 0\.5; engine\.backend: cpu or train\.backend: fsdp"
    ):
        asyncio.run(compared(engine, trainers, config_of(dtype="bfloat16"), folder))


def test_check_prompts_fit_the_length_limit_and_exceed_the_window_on_gpus() -> None:
    windows = {"sliding_window": 40, "attention_chunk_size": None, "index_topk": 5000}

    def length(total: int, *, cuda: bool, first: bool = True) -> int:
        config = config_of()
        rollout = config.rollout.model_copy(update={"max_total_tokens": total})
        place = config.placement.model_copy(update={"device": "cuda" if cuda else "cpu"})
        config = config.model_copy(update={"rollout": rollout, "placement": place})
        return engine_check._prompt_length(config, windows, first=first)

    assert length(1000, cuda=False) == length(1000, cuda=True, first=False) == 8
    assert length(1000, cuda=True) == 64
    assert length(30, cuda=True) == 6


def test_engines_are_compared_once_and_again_only_if_they_could_not_answer(
    engine: str, trainers: Rank, folder: str
) -> None:
    """They are compared when engines first serve; on shared devices, after the trainer is reloaded."""
    config = config_of().model_copy(update={"model": config_of().model.model_copy(update={"path": folder})})

    async def run() -> list[dict[str, float]]:
        async with EnginePool([engine], key=KEY, request_timeout_s=60.0) as pool:
            working = pool.each
            engines: Any = SimpleNamespace(urls=[engine], pool=pool, shared=[])
            run_dir = RunDir(Path(folder).parent)
            anything: Any = None
            runtime = Runtime(
                config, run_dir, trainers, engines, Workers([]), *[anything] * 6, unchecked=True
            )

            async def failing(*_: Any) -> Any:
                raise EngineUnavailable("away")

            async def nothing() -> None: ...

            found = []
            for each in (failing, working, working):
                pool.each = each  # type: ignore[method-assign]
                _, numbers = await runtime.while_serving(nothing)
                found.append(numbers)
            return found

    first, second, third = asyncio.run(run())
    assert first == third == {}
    assert second["engine_check_diff"] < 1e-4
