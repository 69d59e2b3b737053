"""Client of SGLang's HTTP protocol: token ids in; token ids, log-probabilities and routes out."""

from orhpc.rollout.client.http import EngineClient
from orhpc.rollout.client.pool import EnginePool

__all__ = ["EngineClient", "EnginePool"]
