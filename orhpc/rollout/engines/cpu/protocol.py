"""Validation of requests: converts SGLang's request fields to the engine's own requests.

Field names and meanings are those of SGLang 0.5 (``srt/managers/io_struct.py``,
``srt/sampling/sampling_params.py``).  Unsupported fields raise an error that names them; none is silently
ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from orhpc.models.images import ImageProcessor
from orhpc.models.seeing import ImageFeatures
from orhpc.rollout.engines.cpu.sampling import TOP_K_ALL, SamplingParams
from orhpc.types import PlacedImage
from orhpc.wire.images import expanded, rotary_positions


class BadRequest(ValueError):
    """The request is malformed or asks for an unsupported feature; HTTP 400."""


class NotServing(RuntimeError):
    """The engine cannot serve now; HTTP 503."""


@dataclass(slots=True)
class EngineRequest:
    """One generation request; the scheduler fills in the fields from ``output`` on."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    return_logprob: bool
    routes_start: int | None
    done: asyncio.Future[None]

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    error: Exception | None = None
    weight_version: str = ""
    cached_tokens: int | None = None
    slot: int = -1
    computed: int = 0
    """Number of positions of prompt and output whose keys and values are in the slot."""
    kept_routes: NDArray[Any] | None = None
    """Route rows recorded before a retraction; kept when their tokens are recomputed with newer weights."""
    routes: NDArray[Any] | None = None
    images: tuple[PlacedImage, ...] = ()
    features: ImageFeatures | None = None
    """Of all images, once a prompt piece needs them."""

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Rotary positions ``[3, end - start]`` of a part of the context."""
        return rotary_positions(self.length, self.images)[:, start:end]

    @property
    def keys(self) -> NDArray[np.int32]:
        """The context as the prefix cache compares it: the tokens of different images differ."""
        keys = np.asarray(self.context, dtype=np.int32)
        for placed in self.images:
            digest = hashlib.blake2b(placed.image.png, digest_size=4).digest()
            keys[placed.start : placed.end] = ~(int.from_bytes(digest) & 0x7FFF_FFFF)
        return keys

    @property
    def context(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


# SGLang fields that do not affect token ids, or that are supported only at their neutral values.
_IGNORED_SAMPLING = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
}
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_new_tokens": (None, 0),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
}
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "text": (None,),
    "input_embeds": (None,),
    "video_data": (None,),
    "audio_data": (None,),
    "stream": (None, False),
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_hidden_states": (None, False),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    # Sent explicitly by sglang-router in every request.
    "model": (None,),
    "background": (None, False),
    "return_bytes": (None, False),
    "return_entropy": (None, False),
}
_IGNORED_FIELDS = {
    "return_text_in_logprobs",
    "log_metrics",
    "priority",
    "routing_key",
    "extra_key",
    "no_logs",
}
_USED_FIELDS = {
    "rid",
    "input_ids",
    "image_data",
    "sampling_params",
    "return_logprob",
    "return_routed_experts",
    "routed_experts_start_len",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits against which requests are validated."""

    vocabulary: int
    context: int
    routes: bool
    """Whether expert routes are recorded."""
    images: ImageProcessor | None = None
    """Of a model that sees."""
    image_token: int = -1
    """Placeholder of an image in a prompt."""


