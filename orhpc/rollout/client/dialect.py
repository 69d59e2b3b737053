"""The differences between SGLang releases in the HTTP protocol.

0.5.16 (torch 2.11) accepts weight updates at any time and has no update sessions.  0.5.23 (torch 2.14)
refuses updates outside ``/begin_weight_update`` and ``/end_weight_update``.  The client detects the release
by whether that endpoint exists.  Both answer ``/weights_checker`` with one entry per rank under ``ranks``;
earlier releases and the cpu engine use ``payload``.  For renamed command-line options see ``RENAMED`` in
:mod:`orhpc.rollout.engines.sglang_command`.
"""

from __future__ import annotations

from typing import Any

from orhpc.errors import EngineUnavailable

BEGIN_UPDATE = "/begin_weight_update"
END_UPDATE = "/end_weight_update"
ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which sglang-router (0.3) sends requests to the same engine."""


def read_checksums(answer: dict[str, Any], url: str) -> dict[str, str]:
    """One checksum per tensor and rank: ``{"0/model.norm.weight": "53ab..."}``.

    Raises EngineUnavailable for an answer without checksums.
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
    except (AttributeError, TypeError):  # unexpected structure
        sums = {}
    if not sums:
        raise EngineUnavailable(f"engine {url}: /weights_checker returned no checksums")
    return sums


def target_only_fields(*, sessions: bool) -> dict[str, Any]:
    """Request fields that exclude the draft model from a weight update, with or without update sessions.

    Without these fields, releases of both kinds load the weights into both models when updating from disk.
    """
    return {"selector": "target"} if sessions else {"disable_draft_model": True}
