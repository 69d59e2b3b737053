"""SGLang's protocol on a transformers model, for machines without a GPU.

``python -m orhpc.rollout.engines.cpu --model-path DIR --port N`` serves it.  The parts: ``server`` (HTTP),
``protocol`` (checks of requests), ``scheduler`` (the compute thread), ``batcher`` (continuous batching),
``kv_cache`` and ``model`` (slots and packed attention), ``sampling``, ``weights`` and ``control`` (updates).
"""