def parse_generate(body: Any, limits: Limits, default_seed: int) -> tuple[list[EngineRequest], bool]:
    """Validate a ``/generate`` body; returns its requests and whether it was a single one.

    ``default_seed`` is used for requests without ``sampling_seed``.  Must run inside an event loop,
    because each request contains a future.  Raises BadRequest.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    for name, value in body.items():
        if name in _NEUTRAL_FIELDS:
            if value not in _NEUTRAL_FIELDS[name]:
                raise BadRequest(f"{name}={value!r} is not supported by the cpu engine")
        elif name not in _USED_FIELDS and name not in _IGNORED_FIELDS:
            raise BadRequest(f"unknown field {name!r}")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids cannot be empty: the cpu engine accepts token ids only")
    single = not isinstance(ids[0], list)
    prompts = [ids] if single else ids
    spread = [_per_request(body, name, len(prompts)) for name in ("rid", "sampling_params", "return_logprob")]
    routes_start = _routes_start(body, limits)
    images = _images(body.get("image_data"), prompts, limits) if body.get("image_data") else ()
    requests = [
        _request(prompt, rid, params, logprob, routes_start, limits, default_seed + i)
        for i, (prompt, rid, params, logprob) in enumerate(zip(prompts, *spread, strict=True))
    ]
    for request in requests:
        request.images = images
    return requests, single


def _images(data: Any, prompts: list[Any], limits: Limits) -> tuple[PlacedImage, ...]:
    """Read the images of a single prompt, and replace its placeholders by the images' tokens, as SGLang does
    with the prompts of models that see."""
    if limits.images is None:
        raise BadRequest("image_data: this model does not see images")
    if len(prompts) != 1 or not isinstance(data, list):
        raise BadRequest("image_data must be a list, for one prompt")
    try:
        images = [limits.images.read(pybase64.b64decode(one, validate=True)) for one in data]
        prompts[0], placed = expanded(prompts[0], images, limits.image_token)
    except (ValueError, TypeError) as error:
        raise BadRequest(f"image_data: {error}") from None
    return tuple(placed)


def _per_request(body: dict[str, Any], name: str, count: int) -> list[Any]:
    value = body.get(name)
    if isinstance(value, list):
        if len(value) != count:
            raise BadRequest(f"{name} has {len(value)} entries for {count} prompts")
        return value
    if name == "rid" and value is not None and count > 1:
        return [f"{value}_{i}" for i in range(count)]
    return [value] * count


def _routes_start(body: dict[str, Any], limits: Limits) -> int | None:
    start = body.get("routed_experts_start_len", 0)
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise BadRequest(f"routed_experts_start_len={start!r} is not a position")
    if not body.get("return_routed_experts"):
        return None
    if not limits.routes:
        raise BadRequest("return_routed_experts needs a server started with --enable-return-routed-experts")
    return start


def _request(
    prompt: Any, rid: Any, sampling: Any, logprob: Any, routes_start: int | None, limits: Limits, seed: int
) -> EngineRequest:
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("input_ids cannot be empty")
    try:
        ids = np.asarray(prompt)
    except ValueError as error:
        raise BadRequest("input_ids is not a list of integers") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadRequest("input_ids is not a list of integers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocabulary:
        raise BadRequest(f"input_ids has {low if low < 0 else high}: ids are 0 .. {limits.vocabulary - 1}")
    if rid is not None and not isinstance(rid, str):
        raise BadRequest("rid is not a string")
    params = parse_sampling(sampling, limits.vocabulary, seed)
    if len(prompt) >= limits.context:
        raise BadRequest(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({limits.context} tokens)."
        )
    if len(prompt) + params.max_new_tokens > limits.context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limits.context} tokens: "
            f"{len(prompt)} input and {params.max_new_tokens} new tokens."
        )
    if routes_start is not None and routes_start > len(prompt):
        raise BadRequest(
            f"routed_experts_start_len={routes_start} is beyond the prompt's {len(prompt)} tokens"
        )
    return EngineRequest(
        rid=rid or uuid.uuid4().hex,
        prompt=prompt,
        params=params,
        return_logprob=bool(logprob),
        routes_start=routes_start,
        done=asyncio.get_running_loop().create_future(),
    )


def parse_sampling(given: Any, vocabulary: int, default_seed: int) -> SamplingParams:
    """Validate SGLang's ``sampling_params``; null means a parameter's default.  Raises BadRequest."""
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise BadRequest("sampling_params is not an object")
    known = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"}
    for name, value in given.items():
        if name in _NEUTRAL_SAMPLING:
            if value not in _NEUTRAL_SAMPLING[name]:
                raise BadRequest(f"sampling parameter {name}={value!r} is not supported by the cpu engine")
        elif name not in known and name not in _IGNORED_SAMPLING and name != "sampling_seed":
            raise BadRequest(f"unknown sampling parameter {name!r}")
    temperature = _number(given, "temperature", 1.0, 0.0, math.inf)
    top_k = _integer(given, "top_k", -1, -1)
    if top_k == 0:
        raise BadRequest("top_k must be at least 1, or -1 for no limit")
    if temperature < 1e-6:  # SGLang's bound for greedy decoding
        temperature, top_k = 1.0, 1
    top_p = _number(given, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise BadRequest("top_p must be in (0, 1]")
    stop = given.get("stop_token_ids") or []
    if not isinstance(stop, list) or not all(_is_int(t) and 0 <= t < vocabulary for t in stop):
        raise BadRequest("stop_token_ids is not a list of token ids")
    ignore_eos = given.get("ignore_eos") or False
    if not isinstance(ignore_eos, bool):
        raise BadRequest("ignore_eos is not a boolean")
    return SamplingParams(
        max_new_tokens=_integer(given, "max_new_tokens", 128, 1),
        temperature=temperature,
        top_p=top_p,
        top_k=TOP_K_ALL if top_k == -1 else top_k,
        min_p=_number(given, "min_p", 0.0, 0.0, 1.0),
        stop_token_ids=frozenset(stop),
        ignore_eos=ignore_eos,
        seed=_integer(given, "sampling_seed", default_seed, -(1 << 63)),
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(given: dict[str, Any], name: str, default: int, least: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if not _is_int(value) or value < least or value >= 1 << 63:
        raise BadRequest(f"{name}={value!r} is not an integer of at least {least}")
    return value


def _number(given: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise BadRequest(f"{name}={value!r} is not a number in [{low}, {high}]")
    return float(value)
