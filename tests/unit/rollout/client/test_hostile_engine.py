"""Any invalid answer of an engine, sent over HTTP, is a typed infrastructure failure."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from orhpc.config.files import load_config
from orhpc.errors import EngineUnavailable, InfraError
from orhpc.models import bundled
from orhpc.rollout.client.dialect import END_UPDATE
from orhpc.rollout.client.http import EngineClient
from orhpc.rollout.client.wire import generation_bytes
from orhpc.rollout.loaded_agent import load_agent
from orhpc.rollout.worker import RolloutWorker
from orhpc.types import Sampling
from orhpc.wire.routes import RouteShape, encode_routes
from tests.hostile import Hostile, Raw, answer, as_json, endless, gzip_bomb, hostile_server

VOCABULARY = 300
SHAPE = RouteShape(layers=2, topk=2, experts=4)
META: dict[str, Any] = {
    "finish_reason": {"type": "stop"},
    "output_token_logprobs": [[-0.1, 5, None]],
    "weight_version": "3",
    "completion_tokens": 1,
    "cached_tokens": 0,
}
BROKEN: list[Any] = [
    None, [], 3, "x", {}, {"meta_info": None}, {"meta_info": []}, {"meta_info": "x"},
    *({"meta_info": META | changed} for changed in (
        {"finish_reason": None}, {"finish_reason": []}, {"finish_reason": {"type": 3}},
        {"finish_reason": {"type": ["stop"]}}, {"output_token_logprobs": "x"}, {"output_token_logprobs": {}},
        {"output_token_logprobs": [3]}, {"output_token_logprobs": [[]]},
        {"output_token_logprobs": [["a", 5]]},
        {"output_token_logprobs": [[-0.1, "a"]]}, {"output_token_logprobs": [[-0.1, 1.5]]},
        {"output_token_logprobs": [[-0.1, 2**40]]}, {"output_token_logprobs": [[-0.1, -1]]},
        {"output_token_logprobs": [[-0.1, VOCABULARY]]}, {"output_token_logprobs": [[-0.1, True]]},
        {"output_token_logprobs": [[-0.1, 5.0]]}, {"output_token_logprobs": [[-0.1, None]]},
        {"output_token_logprobs": [[None, 5]]}, {"output_token_logprobs": [[1e300, 5]]},
        {"completion_tokens": None}, {"completion_tokens": "x"}, {"completion_tokens": []},
        {"completion_tokens": 7}, {"cached_tokens": "x"}, {"cached_tokens": [1]}, {"weight_version": None},
        {"weight_version": "default"}, {"weight_version": []}, {"weight_version": {}},
    )),
]  # fmt: skip
RAW = [b"", b"<html>", b"{", b"\xff", b"[" * 100_000, b'{"meta_info": {"completion_tokens": NaN}}']


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    with hostile_server() as hostile:
        yield hostile


def client(server: Hostile) -> EngineClient:
    return EngineClient(server.url, key=None, request_timeout_s=20, route_shape=SHAPE, vocabulary=VOCABULARY)


async def generate(server: Hostile, routes: bool) -> Any:
    engine = client(server)
    try:
        start = 0 if routes else None
        return await engine.generate([1, 2], Sampling(max_new_tokens=4), rid="a", routes_start=start)
    finally:
        await engine.close()


def sampled(token: int) -> Raw:
    return as_json({"meta_info": META | {"output_token_logprobs": [[-0.1, token, None]]}})


def test_a_correct_answer_is_read(server: Hostile) -> None:
    server.shapes = {"/generate": as_json({"meta_info": META})}
    assert asyncio.run(generate(server, False)).tokens_N.tolist() == [5]
    server.shapes = {"/generate": sampled(VOCABULARY - 1)}
    assert asyncio.run(generate(server, False)).tokens_N.tolist() == [VOCABULARY - 1]


@pytest.mark.parametrize("shape", [*map(as_json, BROKEN), *map(answer, RAW)])
def test_a_broken_generation_is_an_engine_failure(server: Hostile, shape: Raw) -> None:
    server.shapes = {"/generate": shape}
    with pytest.raises(InfraError) as caught:
        asyncio.run(generate(server, False))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("routes", [None, 3, [], {}, "", "%%%", "AAAA"])
def test_broken_routes_are_an_engine_failure(server: Hostile, routes: Any) -> None:
    server.shapes = {"/generate": as_json({"meta_info": META | {"routed_experts": routes}})}
    with pytest.raises(InfraError):
        asyncio.run(generate(server, True))


@pytest.mark.parametrize("call", ["weight_version", "weight_checksums", "server_info", "end_update"])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"3", b"", b"<html>", b'{"ranks": 3, "success": 0}', b'{"ranks": ["x"]}'],
)
def test_a_broken_answer_to_a_control_call_raises_a_typed_error(
    server: Hostile, call: str, body: bytes
) -> None:
    paths = ("/model_info", "/weights_checker", "/server_info", END_UPDATE)
    server.shapes = {path: answer(body) for path in paths}

    async def ask() -> Any:
        engine = client(server)
        try:
            return await getattr(engine, call)()
        finally:
            await engine.close()

    try:
        assert asyncio.run(ask()) is None or call == "server_info"
    except InfraError as error:
        assert str(error)


# --- how much is read -----------------------------------------------------------------------------


async def ask(server: Hostile, call: str) -> Any:
    if call == "generate":
        return await generate(server, False)
    engine = client(server)
    try:
        return await getattr(engine, call)()
    finally:
        await engine.close()


SPACES = b" " * 65536


@pytest.mark.parametrize(
    ("call", "path", "shape", "mebibytes"),
    [
        pytest.param("generate", "/generate", endless("application/json", SPACES), 16, id="a generation"),
        pytest.param("generate", "/generate", gzip_bomb(), 16, id="a gzip bomb"),
        pytest.param("generate", "/generate", endless("text/html", SPACES, status="500 X"), 16, id="error"),
        pytest.param("health", "/health", endless("text/html", SPACES), 16, id="another process on the port"),
        pytest.param("server_info", "/server_info", endless("application/json", SPACES), 200, id="control"),
        pytest.param("end_update", END_UPDATE, endless("application/json", SPACES), 200, id="transfer"),
    ],
)
def test_no_more_is_read_than_a_correct_answer_can_hold(
    server: Hostile, call: str, path: str, shape: Raw, mebibytes: int
) -> None:
    server.shapes = {path: shape}
    tracemalloc.start()
    try:
        with pytest.raises(EngineUnavailable):
            asyncio.run(ask(server, call))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mebibytes << 20


def test_a_long_error_message_keeps_its_type(server: Hostile) -> None:
    text = json.dumps({"error": {"message": "the input is too long"}}).encode()
    server.shapes = {"/generate": answer(text + b" " * (2 << 20), status="400 No")}
    with pytest.raises(Exception, match="input is too long") as caught:
        asyncio.run(generate(server, False))
    assert type(caught.value).__name__ == "PromptTooLong"


def test_the_longest_correct_answer_is_read(server: Hostile) -> None:
    """Every token with a long text, all digits of its log-probability, and one row of routes per position."""
    shape, prompt, count = RouteShape(layers=48, topk=8, experts=128), 3000, 1000
    routes = np.random.default_rng(0).integers(0, 128, (prompt + count - 1, shape.layers, shape.topk))
    entry = [-1.2345678901234567e-100, 2**31 - 2, None]
    meta = META | {
        "output_token_logprobs": [entry] * count,
        "completion_tokens": count,
        "routed_experts": encode_routes(routes),
    }
    body = json.dumps({"text": "\x00" * 128 * count, "output_ids": [2**31 - 2] * count, "meta_info": meta})
    server.shapes = {"/generate": answer(body.encode())}
    sampling = Sampling(max_new_tokens=count)
    limit = generation_bytes(prompt, sampling, shape)
    assert len(body) < limit < 1.5 * len(body)
    assert len(body) - len(meta["routed_experts"]) < generation_bytes(prompt, sampling, None) < limit / 2

    async def longest() -> Any:
        engine = EngineClient(server.url, key=None, request_timeout_s=60, route_shape=shape)
        try:
            return await engine.generate([1] * prompt, sampling, rid="a", routes_start=0)
        finally:
            await engine.close()

    got = asyncio.run(longest())
    assert np.array_equal(got.routes, routes)
    assert got.tokens_N.tolist() == [2**31 - 2] * count


# --- what a worker makes of it --------------------------------------------------------------------


def test_a_worker_refuses_token_ids_outside_the_vocabulary(server: Hostile) -> None:
    folder = bundled.ensure("tiny")
    vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])

    async def ask_worker(token: int) -> list[int]:
        config = load_config("configs/tiny.yaml", ["engine.request_timeout_s=20"])
        worker: Any = RolloutWorker(config, str(folder), 0, "unused", 1, {})
        worker._agent = load_agent(config, str(folder))
        await worker.connect([server.url], "key")
        server.shapes = {"/generate": sampled(token)}
        worker._pool._retries = 0
        try:
            got = await worker._pool.generate([1, 2], Sampling(max_new_tokens=4), rid="a", affinity="a")
            return got.tokens_N.tolist()
        finally:
            await worker._pool.close()

    assert asyncio.run(ask_worker(vocabulary - 1)) == [vocabulary - 1]
    with pytest.raises(
        EngineUnavailable, match=rf"sampled token id {vocabulary} is outside 0 \.\. {vocabulary - 1}"
    ):
        asyncio.run(ask_worker(vocabulary))
