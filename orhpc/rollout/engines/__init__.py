"""Inference engine processes, which serve tokens over HTTP: SGLang on GPUs and our own engine on CPUs.

Input: a model folder, and weights from trainers.  Output: an address for :mod:`orhpc.rollout.client`.
"""
