"""Encoding and decoding of ``/generate``.

Field names are SGLang's (0.5, ``srt/managers/io_struct.py``).  The sampled ids are read from
``output_token_logprobs``, ``[(logprob, id, None), ...]``, so that each id has its own log-probability.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from orhpc.errors import EngineUnavailable
from orhpc.types import FinishReason, Generation, PlacedImage, Sampling
from orhpc.wire.images import collapsed
from orhpc.wire.routes import RouteShape, decode_routes

TokenIds = Sequence[int] | NDArray[np.integer[Any]]

_MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError)
"""Raised when decoding an answer of unexpected structure; a JSONDecodeError is a ValueError."""
_INT32_MAX = 2**31 - 1
_SEEDS = 1 << 31
"""Some SGLang releases store seeds as int32."""
_FRAME_BYTES = 1 << 20
"""Of a generation without any token."""
_TOKEN_BYTES = 1 << 10
"""Of one token: its id twice, its log-probability, and the text that it stands for, in JSON."""
_ROUTE_BYTES = 6
"""Of one expert's index: int32 in base64, which makes four characters of three bytes, rounded up."""


def generate_body(
    prompt_ids: TokenIds,
    sampling: Sampling,
    *,
    rid: str,
    routes_start: int | None,
    images: Sequence[PlacedImage] = (),
) -> bytes:
    """Encode a request; ``routes_start`` requests expert routes from that context position on.

    The engine expands one placeholder per image of ``images`` to all of its tokens.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed % _SEEDS
    is_array = isinstance(prompt_ids, np.ndarray | array)
    ids = np.ascontiguousarray(prompt_ids) if is_array else list(prompt_ids)
    if images:
        ids = collapsed(np.asarray(ids, np.int32), images)
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": ids,
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    if images:
        body["image_data"] = [pybase64.b64encode(p.image.png).decode() for p in images]
    if routes_start is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = routes_start
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def generation_bytes(prompt_tokens: int, sampling: Sampling, routes: RouteShape | None) -> int:
    """The longest answer to a request for a generation.

    ``routes``: the model's, where they were asked for.  All positions are counted, also those before the
    first one that was asked for, so that an engine that sends them all is told so by what reads them.
    """
    limit = _FRAME_BYTES + sampling.max_new_tokens * _TOKEN_BYTES
    if routes is not None:
        rows = prompt_tokens + sampling.max_new_tokens
        limit += rows * routes.layers * routes.topk * _ROUTE_BYTES
    return limit


def read_generation(
    data: bytes,
    url: str,
    *,
    prompt_tokens: int,
    routes_start: int | None,
    route_shape: RouteShape | None,
    vocabulary: int | None,
    images: bool = False,
    stops: Collection[int] = (),
) -> Generation:
    """Decode an answer to :func:`generate_body`; ``vocabulary``: number of token ids, if known.

    ``images``: the request had some, so the engine must have expanded it to ``prompt_tokens``.
    ``stops``: its ``stop_token_ids``; the generation ends with the first, whatever the engine says.
    Raises EngineUnavailable for an answer that is not SGLang's, and RoutesMissing for missing or
    impossible routes; without routes, an aborted answer counts as one without tokens.
    """
    try:
        meta = orjson.loads(data)["meta_info"]
        finish = FinishReason(meta["finish_reason"]["type"])
        sampled = meta.get("output_token_logprobs") or []
        tokens = _ids([entry[1] for entry in sampled])
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            logprobs = np.array([entry[0] for entry in sampled], dtype=np.float32)
        version = read_version(meta.get("weight_version"), url)
        completion = int(meta["completion_tokens"])
        if finish is FinishReason.ABORT and _was_retracted(
            meta, routes=routes_start is not None, images=images
        ):
            return aborted(prompt_tokens, version)
        read_tokens = int(meta["prompt_tokens"]) if images and len(tokens) else prompt_tokens
        cached = int(meta.get("cached_tokens") or 0)
    except _MALFORMED as error:
        reason = " ".join(repr(error).split())[:200]
        raise EngineUnavailable(f"engine {url}: the answer is not SGLang's: {reason}") from error
    _refuse_impossible(tokens, logprobs, url, vocabulary)
    if read_tokens != prompt_tokens:
        raise EngineUnavailable(
            f"engine {url}: it read {read_tokens} tokens where a prompt with images has {prompt_tokens}: it "
            "tokenizes the prompt again, or its image processor is not the model folder's"
        )
    if completion != len(tokens):
        raise EngineUnavailable(
            f"engine {url}: {completion} tokens were sampled but {len(tokens)} came with log-probabilities"
        )
    routes = None
    if routes_start is not None and route_shape is not None and len(tokens):
        rows = prompt_tokens + len(tokens) - 1 - routes_start
        routes = decode_routes(meta.get("routed_experts"), route_shape, rows)
    generation = Generation(
        tokens_N=tokens,
        logprobs_N=logprobs,
        finish_reason=finish,
        version=version,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        routes=routes,
        routes_start=routes_start or 0,
    )
    return _ended_by(generation, stops)


def _refuse_impossible(tokens: np.ndarray, logprobs: np.ndarray, url: str, vocabulary: int | None) -> None:
    """Raise EngineUnavailable for ids outside of the vocabulary, and for log-probabilities not finite."""
    # Trainers look up every id in the embedding, where an id outside of it would end them.
    limit = _INT32_MAX if vocabulary is None else vocabulary
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= limit):
        bad = tokens[(tokens < 0) | (tokens >= limit)][0]
        raise EngineUnavailable(f"engine {url}: sampled token id {bad} is outside 0 .. {limit - 1}")
    if not np.isfinite(logprobs).all():
        raise EngineUnavailable(f"engine {url}: a sampled token has no finite log-probability")


def _ended_by(generation: Generation, stops: Collection[int]) -> Generation:
    """The generation up to its first stop token.

    SGLang looks for them last (``Req.check_finished``): one may be what it sampled while it aborted the
    request, or last before the limit; and speculative decoding accepts several tokens at once.
    """
    if generation.finish_reason is FinishReason.STOP:
        return generation
    found = np.flatnonzero(np.isin(generation.tokens_N, list(stops)))
    if not found.size:
        return generation
    kept, routes = int(found[0]) + 1, generation.routes
    return replace(
        generation,
        tokens_N=generation.tokens_N[:kept],
        logprobs_N=generation.logprobs_N[:kept],
        finish_reason=FinishReason.STOP,
        routes=None if routes is None else routes[: len(routes) - len(generation.tokens_N) + kept],
    )


def _was_retracted(meta: dict[str, Any], *, routes: bool, images: bool) -> bool:
    """Whether an aborted answer lacks what was asked for, so that its tokens must be sampled again.

    SGLang (0.5, ``TokenizerManager._handle_abort_req``) answers so a request that waits when it is aborted.
    It has tokens if it was retracted, because the cache was full, but no routes and no length of the prompt.
    """
    return (routes and meta.get("routed_experts") is None) or (images and "prompt_tokens" not in meta)


def aborted(prompt_tokens: int, version: int) -> Generation:
    """The answer to a request of which no token can be used, as if it had been aborted at once."""
    return Generation(
        tokens_N=np.zeros(0, np.int32),
        logprobs_N=np.zeros(0, np.float32),
        finish_reason=FinishReason.ABORT,
        version=version,
        prompt_tokens=prompt_tokens,
    )


def _ids(values: list[Any]) -> NDArray[np.int32]:
    if not set(map(type, values)) <= {int}:  # True would be 1
        raise TypeError("an id of a token is no integer")
    return np.array(values, dtype=np.int32)


def read_version(value: Any, url: str) -> int:
    """Read a ``weight_version`` as a policy version.

    Raises EngineUnavailable for any other value, such as SGLang's initial ``default``: such an engine has not
    received a weight sync yet.
    """
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise EngineUnavailable(
            f"engine {url}: weight version {repr(value)[:60]} is not a policy version; it needs a weight sync"
        ) from None
