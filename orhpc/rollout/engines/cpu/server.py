"""HTTP server of the cpu engine: SGLang's native calls."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from orhpc.rollout.engines.cpu.control import WeightControl
from orhpc.rollout.engines.cpu.protocol import BadRequest, EngineRequest, Limits, NotServing, parse_generate
from orhpc.rollout.engines.cpu.scheduler import TAGS, Scheduler
from orhpc.rollout.engines.cpu.weights import BadUpdate
from orhpc.wire.routes import encode_routes

_MAX_BODY_BYTES = 8 << 30
"""Weights arrive in request bodies; requests without the key are refused before their body is read."""

_HEALTH_TOKEN = 0
_LARGE_ROUTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Static information reported by the server."""

    model_path: str
    dtype: str
    max_running_requests: int
    context_length: int
    model_type: str


def json_response(value: Any, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_response(message: str, status: int) -> web.Response:
    """An error response in SGLang's format."""
    return json_response({"error": {"message": message}}, status)


def require_key(key: str | None) -> Middleware:
    """Middleware: all calls except ``/health`` require ``Authorization: Bearer KEY``, as in SGLang."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is not None and (request.method, request.path) != ("GET", "/health"):
            given = request.headers.get("Authorization", "")
            # aiohttp decodes bytes that are not UTF-8 to surrogates.
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {key}".encode()):
                return error_response("Unauthorized", 401)
        try:
            return await handler(request)
        except (BadRequest, BadUpdate) as error:
            return error_response(str(error), 400)
        except NotServing as error:
            return error_response(str(error), 503)

    return check


class EngineServer:
    """The request handlers; :meth:`app` defines the routes."""

    def __init__(
        self, scheduler: Scheduler, control: WeightControl, info: ServerInfo, *, key: str | None, seed: int
    ) -> None:
        self._scheduler = scheduler
        self._control = control
        self._info = info
        self._key = key
        self._next_seed = seed << 32
        model = scheduler.batcher.model
        self._limits = Limits(
            model.vocabulary,
            model.context,
            model.routes is not None,
            model.images,
            getattr(model.model.config, "image_token_id", -1),
        )

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[require_key(self._key)])
        control, both = self._control, ("GET", "POST")
        updates = {
            "/update_weights_from_disk": control.from_disk,
            "/update_weights_from_tensor": control.from_tensor,
            "/update_weights_from_distributed": control.from_distributed,
            "/init_weights_update_group": control.init_group,
            "/destroy_weights_update_group": control.destroy_group,
        }
        for path, call in updates.items():
            app.router.add_route("POST", path, _update_handler(call))
        calls: dict[str, tuple[tuple[str, ...], Handler]] = {
            "/generate": (("POST",), self.generate),
            "/health": (("GET",), self.health),
            "/health_generate": (("GET",), self.health_generate),
            "/server_info": (("GET",), self.server_info),
            "/get_server_info": (("GET",), self.server_info),
            "/model_info": (("GET",), self.model_info),
            "/get_model_info": (("GET",), self.model_info),
            "/abort_request": (("POST",), self.abort_request),
            "/pause_generation": (("POST",), self.pause_generation),
            "/continue_generation": (("POST",), self.continue_generation),
            "/flush_cache": (both, self.flush_cache),
            "/release_memory_occupation": (both, self.release_memory),
            "/resume_memory_occupation": (both, self.resume_memory),
            "/update_weight_version": (("POST",), self.update_weight_version),
            "/get_weights_by_name": (both, self.get_weights_by_name),
            "/weights_checker": (both, self.weights_checker),
        }
        for path, (methods, handler) in calls.items():
            for method in methods:
                app.router.add_route(method, path, handler)
        return app

    async def generate(self, request: web.Request) -> web.Response:
        body = await _body(request)
        started = time.monotonic()
        requests, single = parse_generate(body, self._limits, self._next_seed)
        self._next_seed += len(requests)
        await self._scheduler.generate(requests)
        answers: list[dict[str, Any]] = []
        for done in requests:
            if done.routes is not None and done.routes.size > _LARGE_ROUTES:
                answers.append(await asyncio.to_thread(_answer, done, started))
            else:
                answers.append(_answer(done, started))
        return json_response(answers[0] if single else answers)

    async def health(self, _request: web.Request) -> web.Response:
        reason = self._scheduler.unhealthy
        return web.Response() if reason is None else error_response(reason, 503)

    async def health_generate(self, _request: web.Request) -> web.Response:
        if self._scheduler.paused:
            # As in SGLang, a paused engine is healthy; generating a token would have to wait.
            return await self.health(_request)
        body = {"input_ids": [_HEALTH_TOKEN], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        requests, _ = parse_generate(body, self._limits, 0)
        await self._scheduler.generate(requests)
        return web.Response()

    async def server_info(self, _request: web.Request) -> web.Response:
        scheduler = self._scheduler
        running, waiting = len(scheduler.batcher.running), len(scheduler.batcher.waiting)
        return json_response(
            {
                "model_path": self._info.model_path,
                "dtype": self._info.dtype,
                "max_running_requests": self._info.max_running_requests,
                "context_length": self._info.context_length,
                "weight_version": scheduler.version,
                "enable_return_routed_experts": self._limits.routes,
                "tp_size": 1,
                "engine": "orhpc-cpu",
                "status": scheduler.not_serving or "ready",
                "is_paused": scheduler.paused,
                "internal_states": [{"num_running_reqs": running, "num_waiting_reqs": waiting}],
            }
        )

    async def model_info(self, _request: web.Request) -> web.Response:
        return json_response(
            {
                "model_path": self._info.model_path,
                "tokenizer_path": self._info.model_path,
                "is_generation": True,
                "model_type": self._info.model_type,
                "weight_version": self._scheduler.version,
            }
        )

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await _body(request)
        rid, everything = body.get("rid") or "", bool(body.get("abort_all", False))
        if not isinstance(rid, str):
            raise BadRequest("rid is not a string")
        await self._scheduler.call(lambda: self._scheduler.abort(rid, everything=everything))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await _body(request)).get("mode", "abort")
        await self._scheduler.call(lambda: self._scheduler.pause(mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await _body(request)
        await self._scheduler.call(self._scheduler.resume_stepping)
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, _request: web.Request) -> web.Response:
        if await self._scheduler.call(self._scheduler.batcher.flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="The cache cannot be flushed while requests are running.\n", status=400)

    async def release_memory(self, request: web.Request) -> web.Response:
        tags = _tags(await _body(request))
        await self._scheduler.call(lambda: self._scheduler.release(tags))
        return web.Response()

    async def resume_memory(self, request: web.Request) -> web.Response:
        tags = _tags(await _body(request))
        await self._scheduler.call(lambda: self._scheduler.resume(tags))
        return web.Response()

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        version = body.get("new_version")
        if not isinstance(version, str | int) or isinstance(version, bool):
            raise BadRequest("new_version is missing")
        abort_all = bool(body.get("abort_all_requests", True))
        await self._scheduler.call(lambda: self._scheduler.set_version(str(version), abort_all=abort_all))
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": str(version)})

    async def get_weights_by_name(self, request: web.Request) -> web.Response:
        body = await _body(request)
        name, limit = body.get("name"), body.get("truncate_size", 100)
        if not isinstance(name, str) or not isinstance(limit, int):
            raise BadRequest("name is missing, or truncate_size is not an integer")
        return json_response(await self._scheduler.call(lambda: self._scheduler.weights.values(name, limit)))

    async def weights_checker(self, request: web.Request) -> web.Response:
        action = (await _body(request)).get("action", "checksum")
        if action != "checksum":
            raise BadRequest(f"action {action!r}: the cpu engine supports checksum only")
        checksums = await self._scheduler.call(self._scheduler.weights.checksums)
        return json_response({"success": True, "message": "Success.", "payload": {"checksums": checksums}})


def _update_handler(call: Callable[[dict[str, Any]], Awaitable[str]]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        body = await _body(request)
        try:
            # A disconnecting sender must not interrupt a copy in place.
            message = await asyncio.shield(asyncio.ensure_future(call(body)))
        except (BadRequest, BadUpdate) as error:
            return json_response({"success": False, "message": str(error)}, 400)
        return json_response({"success": True, "message": message})

    return handle


def _tags(body: dict[str, Any]) -> list[str]:
    tags = body.get("tags")
    if tags is None:
        return list(TAGS)
    if not isinstance(tags, list) or not all(isinstance(t, str) for t in tags):
        raise BadRequest("tags is not a list of strings")
    return tags


async def _body(request: web.Request) -> dict[str, Any]:
    data = await request.read()
    if not data:
        return {}
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _answer(request: EngineRequest, started: float) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(request.output),
        "cached_tokens": request.cached_tokens or 0,
        "weight_version": request.weight_version,
        "e2e_latency": time.monotonic() - started,
    }
    if request.return_logprob:
        pairs = zip(request.logprobs, request.output, strict=True)
        meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
    if request.routes is not None:
        meta["routed_experts"] = encode_routes(request.routes)
    return {"text": "", "output_ids": request.output, "meta_info": meta}
