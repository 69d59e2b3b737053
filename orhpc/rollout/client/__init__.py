"""SGLang's native HTTP protocol, from this side: token ids in; ids, log-probabilities and routes out."""

from orhpc.rollout.client.http import EngineClient
from orhpc.rollout.client.pool import EnginePool

__all__ = ["EngineClient", "EnginePool"]
