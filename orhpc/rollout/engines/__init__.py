"""Inference engines: processes that serve tokens over HTTP, SGLang's on GPUs and our own on CPUs.

Consumes: a model folder, weights from trainers.  Produces: an address that :mod:`orhpc.rollout.client` talks
to.
"""
