"""Any invalid answer of an engine, sent over HTTP, is a typed infrastructure failure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from orhpc.errors import InfraError
from orhpc.rollout.client.dialect import END_UPDATE
from orhpc.rollout.client.http import EngineClient
from orhpc.types import Sampling
from orhpc.wire.routes import RouteShape
from tests.hostile import Hostile, Raw, answer, as_json, hostile_server

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
    shape = RouteShape(layers=2, topk=2, experts=4)
    return EngineClient(server.url, key=None, request_timeout_s=20, route_shape=shape)


async def generate(server: Hostile, routes: bool) -> Any:
    engine = client(server)
    try:
        start = 0 if routes else None
        return await engine.generate([1, 2], Sampling(max_new_tokens=4), rid="a", routes_start=start)
    finally:
        await engine.close()


def test_a_proper_answer_is_read(server: Hostile) -> None:
    server.shapes = {"/generate": as_json({"meta_info": META})}
    assert asyncio.run(generate(server, False)).tokens_N.tolist() == [5]


@pytest.mark.parametrize("shape", [*map(as_json, BROKEN), *map(answer, RAW)])
def test_a_broken_generation_is_the_engines_failure(server: Hostile, shape: Raw) -> None:
    server.shapes = {"/generate": shape}
    with pytest.raises(InfraError) as caught:
        asyncio.run(generate(server, False))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("routes", [None, 3, [], {}, "", "%%%", "AAAA"])
def test_broken_routes_are_the_engines_failure(server: Hostile, routes: Any) -> None:
    server.shapes = {"/generate": as_json({"meta_info": META | {"routed_experts": routes}})}
    with pytest.raises(InfraError):
        asyncio.run(generate(server, True))


@pytest.mark.parametrize("call", ["weight_version", "weight_checksums", "server_info", "end_update"])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"3", b"", b"<html>", b'{"ranks": 3, "success": 0}', b'{"ranks": ["x"]}'],
)
def test_a_broken_answer_to_a_control_call_is_typed(server: Hostile, call: str, body: bytes) -> None:
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
