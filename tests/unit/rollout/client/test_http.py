"""The client of one engine: requests, answers, refusals and control calls."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from orhpc.errors import ConfigError, EngineUnavailable, PromptTooLong, RoutesMissing, WeightSyncFailed
from orhpc.rollout.client import EngineClient
from orhpc.rollout.client.wire import read_generation
from orhpc.types import FinishReason, Generation
from orhpc.wire.routes import RouteShape, encode_routes
from tests.serialized_weights import receive_broadcast
from tests.unit.rollout.client.kit import SAMPLING, SHAPE, FakeEngine, with_client


@pytest.mark.parametrize("prompt", [[4, 5, 6], (4, 5, 6), np.array([4, 5, 6], dtype=np.int32)])
def test_requests_and_answers_have_sglangs_format(prompt: Any) -> None:
    engine = FakeEngine()
    engine.version = "12"
    got: Generation = with_client(engine, lambda c: c.generate(prompt, SAMPLING, rid="x"))
    (body,) = engine.requests
    assert body == {
        "rid": "x",
        "input_ids": [4, 5, 6],
        "sampling_params": {
            "max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "stop_token_ids": [7], "sampling_seed": 5,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }  # fmt: skip
    assert engine.keys == {"Bearer k"}
    assert got.tokens_N.dtype == np.int32 and got.tokens_N.tolist() == [6, 6, 6]
    assert got.logprobs_N.dtype == np.float32 and got.logprobs_N.tolist() == [0.0, -0.5, -1.0]
    assert got.finish_reason is FinishReason.LENGTH
    assert (got.version, got.prompt_tokens, got.cached_tokens, got.routes) == (12, 3, 2, None)


def test_routes_are_decoded_from_their_start() -> None:
    got: Generation = with_client(
        FakeEngine(), lambda c: c.generate([4, 5, 6], SAMPLING, rid="x", routes_start=2)
    )
    assert got.routes is not None and got.routes.dtype == np.uint8
    assert got.routes.shape == (3, 2, 2) and got.routes_start == 2
    assert got.routes[0].tolist() == [[0, 0], [3, 5]]


def test_large_routes_do_not_block_the_event_loop() -> None:
    shape = RouteShape(48, 8, 128)
    rows = 4000
    wire = encode_routes(np.random.default_rng(0).integers(1, 128, (rows, 48, 8)))

    def change(answer: dict[str, Any]) -> None:
        answer["meta_info"]["routed_experts"] = wire

    engine = FakeEngine()
    engine.change = change

    async def run(client: EngineClient) -> Any:
        return await client.generate([1] * (rows - 2), SAMPLING, rid="x", routes_start=0)

    got = with_client(engine, run, route_shape=shape)
    assert got.routes.shape == (rows, 48, 8)


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        for key in keys:
            answer["meta_info"].pop(key)

    return change


def setting(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["meta_info"].update(values)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without("finish_reason"), EngineUnavailable),
        (without("output_token_logprobs"), EngineUnavailable),
        (setting(finish_reason={"type": "bored"}), EngineUnavailable),
        (setting(output_token_logprobs=[[None, 3, None]] * 3), EngineUnavailable),
        (setting(weight_version="default"), EngineUnavailable),
        (lambda answer: answer.clear(), EngineUnavailable),
        (without("routed_experts"), RoutesMissing),
        (setting(routed_experts="AAAA"), RoutesMissing),
    ],
    ids=["reason", "tokens", "unknown", "logprob", "version", "empty", "routes", "few routes"],
)
def test_incomplete_answers_raise_typed_errors(
    change: Callable[[dict[str, Any]], None], error: type[Exception]
) -> None:
    engine = FakeEngine()
    engine.change = change
    with pytest.raises(error):
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x", routes_start=0))


def test_an_abort_before_the_first_token_gives_an_empty_prefix() -> None:
    engine = FakeEngine()
    engine.change = setting(
        finish_reason={"type": "abort", "message": "m"},
        completion_tokens=0,
        output_token_logprobs=[],
        routed_experts=None,
    )
    got = with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x", routes_start=0))
    assert got.finish_reason is FinishReason.ABORT
    assert len(got.tokens_N) == len(got.logprobs_N) == 0 and got.routes is None


@pytest.mark.parametrize(("routes", "images"), [(None, False), (0, False), (None, True)])
def test_an_abort_of_a_retracted_request_keeps_only_whole_tokens(routes: int | None, images: bool) -> None:
    """SGLang answers with the tokens of a request that waits in its queue again, and with little else."""
    meta = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 6, None]],
        "completion_tokens": 1,
    }
    got = read_generation(
        orjson.dumps({"meta_info": meta}), "u", prompt_tokens=2, routes_start=routes, route_shape=SHAPE,
        vocabulary=None, images=images,
    )  # fmt: skip
    assert got.finish_reason is FinishReason.ABORT and got.version == 3 and got.routes is None
    needs_more = routes is not None or images
    assert got.tokens_N.tolist() == ([] if needs_more else [6])


@pytest.mark.parametrize("reason", ["abort", "length"])
@pytest.mark.parametrize("ids", [[5, 6, 7], [5, 7, 6], [7, 7, 7]])
def test_a_generation_ends_with_its_first_stop_token(reason: str, ids: list[int]) -> None:
    """SGLang reports an abort or the limit even if the last step sampled a stop token: the turn has ended."""
    engine, kept = FakeEngine(), ids.index(7) + 1
    engine.change = setting(
        finish_reason={"type": reason},
        output_token_logprobs=[[-0.5 * i, token, None] for i, token in enumerate(ids)],
    )
    got = with_client(engine, lambda c: c.generate([4, 5, 6], SAMPLING, rid="x", routes_start=2))
    assert got.finish_reason is FinishReason.STOP
    assert got.tokens_N.tolist() == ids[:kept] and len(got.logprobs_N) == kept
    assert got.routes is not None and len(got.routes) == 3 + kept - 1 - 2


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (500, "out of memory", EngineUnavailable),
        (503, "weights are partial", EngineUnavailable),
        (429, "busy", EngineUnavailable),
        (400, "The input (9 tokens) is longer than the model's context length (4 tokens).", PromptTooLong),
        (400, "Requested token count exceeds the model's maximum context length of 4.", PromptTooLong),
        (400, "Multimodal prompt is too long after expanding multimodal tokens.", PromptTooLong),
        (400, "unknown sampling parameter 'x'", ConfigError),
        (401, "Unauthorized", ConfigError),
        (404, "Not Found", ConfigError),
    ],
)
def test_refusals_raise_typed_errors_that_name_the_engine(
    status: int, message: str, error: type[Exception]
) -> None:
    engine = FakeEngine()
    engine.generate_status, engine.message = status, message
    with pytest.raises(error) as failure:
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x"))
    assert engine.url in str(failure.value)
    if status != 401:
        assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_timeout_ends_a_generation_and_aborts_it_on_the_engine() -> None:
    engine = FakeEngine()
    engine.delay_s = 30.0
    start = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="slow"), request_timeout_s=0.2)
    assert time.monotonic() - start < 20
    assert engine.bodies["/abort_request"] == {"rid": "slow"}


def test_an_unreachable_engine_is_unavailable() -> None:
    async def run() -> None:
        client = EngineClient("http://127.0.0.1:9", key=None, request_timeout_s=2)
        try:
            for call in (client.generate([1], SAMPLING, rid="x"), client.health(), client.server_info()):
                with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
                    await call
        finally:
            await client.close()

    asyncio.run(run())


def test_a_closed_connection_means_unavailable() -> None:
    engine = FakeEngine()
    engine.hang_up = True
    with pytest.raises(EngineUnavailable):
        with_client(engine, lambda c: c.generate([4, 5], SAMPLING, rid="x"))


def test_routes_need_the_shape_of_the_model() -> None:
    with pytest.raises(ConfigError, match="route_shape"):
        with_client(
            FakeEngine(), lambda c: c.generate([4], SAMPLING, rid="x", routes_start=0), route_shape=None
        )


def test_control_calls_have_sglangs_bodies() -> None:
    engine = FakeEngine()

    async def run(c: EngineClient) -> None:
        await c.pause_generation("retract")
        await c.continue_generation()
        await c.flush_cache()
        await c.abort_request("r1")
        await c.release_memory_occupation(["weights"])
        await c.resume_memory_occupation()
        await c.init_weights_update_group(
            master_address="h", master_port=5, rank_offset=1, world_size=3, group_name="g", backend="gloo"
        )
        await receive_broadcast(c, ("a",), ("bfloat16",), ((2, 3),), group_name="g", weight_version="4")
        await c.update_weights_from_tensor(["xyz"], load_format="flattened_bucket")
        await c.update_weights_from_disk("/m", weight_version="5")
        await c.update_weight_version("6")
        await c.destroy_weights_update_group("g")

    with_client(engine, run)
    common = {"flush_cache": True, "abort_all_requests": False}
    assert engine.bodies == {
        "/pause_generation": {"mode": "retract"},
        "/continue_generation": {},
        "/flush_cache": {},
        "/abort_request": {"rid": "r1", "abort_all": False},
        "/release_memory_occupation": {"tags": ["weights"]},
        "/resume_memory_occupation": {},
        "/init_weights_update_group": {
            "master_address": "h", "master_port": 5, "rank_offset": 1, "world_size": 3, "group_name": "g",
            "backend": "gloo",
        },
        "/update_weights_from_distributed": {
            "names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g",
            "load_format": None, "weight_version": "4", **common,
        },
        "/update_weights_from_tensor": {
            "serialized_named_tensors": ["xyz"], "load_format": "flattened_bucket", "weight_version": None,
            **common,
        },
        "/update_weights_from_disk": {
            "model_path": "/m", "load_format": "auto", "weight_version": "5", **common,
        },
        "/update_weight_version": {"new_version": "6", "abort_all_requests": False},
        "/destroy_weights_update_group": {"group_name": "g"},
    }  # fmt: skip


def test_a_refused_update_raises_a_failed_sync() -> None:
    engine = FakeEngine()
    engine.refuse = {"/update_weights_from_disk"}
    with pytest.raises(WeightSyncFailed, match="no such parameter"):
        with_client(engine, lambda c: c.update_weights_from_disk("/m"))


def test_a_connection_that_is_not_made_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orhpc.wire.engine_requests._CONNECT_S", 0.2)

    async def run() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = listener.getsockname()
            waiting = [socket.socket() for _ in range(3)]  # more than the queue holds
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(address)
            client = EngineClient(f"http://127.0.0.1:{address[1]}", key="k", request_timeout_s=600)
            with pytest.raises(EngineUnavailable, match="no connection within"):
                await client.generate([1], SAMPLING, rid="r")
            await client.close()
            for one in waiting:
                one.close()

    asyncio.run(run())
