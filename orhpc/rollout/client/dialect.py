"""What differs between SGLang's releases on the wire: the one place that knows.

0.5.16 (torch 2.11) takes weight updates at any time and has no sessions.  0.5.23 (torch 2.14) refuses
them outside ``/begin_weight_update`` and ``/end_weight_update``.  A release says which it is by whether
it knows the call.  Both answer ``/weights_checker`` with one entry a rank under ``ranks``; earlier ones
and the cpu engine put theirs under ``payload``.  Options of the command line: ``RENAMED`` in
:mod:`orhpc.rollout.engines.sglang_command`.
"""

from __future__ import annotations

from typing import Any

import orjson

from orhpc.errors import EngineUnavailable

BEGIN_UPDATE = "/begin_weight_update"
END_UPDATE = "/end_weight_update"
ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which sglang-router (0.3) keeps requests together."""


def read_checksums(answer: dict[str, Any], url: str) -> dict[str, str]:
    """One checksum a tensor and rank: ``{"0/model.norm.weight": "53ab..."}``.

    Raises EngineUnavailable for an answer without any.
    """
    try:
        entries = answer.get("ranks")
        if entries is None:
            payload = answer.get("payload")
            entries = payload if isinstance(payload, list) else [payload]
        sums = {
            f"{rank}/{name}": str(value)
            for rank, entry in enumerate(entries)
            for name, value in ((entry or {}).get("checksums") or {}).items()
        }
    except (AttributeError, TypeError):  # of another shape
        sums = {}
    if not sums:
        raise EngineUnavailable(f"engine {url}: /weights_checker gave no checksums")
    return sums


def target_only_fields(*, sessions: bool) -> dict[str, Any]:
    """What keeps sent weights out of the drafter's model, of a release with sessions or without.

    Either release loads what it reads from disk into both.
    """
    return {"selector": "target"} if sessions else {"disable_draft_model": True}


def error_message(data: bytes) -> str:
    """The one line that an error answer says, from any of the forms SGLang has."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        body = data.decode("utf-8", "replace")
    if isinstance(body, dict):
        error = body.get("error")
        nested = error.get("message") if isinstance(error, dict) else error
        body = nested or body.get("message") or body.get("detail") or body
    return " ".join(str(body).split())[:500]
