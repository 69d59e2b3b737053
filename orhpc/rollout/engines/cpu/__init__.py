"""SGLang's protocol for a transformers model, for machines without a GPU.

Run ``python -m orhpc.rollout.engines.cpu --model-path DIR --port N``.  Modules: ``server`` (HTTP),
``protocol`` (request validation), ``scheduler`` (the compute thread), ``batcher`` (continuous batching),
``kv_cache`` and ``model`` (slots and packed attention), ``sampling``, ``weights`` and ``control`` (updates).
"""
